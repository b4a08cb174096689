-- Sessions of operators in the console. Times are seconds since 1970.
CREATE TABLE holdfast_console_sessions (
    id_hash       text NOT NULL PRIMARY KEY,
    subject       text NOT NULL,
    role          text NOT NULL,
    -- JSON: the tenants that may be seen, or null for all.
    tenants       text NOT NULL,
    sees_payloads integer NOT NULL,
    form_token    text NOT NULL,
    used_at       double precision NOT NULL,
    ends_at       double precision NOT NULL
);

-- For operators, who look requests up by what their customers and logs name.
CREATE INDEX idx_holdfast_idempotency_records_key ON holdfast_idempotency_records (idempotency_key);
CREATE INDEX idx_holdfast_idempotency_records_request ON holdfast_idempotency_records (request_id);
CREATE INDEX idx_holdfast_idempotency_records_trace ON holdfast_idempotency_records (correlation_id);
CREATE INDEX idx_holdfast_idempotency_records_created_at ON holdfast_idempotency_records (created_at);
CREATE INDEX idx_holdfast_idempotency_records_by_tenant ON holdfast_idempotency_records (tenant, created_at);
CREATE INDEX idx_holdfast_audit_events_correlation_id ON holdfast_audit_events (correlation_id);
CREATE INDEX idx_holdfast_jobs_correlation_id ON holdfast_jobs (correlation_id);
CREATE INDEX idx_holdfast_job_completions_correlation_id ON holdfast_job_completions (correlation_id);
CREATE INDEX idx_holdfast_job_completions_by_tenant ON holdfast_job_completions (tenant, completed_at);
CREATE INDEX idx_holdfast_dead_letters_by_tenant ON holdfast_dead_letters (tenant, died_at);
CREATE INDEX idx_holdfast_dead_letters_correlation_id ON holdfast_dead_letters (correlation_id);

-- Replays, mismatches and refusals: what leaves no record. Written in batches after the responses,
-- without payloads, and kept for some days. Times are seconds since 1970.
CREATE TABLE holdfast_request_log (
    tenant                text             COLLATE "C" NOT NULL,
    id                    bigint           GENERATED ALWAYS AS IDENTITY,
    at                    double precision NOT NULL,
    endpoint              text             COLLATE "C" NOT NULL,
    -- SHA-256 of the key; empty without one.
    key_hash              text             COLLATE "C" NOT NULL,
    request_id            text             COLLATE "C" NOT NULL,
    correlation_id        text             COLLATE "C" NOT NULL,
    outcome               text             NOT NULL,
    status                integer,
    original_request_id   text,
    expected_body_hash    text,
    received_body_hash    text,
    expected_request_hash text,
    received_request_hash text,
    -- The parts in which a mismatched request differs from the first one.
    differs               text,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX idx_holdfast_request_log_at ON holdfast_request_log (at);
CREATE INDEX idx_holdfast_request_log_request_id ON holdfast_request_log (request_id);
CREATE INDEX idx_holdfast_request_log_correlation_id ON holdfast_request_log (correlation_id);
CREATE INDEX idx_holdfast_request_log_key_hash ON holdfast_request_log (tenant, key_hash);

-- Numbers of the last hours by minute, process and name, for the console and holdfast top.
CREATE TABLE holdfast_request_counts (
    minute  bigint           NOT NULL,
    process text             COLLATE "C" NOT NULL,
    name    text             COLLATE "C" NOT NULL,
    number  double precision NOT NULL,
    PRIMARY KEY (minute, process, name)
);

-- Queues whose jobs are not claimed.
CREATE TABLE holdfast_paused_queues (
    queue     text             COLLATE "C" NOT NULL PRIMARY KEY,
    actor     text             NOT NULL,
    reason    text             NOT NULL,
    paused_at double precision NOT NULL
);

-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. Finds a page of
-- them without a lock, then leases them; if others have locked some, it goes on with the next page.
-- The names of the paused queues are read first, not joined: on Citus they are on the coordinator only.
CREATE OR REPLACE FUNCTION holdfast_claim_jobs(
    p_queues text[], p_limit integer, p_worker text, p_lease_seconds float8, p_alone boolean
) RETURNS TABLE (
    tenant text, job_id uuid, lease bigint, key text, queue text, type text, payload text,
    attempts integer, max_attempts integer, lost integer, request_id text, correlation_id text,
    traceparent text, version bigint, resource_id text, order_key text, enqueued_at timestamptz,
    completed boolean
) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
  SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_left integer := p_limit;
    v_skipped integer := 0;
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM holdfast_paused_queues);
    v_page record;
    v_due record;
    v_is_last boolean;
    v_leased integer;
BEGIN
    LOOP
        v_due := NULL;
        v_is_last := true;
        FOREACH v_queue IN ARRAY p_queues LOOP
            CONTINUE WHEN v_queue = ANY (v_paused);
            SELECT array_agg(tenant) AS tenants, array_agg(id) AS ids, array_agg(state) AS states,
                   array_agg(visible_at) AS times
              INTO v_page
              FROM (SELECT tenant, id, state, visible_at FROM holdfast_jobs
                     WHERE queue = v_queue AND visible_at <= v_now
                     ORDER BY visible_at LIMIT p_limit OFFSET v_skipped) AS page;
            IF v_page.ids IS NULL THEN
                CONTINUE;
            END IF;
            v_is_last := v_is_last AND cardinality(v_page.ids) < p_limit;
            IF v_due IS NULL THEN
                v_due := v_page;
            ELSE
                v_due.tenants := v_due.tenants || v_page.tenants;
                v_due.ids := v_due.ids || v_page.ids;
                v_due.states := v_due.states || v_page.states;
                v_due.times := v_due.times || v_page.times;
            END IF;
        END LOOP;
        EXIT WHEN v_due IS NULL;
        IF cardinality(v_due.ids) > v_left THEN
            SELECT array_agg(tenant) AS tenants, array_agg(id) AS ids, array_agg(state) AS states,
                   array_agg(visible_at) AS times
              INTO v_due
              FROM (SELECT * FROM unnest(v_due.tenants, v_due.ids, v_due.states, v_due.times)
                           AS due(tenant, id, state, visible_at)
                     ORDER BY visible_at LIMIT v_left) AS oldest;
        END IF;
        RETURN QUERY
        SELECT * FROM holdfast_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
        GET DIAGNOSTICS v_leased = ROW_COUNT;
        v_left := v_left - v_leased;
        v_skipped := v_skipped + cardinality(v_due.ids) - v_leased;
        EXIT WHEN v_left <= 0 OR v_is_last;
    END LOOP;
END $$;

-- Leases the jobs that a broker has named, if they are due, not leased, and their queue is not paused.
CREATE OR REPLACE FUNCTION holdfast_claim_named_jobs(
    p_tenants text[], p_ids uuid[], p_worker text, p_lease_seconds float8, p_alone boolean
) RETURNS TABLE (
    tenant text, job_id uuid, lease bigint, key text, queue text, type text, payload text,
    attempts integer, max_attempts integer, lost integer, request_id text, correlation_id text,
    traceparent text, version bigint, resource_id text, order_key text, enqueued_at timestamptz,
    completed boolean
) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_due record;
    v_paused text[] := ARRAY(SELECT queue FROM holdfast_paused_queues);
BEGIN
    SELECT array_agg(job.tenant) AS tenants, array_agg(job.id) AS ids, array_agg(job.state) AS states
      INTO v_due
      FROM unnest(p_tenants, p_ids) AS named(tenant, id)
      JOIN holdfast_jobs AS job ON job.tenant = named.tenant AND job.id = named.id
     WHERE job.visible_at <= v_now AND job.queue <> ALL (v_paused);
    IF v_due.ids IS NOT NULL THEN
        RETURN QUERY
        SELECT * FROM holdfast_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
END $$;

-- When the next job of these queues becomes visible, after an instant; null if there is none. Jobs of
-- paused queues do not count.
CREATE OR REPLACE FUNCTION holdfast_next_visible(p_queues text[], p_after timestamptz)
RETURNS timestamptz LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM holdfast_paused_queues);
    v_next timestamptz;
    v_least timestamptz;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        CONTINUE WHEN v_queue = ANY (v_paused);
        SELECT visible_at INTO v_next FROM holdfast_jobs
         WHERE queue = v_queue AND visible_at > p_after AND visible_at < 'infinity'
         ORDER BY visible_at LIMIT 1;
        v_least := least(v_least, v_next);
    END LOOP;
    RETURN v_least;
END $$;

-- The first due jobs of each queue that are not published, or were published and not leased for some
-- time. That time doubles with each publication: a long queue is no reason to publish all of it again.
-- Only the front of each queue is read, so that a long queue costs no more than a short one. Paused
-- queues are left out.
CREATE OR REPLACE FUNCTION holdfast_jobs_to_publish(
    p_queues text[], p_front integer, p_again_after_seconds float8
) RETURNS TABLE (
    tenant text, job_id uuid, queue text, seq bigint, published integer, visible_at timestamptz
) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM holdfast_paused_queues);
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        CONTINUE WHEN v_queue = ANY (v_paused);
        RETURN QUERY
        SELECT tenant, id, queue, seq, published, visible_at
          FROM (SELECT tenant, id, queue, seq, published, published_at, visible_at
                  FROM holdfast_jobs
                 WHERE queue = v_queue AND visible_at <= v_now
                 ORDER BY visible_at LIMIT p_front) AS front
         WHERE published_at IS NULL
            OR greatest(published_at, visible_at) < v_now - make_interval(
                   secs => p_again_after_seconds * power(2, least(greatest(published, 1) - 1, 6)));
    END LOOP;
END $$;

-- Records that jobs are no longer published: their messages are acknowledged, and the relay publishes
-- them again, with the next message id. Returns them, without those that another transaction has locked.
CREATE OR REPLACE FUNCTION holdfast_unpublish_jobs(p_tenants text[], p_ids uuid[])
RETURNS TABLE (tenant text, job_id uuid) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
    v_tenant text;
    v_ids uuid[];
BEGIN
    FOR v_tenant, v_ids IN
        SELECT named.tenant, array_agg(named.id)
          FROM unnest(p_tenants, p_ids) AS named(tenant, id)
         GROUP BY named.tenant
    LOOP
        RETURN QUERY
        UPDATE holdfast_jobs AS job
           SET published_at = NULL
          FROM (SELECT id FROM holdfast_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids)
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id
        RETURNING job.tenant, job.id;
    END LOOP;
END $$;

-- Moves a waiting job to the dead letters, and returns its queue; null if it does not wait. A claim
-- that has locked the row is waited for: the job then runs and is not cancelled. The caller holds the
-- lock of the order key.
CREATE OR REPLACE FUNCTION holdfast_cancel_job(
    p_tenant text, p_job_id uuid, p_actor text, p_reason text, p_audit_id text
) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_job holdfast_jobs;
BEGIN
    DELETE FROM holdfast_jobs
     WHERE tenant = p_tenant AND id = p_job_id AND state = 'waiting'
    RETURNING * INTO v_job;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO holdfast_dead_letters AS old
           (tenant, job_id, key, queue, type, resource_id, payload, payload_hash, order_key,
            reason, error, attempts, max_attempts, actor, request_id, correlation_id, enqueued_at,
            died_at, version)
    VALUES (p_tenant, p_job_id, v_job.key, v_job.queue, v_job.type, v_job.resource_id,
            v_job.payload, v_job.payload_hash, v_job.order_key, 'cancelled', p_reason,
            v_job.attempts, v_job.max_attempts, v_job.actor, v_job.request_id,
            v_job.correlation_id, v_job.enqueued_at, v_now, v_job.version)
        ON CONFLICT (tenant, job_id) DO UPDATE
       SET payload = excluded.payload, payload_hash = excluded.payload_hash,
           reason = excluded.reason, error = excluded.error, attempts = excluded.attempts,
           deaths = old.deaths + 1, died_at = excluded.died_at, requeued_at = NULL,
           request_id = excluded.request_id, correlation_id = excluded.correlation_id,
           enqueued_at = excluded.enqueued_at, version = excluded.version;
    INSERT INTO holdfast_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at, reason)
    VALUES (p_tenant, p_audit_id, p_actor, 'job.cancelled ' || v_job.queue || ' ' || v_job.type,
            v_job.payload_hash, 200, v_job.key, v_job.version, v_job.request_id,
            v_job.correlation_id, v_now, p_reason);
    RETURN v_job.queue;
END $$;
