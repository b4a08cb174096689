-- Functions of the migrations that lock rows of several tenants in one statement, or find rows by ctid,
-- as Citus needs them: rows are found by their keys, and locked with one statement for each tenant,
-- which Citus sends to the shard of that tenant. They work on every PostgreSQL, and are slower where
-- one statement is possible: see docs/decisions/0056-portable-sql.md.
--
-- At the end, functions for statements of the console that are recursive elsewhere: Citus has no
-- recursion over distributed tables, and no LIMIT in a lateral subquery.

DROP FUNCTION IF EXISTS onceward_lease_locked_jobs(
    tid[], boolean, timestamptz, text, float8, boolean);

-- Leases the given jobs, if they are due and have the given states. Rows that another transaction has
-- locked are skipped. A lease that expired while a worker held it is recorded as a failed attempt. It
-- counts only if the worker ran no other job (alone): else any of them may be the cause. A claim after
-- the last attempt only dead-letters the job, and does not count as an attempt. "completed" is true if
-- the key has a completion marker: the job is then acknowledged without running.
CREATE OR REPLACE FUNCTION onceward_lease_jobs(
    p_tenants text[], p_ids uuid[], p_states text[], p_now timestamptz,
    p_worker text, p_lease_seconds float8, p_alone boolean
) RETURNS TABLE (
    tenant text, job_id uuid, lease bigint, key text, queue text, type text, payload text,
    attempts integer, max_attempts integer, lost integer, request_id text, correlation_id text,
    traceparent text, version bigint, resource_id text, order_key text, enqueued_at timestamptz,
    completed boolean
) LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_tenant text;
    v_state text;
    v_ids uuid[];
    v_lost record;
BEGIN
    FOR v_tenant, v_state, v_ids IN
        SELECT due.tenant, due.state, array_agg(due.id)
          FROM unnest(p_tenants, p_states, p_ids) AS due(tenant, state, id)
         GROUP BY due.tenant, due.state
    LOOP
        IF v_state = 'running' THEN
            FOR v_lost IN
                SELECT id, attempts, alone, worker FROM onceward_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids) AND state = 'running'
                   AND visible_at <= p_now AND attempts <= max_attempts
                   FOR UPDATE SKIP LOCKED
            LOOP
                INSERT INTO onceward_job_failures
                       (tenant, job_id, attempt, reason, error, worker, failed_at)
                VALUES (v_tenant, v_lost.id, v_lost.attempts, 'worker_lost',
                        CASE WHEN v_lost.alone THEN 'the worker died, hung or lost its lease'
                             ELSE 'the worker died, hung or lost its lease while it ran other jobs, '
                                  'too: does not count as an attempt' END,
                        v_lost.worker, p_now);
            END LOOP;
        END IF;
        RETURN QUERY
        UPDATE onceward_jobs AS job
           SET state = 'running', lease = job.lease + 1,
               attempts = job.attempts
                          + CASE WHEN job.state = 'running' AND NOT job.alone THEN 0 ELSE 1 END,
               lost = job.lost
                      + CASE WHEN job.state = 'running' AND NOT job.alone THEN 1 ELSE 0 END,
               alone = p_alone, worker = p_worker, waiting_key = NULL, started_at = p_now,
               visible_at = p_now + make_interval(secs => p_lease_seconds)
          FROM (SELECT id FROM onceward_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids) AND state = v_state
                   AND visible_at <= p_now
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id
        RETURNING job.tenant, job.id, job.lease, job.key, job.queue, job.type, job.payload,
                  job.attempts, job.max_attempts, job.lost, job.request_id, job.correlation_id,
                  job.traceparent, job.version, job.resource_id, job.order_key, job.enqueued_at,
                  EXISTS (SELECT 1 FROM onceward_job_completions AS done
                           WHERE done.tenant = v_tenant AND done.job_id = job.id);
    END LOOP;
END $$;

-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. Finds a page of
-- them without a lock, then leases them; if others have locked some, it goes on with those that it has
-- not tried: a job that somebody else leases meanwhile changes no other job's place in the page.
-- The names of the paused queues are read first, not joined: on Citus they are on the coordinator only.
CREATE OR REPLACE FUNCTION onceward_claim_jobs(
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
    v_tried uuid[] := '{}';
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
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
              FROM (SELECT tenant, id, state, visible_at FROM onceward_jobs
                     WHERE queue = v_queue AND visible_at <= v_now AND id <> ALL (v_tried)
                     ORDER BY visible_at LIMIT p_limit) AS page;
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
            v_is_last := false;
        END IF;
        RETURN QUERY
        SELECT * FROM onceward_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
        GET DIAGNOSTICS v_leased = ROW_COUNT;
        v_left := v_left - v_leased;
        v_tried := v_tried || v_due.ids;
        EXIT WHEN v_left <= 0 OR v_is_last;
    END LOOP;
END $$;

-- Leases the jobs that a broker has named, if they are due, not leased, and their queue is not paused.
CREATE OR REPLACE FUNCTION onceward_claim_named_jobs(
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
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
BEGIN
    SELECT array_agg(job.tenant) AS tenants, array_agg(job.id) AS ids, array_agg(job.state) AS states
      INTO v_due
      FROM unnest(p_tenants, p_ids) AS named(tenant, id)
      JOIN onceward_jobs AS job ON job.tenant = named.tenant AND job.id = named.id
     WHERE job.visible_at <= v_now AND job.queue <> ALL (v_paused);
    IF v_due.ids IS NOT NULL THEN
        RETURN QUERY
        SELECT * FROM onceward_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
END $$;

-- Records which jobs were published. Rows that another transaction has locked are skipped: waiting for
-- them could deadlock, and publishing them once more does no harm. A job that was dead-lettered and
-- requeued meanwhile is another row (seq), which has not been published.
CREATE OR REPLACE FUNCTION onceward_mark_published(
    p_tenants text[], p_ids uuid[], p_seqs bigint[], p_published integer[]
) RETURNS void LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_tenant text;
    v_ids uuid[];
    v_seqs bigint[];
    v_published integer[];
BEGIN
    FOR v_tenant, v_ids, v_seqs, v_published IN
        SELECT named.tenant, array_agg(named.id), array_agg(named.seq), array_agg(named.published)
          FROM unnest(p_tenants, p_ids, p_seqs, p_published) AS named(tenant, id, seq, published)
         GROUP BY named.tenant
    LOOP
        UPDATE onceward_jobs AS job
           SET published = greatest(
                   job.published, v_published[array_position(v_ids, job.id)]),
               published_at = statement_timestamp()
          FROM (SELECT id FROM onceward_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids)
                   AND seq = v_seqs[array_position(v_ids, id)]
                   AND (published < v_published[array_position(v_ids, id)]
                        OR published_at IS NULL)
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id;
    END LOOP;
END $$;

-- Deletes a batch of the records that expired first, one statement for each tenant, and returns how
-- many. Rows that another transaction has locked are skipped.
CREATE OR REPLACE FUNCTION onceward_sweep_expired(p_now timestamptz, p_limit integer)
RETURNS integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
  SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_left integer := p_limit;
    v_skipped integer := 0;
    v_page record;
    v_group record;
    v_rows integer;
    v_deleted integer;
BEGIN
    LOOP
        SELECT array_agg(tenant) AS tenants, array_agg(endpoint) AS endpoints,
               array_agg(idempotency_key) AS keys
          INTO v_page
          FROM (SELECT tenant, endpoint, idempotency_key FROM onceward_idempotency_records
                 WHERE expires_at <= p_now ORDER BY expires_at
                 LIMIT p_limit OFFSET v_skipped) AS page;
        EXIT WHEN v_page.keys IS NULL;
        v_deleted := 0;
        FOR v_group IN
            SELECT old.tenant, array_agg(old.endpoint) AS endpoints, array_agg(old.key) AS keys
              FROM (SELECT * FROM unnest(v_page.tenants, v_page.endpoints, v_page.keys)
                           AS every(tenant, endpoint, key) LIMIT v_left) AS old
             GROUP BY old.tenant
        LOOP
            DELETE FROM onceward_idempotency_records AS record
             USING (SELECT endpoint, idempotency_key FROM onceward_idempotency_records
                     WHERE tenant = v_group.tenant AND expires_at <= p_now
                       AND endpoint = ANY (v_group.endpoints)
                       AND idempotency_key = ANY (v_group.keys)
                       FOR UPDATE SKIP LOCKED) AS free
             WHERE record.tenant = v_group.tenant AND record.endpoint = free.endpoint
               AND record.idempotency_key = free.idempotency_key;
            GET DIAGNOSTICS v_rows = ROW_COUNT;
            v_deleted := v_deleted + v_rows;
        END LOOP;
        v_left := v_left - v_deleted;
        v_skipped := v_skipped + least(cardinality(v_page.keys), v_left + v_deleted) - v_deleted;
        EXIT WHEN v_left <= 0 OR cardinality(v_page.keys) < p_limit;
    END LOOP;
    RETURN p_limit - v_left;
END $$;

-- Deletes a batch of old rows of jobs, found by their primary keys, and returns how many. A dead letter
-- that died again while this waited for it is kept.
CREATE OR REPLACE FUNCTION onceward_clean_jobs(
    p_what text, p_before timestamptz, p_limit integer
) RETURNS integer LANGUAGE plpgsql VOLATILE SET enable_sort = off AS $$
DECLARE
    v_deleted integer;
BEGIN
    IF p_what = 'completions' THEN
        DELETE FROM onceward_job_completions
         WHERE (tenant, job_id) IN (
               SELECT tenant, job_id FROM onceward_job_completions
                WHERE completed_at < p_before ORDER BY completed_at LIMIT p_limit);
    ELSIF p_what = 'dead_letters' THEN
        DELETE FROM onceward_dead_letters
         WHERE (tenant, job_id) IN (
               SELECT tenant, job_id FROM onceward_dead_letters
                WHERE requeued_at < p_before LIMIT p_limit)
           AND requeued_at IS NOT NULL;
    ELSIF p_what = 'steps' THEN
        DELETE FROM onceward_job_steps
         WHERE (tenant, job_id, name) IN (
               SELECT step.tenant, step.job_id, step.name FROM onceward_job_steps AS step
                WHERE finished_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                                   WHERE job.tenant = step.tenant AND job.id = step.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                                   WHERE dead.tenant = step.tenant AND dead.job_id = step.job_id)
                LIMIT p_limit);
    ELSIF p_what = 'failures' THEN
        DELETE FROM onceward_job_failures
         WHERE (tenant, job_id, seq) IN (
               SELECT failure.tenant, failure.job_id, failure.seq FROM onceward_job_failures AS failure
                WHERE failed_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                                   WHERE job.tenant = failure.tenant AND job.id = failure.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                                   WHERE dead.tenant = failure.tenant AND dead.job_id = failure.job_id)
                LIMIT p_limit);
    ELSIF p_what = 'causes' THEN
        DELETE FROM onceward_job_causes
         WHERE (tenant, job_id, request_id) IN (
               SELECT cause.tenant, cause.job_id, cause.request_id FROM onceward_job_causes AS cause
                WHERE caused_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                                   WHERE job.tenant = cause.tenant AND job.id = cause.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_job_completions AS done
                                   WHERE done.tenant = cause.tenant AND done.job_id = cause.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                                   WHERE dead.tenant = cause.tenant AND dead.job_id = cause.job_id)
                LIMIT p_limit);
    ELSE
        RAISE EXCEPTION 'there are no % of jobs to clean up', p_what;
    END IF;
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END $$;

-- Has Citus commit in two phases if this transaction has written a table that only the coordinator has,
-- such as one of the app. By itself Citus does not count such a table: it commits on the node of the
-- tenant first, and if the coordinator then fails, the record of a request is kept without its effect.
-- A change of a table that Citus knows to be on the coordinator counts, even of no row.
CREATE OR REPLACE FUNCTION onceward_two_phase_commit() RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF pg_current_xact_id_if_assigned() IS NOT NULL THEN
        DELETE FROM onceward_paused_queues WHERE queue = '';
    END IF;
END $$;

-- Writes the record and the audit event; see 0007_client_generated_at.sql.
CREATE OR REPLACE FUNCTION onceward_save_record(
    p_tenant text, p_endpoint text, p_key text, p_body_hash text, p_fingerprint text,
    p_status integer, p_body bytea, p_headers text,
    p_request_id text, p_correlation_id text, p_created_at timestamptz, p_expires_at timestamptz,
    p_client_generated_at timestamptz,
    p_audit_id text, p_actor text, p_resource text, p_version bigint
) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO onceward_idempotency_records AS old
           (tenant, endpoint, idempotency_key, canonical_body_hash, request_fingerprint,
            response_status, response_body, response_headers,
            request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at)
    VALUES (p_tenant, p_endpoint, p_key, p_body_hash, p_fingerprint,
            p_status, p_body, p_headers::jsonb,
            p_request_id, p_correlation_id, p_audit_id, p_created_at, p_expires_at,
            p_client_generated_at)
        ON CONFLICT (tenant, endpoint, idempotency_key) DO UPDATE
       SET canonical_body_hash = excluded.canonical_body_hash,
           request_fingerprint = excluded.request_fingerprint,
           response_status     = excluded.response_status,
           response_body       = excluded.response_body,
           response_headers    = excluded.response_headers,
           request_id          = excluded.request_id,
           correlation_id      = excluded.correlation_id,
           audit_id            = excluded.audit_id,
           created_at          = excluded.created_at,
           expires_at          = excluded.expires_at,
           client_generated_at = excluded.client_generated_at
     WHERE old.expires_at <= excluded.created_at;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the key was recorded by another' USING ERRCODE = 'HF002';
    END IF;
    IF p_audit_id IS NOT NULL THEN
        INSERT INTO onceward_audit_events
               (tenant, id, actor, endpoint, payload_hash, status, resource, version,
                request_id, correlation_id, created_at)
        VALUES (p_tenant, p_audit_id, p_actor, p_endpoint, p_body_hash, p_status, p_resource,
                p_version, p_request_id, p_correlation_id, p_created_at);
    END IF;
    PERFORM onceward_two_phase_commit();
END $$;

-- Completes a job in the transaction of its effects; see 0009_complete_job.sql.
CREATE OR REPLACE FUNCTION onceward_complete_job(
    p_tenant text, p_job_id uuid, p_lease bigint, p_worker text, p_result text
) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_job onceward_jobs;
BEGIN
    DELETE FROM onceward_jobs
     WHERE tenant = p_tenant AND id = p_job_id AND lease = p_lease AND worker = p_worker
       AND visible_at > statement_timestamp()
    RETURNING * INTO v_job;
    IF FOUND THEN
        INSERT INTO onceward_job_completions
               (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts,
                worker, request_id, correlation_id, enqueued_at, completed_at)
        VALUES (p_tenant, p_job_id, v_job.key, v_job.queue, v_job.type, v_job.resource_id,
                v_job.payload_hash, p_result, v_job.attempts, p_worker, v_job.request_id,
                v_job.correlation_id, v_job.enqueued_at, statement_timestamp())
            ON CONFLICT (tenant, job_id) DO NOTHING;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease was lost' USING ERRCODE = 'HF003';
    END IF;
    PERFORM onceward_two_phase_commit();
END $$;

-- The numbers of jobs and dead letters of each queue; see 0012_console.sql. Citus has no generic plan
-- for a statement whose shards depend on no parameter.
CREATE OR REPLACE FUNCTION onceward_queue_depths(p_most integer, p_budget integer)
RETURNS TABLE (
    queue text, waiting bigint, running bigint, dead bigint, oldest_seconds float8, counted integer
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_queue text := '';
    v_queues text[] := '{}';
    v_dead text[] := '{}';
    v_most integer;
    v_jobs bigint;
    v_oldest timestamptz;
BEGIN
    LOOP
        SELECT queue INTO v_queue FROM onceward_jobs
         WHERE queue > v_queue ORDER BY queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_queues := v_queues || v_queue;
    END LOOP;
    v_queue := '';
    LOOP
        SELECT queue INTO v_queue FROM onceward_dead_letters
         WHERE queue > v_queue AND requeued_at IS NULL ORDER BY queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_dead := v_dead || v_queue;
    END LOOP;
    v_most := least(p_most, greatest(100, p_budget / greatest(
        1, (SELECT count(DISTINCT name)::integer FROM unnest(v_queues || v_dead) AS name))
        / 100 * 100));
    counted := v_most;
    FOREACH v_queue IN ARRAY v_queues LOOP
        queue := v_queue;
        SELECT count(*) INTO running
          FROM (SELECT 1 FROM onceward_jobs
                 WHERE queue = v_queue AND state = 'running' LIMIT v_most) AS first;
        SELECT count(*) INTO v_jobs
          FROM (SELECT 1 FROM onceward_jobs WHERE queue = v_queue LIMIT 2 * v_most) AS first;
        SELECT min(run_at) FILTER (WHERE state = 'waiting') INTO v_oldest
          FROM (SELECT state, run_at FROM onceward_jobs
                 WHERE queue = v_queue AND visible_at <= v_now
                 ORDER BY visible_at LIMIT 10) AS first;
        waiting := least(v_jobs - running, v_most);
        oldest_seconds := coalesce(greatest(0, extract(epoch FROM v_now - v_oldest)), 0);
        dead := 0;
        IF v_queue = ANY (v_dead) THEN
            SELECT count(*) INTO dead
              FROM (SELECT 1 FROM onceward_dead_letters
                     WHERE queue = v_queue AND requeued_at IS NULL LIMIT v_most) AS first;
        END IF;
        RETURN NEXT;
    END LOOP;
    running := 0;
    waiting := 0;
    oldest_seconds := 0;
    FOREACH v_queue IN ARRAY v_dead LOOP
        CONTINUE WHEN v_queue = ANY (v_queues);
        queue := v_queue;
        SELECT count(*) INTO dead
          FROM (SELECT 1 FROM onceward_dead_letters
                 WHERE queue = v_queue AND requeued_at IS NULL LIMIT v_most) AS first;
        RETURN NEXT;
    END LOOP;
END $$;

-- The first p_limit jobs of each queue after a place, in the order of their times. An empty state or
-- queue matches every one, and so does a tenant that is null.
CREATE OR REPLACE FUNCTION onceward_first_jobs(
    p_queue text, p_state text, p_tenant text, p_after timestamptz, p_after_id uuid, p_limit integer
) RETURNS SETOF onceward_jobs LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_queue text := p_queue;
BEGIN
    LOOP
        IF p_queue = '' THEN
            SELECT queue INTO v_queue FROM onceward_jobs
             WHERE queue > v_queue ORDER BY queue LIMIT 1;
            EXIT WHEN NOT FOUND;
        END IF;
        RETURN QUERY
        SELECT * FROM onceward_jobs
         WHERE queue = v_queue AND (p_state = '' OR state = p_state)
           AND (p_tenant IS NULL OR tenant = p_tenant)
           AND (visible_at, id) > (p_after, p_after_id)
         ORDER BY visible_at, id LIMIT p_limit;
        EXIT WHEN p_queue <> '';
    END LOOP;
END $$;

-- The newest p_limit records of each endpoint: before an instant, and after a place in the list. What is
-- null matches every record.
CREATE OR REPLACE FUNCTION onceward_newest_records(
    p_before timestamptz, p_after_at timestamptz, p_after_tenant text, p_after_endpoint text,
    p_after_key text, p_limit bigint
) RETURNS SETOF onceward_idempotency_records LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_endpoint text := '';
BEGIN
    LOOP
        SELECT endpoint INTO v_endpoint FROM onceward_idempotency_records
         WHERE endpoint > v_endpoint ORDER BY endpoint LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT * FROM onceward_idempotency_records
         WHERE endpoint = v_endpoint AND (p_before IS NULL OR created_at < p_before)
           AND (p_after_at IS NULL
                OR (created_at, tenant, endpoint, idempotency_key)
                   < (p_after_at, p_after_tenant, p_after_endpoint, p_after_key))
         ORDER BY created_at DESC, tenant DESC, idempotency_key DESC LIMIT p_limit;
    END LOOP;
END $$;

-- The next tenants that have records, in the order of their names.
CREATE OR REPLACE FUNCTION onceward_next_tenants(p_after text, p_limit bigint)
RETURNS SETOF text LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_tenant text := p_after;
BEGIN
    FOR i IN 1 .. p_limit LOOP
        SELECT tenant INTO v_tenant FROM onceward_idempotency_records
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN NEXT v_tenant;
    END LOOP;
END $$;

-- The tenants that have a job with this id, among the first p_most of each table.
CREATE OR REPLACE FUNCTION onceward_tenants_of_job(p_job_id uuid, p_most integer)
RETURNS SETOF text LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_tenant text := '';
BEGIN
    FOR i IN 1 .. p_most LOOP
        SELECT tenant INTO v_tenant FROM onceward_jobs
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY SELECT tenant FROM onceward_jobs WHERE tenant = v_tenant AND id = p_job_id;
    END LOOP;
    v_tenant := '';
    FOR i IN 1 .. p_most LOOP
        SELECT tenant INTO v_tenant FROM onceward_job_completions
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT tenant FROM onceward_job_completions WHERE tenant = v_tenant AND job_id = p_job_id;
    END LOOP;
    v_tenant := '';
    FOR i IN 1 .. p_most LOOP
        SELECT tenant INTO v_tenant FROM onceward_dead_letters
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT tenant FROM onceward_dead_letters WHERE tenant = v_tenant AND job_id = p_job_id;
    END LOOP;
END $$;
