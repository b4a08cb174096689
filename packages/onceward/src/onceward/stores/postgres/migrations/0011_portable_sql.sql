-- Statements that a database distributed by tenant (Citus) can run too: no trigger, no clock that is
-- read again for each row, and no lock on rows of several tenants in one statement. See
-- docs/decisions/0056-portable-sql.md.

-- The instant at which the server received the message: one instant for the whole statement, and
-- not the start of a transaction that began long ago.
ALTER TABLE onceward_jobs ALTER COLUMN enqueued_at SET DEFAULT statement_timestamp();
ALTER TABLE onceward_job_completions
      ALTER COLUMN completed_at SET DEFAULT statement_timestamp();
ALTER TABLE onceward_dead_letters ALTER COLUMN died_at SET DEFAULT statement_timestamp();
ALTER TABLE onceward_job_failures ALTER COLUMN failed_at SET DEFAULT statement_timestamp();
ALTER TABLE onceward_job_steps ALTER COLUMN finished_at SET DEFAULT statement_timestamp();
ALTER TABLE onceward_job_causes ALTER COLUMN caused_at SET DEFAULT statement_timestamp();

-- The claim records lost attempts itself. While processes of the version before are still running,
-- attempts that their claims find lost are counted but not listed.
DROP TRIGGER onceward_jobs_attempt_lost ON onceward_jobs;
DROP FUNCTION onceward_attempt_lost();

-- Rows are inserted with VALUES, here and below: then it is the server that runs the function, and no
-- other node, that numbers them (seq).

-- Inserts a job and its audit event, unless its key is completed or waits already. A dead-lettered key
-- is enqueued again, and its dead letter is marked as requeued. A job with an order key waits at
-- infinity if it is not the first; the caller holds the lock of the order key.
CREATE OR REPLACE FUNCTION onceward_enqueue(
    p_tenant text, p_id uuid, p_key text, p_queue text, p_type text, p_resource_id text,
    p_payload text, p_payload_hash text, p_order_key text, p_run_at float8, p_delay_seconds float8,
    p_max_attempts integer, p_actor text, p_request_id text, p_correlation_id text,
    p_traceparent text, p_version bigint, p_audit_id text, p_audit_name text
) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_run_at timestamptz;
    v_visible_at timestamptz;
BEGIN
    PERFORM 1 FROM onceward_job_completions WHERE tenant = p_tenant AND job_id = p_id;
    IF FOUND THEN
        RETURN false;
    END IF;
    v_run_at := coalesce(to_timestamp(p_run_at), v_now) + make_interval(secs => p_delay_seconds);
    v_visible_at := v_run_at;
    IF p_order_key IS NOT NULL THEN
        PERFORM 1 FROM onceward_jobs WHERE tenant = p_tenant AND order_key = p_order_key LIMIT 1;
        IF FOUND THEN
            v_visible_at := 'infinity';
        END IF;
    END IF;
    INSERT INTO onceward_jobs
           (tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
            visible_at, run_at, max_attempts, actor, request_id, correlation_id, traceparent,
            version, enqueued_at)
    VALUES (p_tenant, p_id, p_key, p_queue, p_type, p_resource_id, p_payload, p_payload_hash,
            p_order_key, v_visible_at, v_run_at, p_max_attempts, p_actor, p_request_id,
            p_correlation_id, p_traceparent, p_version, v_now)
        ON CONFLICT (tenant, id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at)
    VALUES (p_tenant, p_audit_id, p_actor, p_audit_name, p_payload_hash, 202, p_key, p_version,
            p_request_id, p_correlation_id, v_now);
    UPDATE onceward_dead_letters SET requeued_at = v_now
     WHERE tenant = p_tenant AND job_id = p_id AND requeued_at IS NULL;
    RETURN true;
END $$;

-- Merges the job into a waiting one with the same coalescing key: that one gets the new payload and
-- keeps its due time. No worker can lease it meanwhile, because this transaction locks the row.
CREATE OR REPLACE FUNCTION onceward_enqueue_coalesced(
    p_tenant text, p_id uuid, p_key text, p_queue text, p_type text, p_resource_id text,
    p_payload text, p_payload_hash text, p_coalesce_key text, p_order_key text, p_run_at float8,
    p_delay_seconds float8, p_max_attempts integer, p_actor text, p_request_id text,
    p_correlation_id text, p_traceparent text, p_version bigint, p_audit_id text,
    p_audit_name text,
    OUT job_id text, OUT job_key text, OUT merged integer
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_run_at timestamptz;
    v_visible_at timestamptz;
BEGIN
    v_run_at := coalesce(to_timestamp(p_run_at), v_now) + make_interval(secs => p_delay_seconds);
    v_visible_at := v_run_at;
    IF p_order_key IS NOT NULL THEN
        PERFORM 1 FROM onceward_jobs WHERE tenant = p_tenant AND order_key = p_order_key LIMIT 1;
        IF FOUND THEN
            v_visible_at := 'infinity';
        END IF;
    END IF;
    INSERT INTO onceward_jobs AS old
           (tenant, id, key, queue, type, resource_id, payload, payload_hash, coalesce_key,
            waiting_key, order_key, visible_at, run_at, max_attempts, actor, request_id,
            correlation_id, traceparent, version, enqueued_at)
    VALUES (p_tenant, p_id, p_key, p_queue, p_type, p_resource_id, p_payload, p_payload_hash,
            p_coalesce_key, p_coalesce_key, p_order_key, v_visible_at, v_run_at, p_max_attempts,
            p_actor, p_request_id, p_correlation_id, p_traceparent, p_version, v_now)
        ON CONFLICT (tenant, queue, type, waiting_key) WHERE waiting_key IS NOT NULL DO UPDATE
       SET payload = excluded.payload, payload_hash = excluded.payload_hash,
           version = excluded.version, merged = old.merged + 1
    RETURNING old.id::text, old.key, old.merged INTO job_id, job_key, merged;
    IF merged = 0 THEN
        INSERT INTO onceward_audit_events
               (tenant, id, actor, endpoint, payload_hash, status, resource, version,
                request_id, correlation_id, created_at)
        VALUES (p_tenant, p_audit_id, p_actor, p_audit_name, p_payload_hash, 202, p_key, p_version,
                p_request_id, p_correlation_id, v_now);
    END IF;
END $$;

-- Moves a dead letter back into its queue with all its attempts, and returns the queue; null if there
-- is none. The dead letter stays, marked. The caller holds the lock of the order key.
CREATE OR REPLACE FUNCTION onceward_requeue_job(
    p_tenant text, p_job_id uuid, p_actor text, p_audit_id text
) RETURNS text LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_visible_at timestamptz := v_now;
    v_dead onceward_dead_letters;
BEGIN
    PERFORM 1 FROM onceward_job_completions WHERE tenant = p_tenant AND job_id = p_job_id;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO v_dead FROM onceward_dead_letters
     WHERE tenant = p_tenant AND job_id = p_job_id AND requeued_at IS NULL;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF v_dead.order_key IS NOT NULL THEN
        PERFORM 1 FROM onceward_jobs
          WHERE tenant = p_tenant AND order_key = v_dead.order_key LIMIT 1;
        IF FOUND THEN
            v_visible_at := 'infinity';
        END IF;
    END IF;
    INSERT INTO onceward_jobs
           (tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
            visible_at, run_at, max_attempts, actor, request_id, correlation_id, enqueued_at,
            version)
    VALUES (p_tenant, p_job_id, v_dead.key, v_dead.queue, v_dead.type, v_dead.resource_id,
            v_dead.payload, v_dead.payload_hash, v_dead.order_key, v_visible_at, v_now,
            v_dead.max_attempts, v_dead.actor, v_dead.request_id, v_dead.correlation_id,
            v_dead.enqueued_at, v_dead.version)
        ON CONFLICT (tenant, id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    UPDATE onceward_dead_letters SET requeued_at = v_now
     WHERE tenant = p_tenant AND job_id = p_job_id;
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at)
    VALUES (p_tenant, p_audit_id, p_actor, 'job.requeued ' || v_dead.queue || ' ' || v_dead.type,
            v_dead.payload_hash, 202, v_dead.key, v_dead.version, v_dead.request_id,
            v_dead.correlation_id, v_now);
    RETURN v_dead.queue;
END $$;

-- Leases the given jobs, if they are due and have the given states. Rows that another transaction has
-- locked are skipped. A lease that expired while a worker held it is recorded as a failed attempt. It
-- counts only if the worker ran no other job (alone): else any of them may be the cause. A claim after
-- the last attempt only dead-letters the job, and does not count as an attempt. "completed" is true if
-- the key has a completion marker: the job is then acknowledged without running.
-- This locks rows of several tenants in one statement; stores/citus.sql has one that does not.
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
    v_lost record;
BEGIN
    IF 'running' = ANY (p_states) THEN
        FOR v_lost IN
            SELECT job.tenant, job.id, job.attempts, job.alone, job.worker
              FROM unnest(p_tenants, p_ids, p_states) AS due(tenant, id, state)
              JOIN onceward_jobs AS job ON job.tenant = due.tenant AND job.id = due.id
             WHERE due.state = 'running' AND job.state = 'running' AND job.visible_at <= p_now
               AND job.attempts <= job.max_attempts
               FOR UPDATE OF job SKIP LOCKED
        LOOP
            INSERT INTO onceward_job_failures
                   (tenant, job_id, attempt, reason, error, worker, failed_at)
            VALUES (v_lost.tenant, v_lost.id, v_lost.attempts, 'worker_lost',
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
           lost = job.lost + CASE WHEN job.state = 'running' AND NOT job.alone THEN 1 ELSE 0 END,
           alone = p_alone, worker = p_worker, waiting_key = NULL, started_at = p_now,
           visible_at = p_now + make_interval(secs => p_lease_seconds)
      FROM (SELECT found.tenant, found.id
              FROM unnest(p_tenants, p_ids, p_states) AS due(tenant, id, state)
              JOIN onceward_jobs AS found ON found.tenant = due.tenant AND found.id = due.id
             WHERE found.state = due.state AND found.visible_at <= p_now
               FOR UPDATE OF found SKIP LOCKED) AS free
     WHERE job.tenant = free.tenant AND job.id = free.id
    RETURNING job.tenant, job.id, job.lease, job.key, job.queue, job.type, job.payload,
              job.attempts, job.max_attempts, job.lost, job.request_id, job.correlation_id,
              job.traceparent, job.version, job.resource_id, job.order_key, job.enqueued_at,
              EXISTS (SELECT 1 FROM onceward_job_completions AS done
                       WHERE done.tenant = job.tenant AND done.job_id = job.id);
END $$;

-- Leases due jobs, oldest first, up to the limit from each queue. Finds a page of them without a lock,
-- then leases them; if others have locked some, it goes on with the next page.
-- The settings make PostgreSQL use the indexes. A queue is empty most of the time, and a plan that was
-- made for an empty table would read all of a long one.
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
    v_skipped integer := 0;
    v_queue text;
    v_page record;
    v_due record;
    v_is_last boolean;
    v_leased integer;
BEGIN
    LOOP
        v_due := NULL;
        v_is_last := true;
        FOREACH v_queue IN ARRAY p_queues LOOP
            SELECT array_agg(tenant) AS tenants, array_agg(id) AS ids, array_agg(state) AS states,
                   array_agg(visible_at) AS times
              INTO v_page
              FROM (SELECT tenant, id, state, visible_at FROM onceward_jobs
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
        SELECT * FROM onceward_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
        GET DIAGNOSTICS v_leased = ROW_COUNT;
        v_left := v_left - v_leased;
        v_skipped := v_skipped + cardinality(v_due.ids) - v_leased;
        EXIT WHEN v_left <= 0 OR v_is_last;
    END LOOP;
END $$;

-- Leases the jobs that a broker has named, if they are due and not leased.
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
BEGIN
    SELECT array_agg(job.tenant) AS tenants, array_agg(job.id) AS ids, array_agg(job.state) AS states
      INTO v_due
      FROM unnest(p_tenants, p_ids) AS named(tenant, id)
      JOIN onceward_jobs AS job ON job.tenant = named.tenant AND job.id = named.id
     WHERE job.visible_at <= v_now;
    IF v_due.ids IS NOT NULL THEN
        RETURN QUERY
        SELECT * FROM onceward_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
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
END $$;

-- Records which jobs were published. Rows that another transaction has locked are skipped: waiting for
-- them could deadlock, and publishing them once more does no harm. A job that was dead-lettered and
-- requeued meanwhile is another row (seq), which has not been published.
-- This locks rows of several tenants in one statement; stores/citus.sql has one that does not.
CREATE OR REPLACE FUNCTION onceward_mark_published(
    p_tenants text[], p_ids uuid[], p_seqs bigint[], p_published integer[]
) RETURNS void LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    UPDATE onceward_jobs AS job
       SET published = greatest(job.published, free.published),
           published_at = statement_timestamp()
      FROM (SELECT found.tenant, found.id, named.published
              FROM unnest(p_tenants, p_ids, p_seqs, p_published)
                   AS named(tenant, id, seq, published)
              JOIN onceward_jobs AS found
                ON found.tenant = named.tenant AND found.id = named.id AND found.seq = named.seq
             WHERE found.published < named.published OR found.published_at IS NULL
               FOR UPDATE OF found SKIP LOCKED) AS free
     WHERE job.tenant = free.tenant AND job.id = free.id;
END $$;

-- The broker has lost all messages: published jobs are published again, with the next message id.
-- Returns how many. Rows that another transaction has locked are skipped.
CREATE OR REPLACE FUNCTION onceward_reset_published() RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_tenant text;
    v_rows bigint;
    v_reset bigint := 0;
BEGIN
    FOR v_tenant IN
        SELECT DISTINCT tenant FROM onceward_jobs WHERE published_at IS NOT NULL
    LOOP
        UPDATE onceward_jobs AS job
           SET published_at = NULL
          FROM (SELECT id FROM onceward_jobs
                 WHERE tenant = v_tenant AND published_at IS NOT NULL
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id;
        GET DIAGNOSTICS v_rows = ROW_COUNT;
        v_reset := v_reset + v_rows;
    END LOOP;
    RETURN v_reset;
END $$;

-- When the next job of these queues becomes visible, after an instant; null if there is none.
CREATE OR REPLACE FUNCTION onceward_next_visible(p_queues text[], p_after timestamptz)
RETURNS timestamptz LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_queue text;
    v_next timestamptz;
    v_least timestamptz;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        SELECT visible_at INTO v_next FROM onceward_jobs
         WHERE queue = v_queue AND visible_at > p_after AND visible_at < 'infinity'
         ORDER BY visible_at LIMIT 1;
        v_least := least(v_least, v_next);
    END LOOP;
    RETURN v_least;
END $$;

-- The first due jobs of each queue that are not published, or were published and not leased for some
-- time. That time doubles with each publication: a long queue is no reason to publish all of it again.
-- Only the front of each queue is read, so that a long queue costs no more than a short one.
CREATE OR REPLACE FUNCTION onceward_jobs_to_publish(
    p_queues text[], p_front integer, p_again_after_seconds float8
) RETURNS TABLE (
    tenant text, job_id uuid, queue text, seq bigint, published integer, visible_at timestamptz
) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_queue text;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        RETURN QUERY
        SELECT tenant, id, queue, seq, published, visible_at
          FROM (SELECT tenant, id, queue, seq, published, published_at, visible_at
                  FROM onceward_jobs
                 WHERE queue = v_queue AND visible_at <= v_now
                 ORDER BY visible_at LIMIT p_front) AS front
         WHERE published_at IS NULL
            OR greatest(published_at, visible_at) < v_now - make_interval(
                   secs => p_again_after_seconds * power(2, least(greatest(published, 1) - 1, 6)));
    END LOOP;
END $$;

-- The numbers of jobs for metrics, which are read every few seconds: of each queue, at most p_most due
-- jobs and p_most others, those that are visible next (among them the running ones), so that a long
-- queue costs no more than a short one. Queues are found with one look into the index each.
CREATE OR REPLACE FUNCTION onceward_some_depths(p_most integer)
RETURNS TABLE (queue text, state text, jobs bigint, oldest_seconds float8) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_queue text := '';
BEGIN
    LOOP
        SELECT queue INTO v_queue FROM onceward_jobs
         WHERE queue > v_queue ORDER BY queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT v_queue, found.state, count(*),
               greatest(0, extract(epoch FROM v_now - min(found.run_at)
                        FILTER (WHERE found.state = 'waiting' AND found.is_due)))::float8
          FROM ((SELECT state, run_at, true AS is_due FROM onceward_jobs
                  WHERE queue = v_queue AND visible_at <= v_now
                  ORDER BY visible_at LIMIT p_most)
                UNION ALL
                (SELECT state, run_at, false FROM onceward_jobs
                  WHERE queue = v_queue AND visible_at > v_now
                  ORDER BY visible_at LIMIT p_most)) AS found
         GROUP BY found.state;
    END LOOP;
END $$;

-- Deletes a batch of the records that expired first, and returns a row for each. Rows that another
-- transaction has locked are skipped.
-- This locks rows of several tenants in one statement; stores/citus.sql has one that does not.
CREATE OR REPLACE FUNCTION onceward_sweep_records(p_now timestamptz, p_limit integer)
RETURNS SETOF integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
  SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    RETURN QUERY
    DELETE FROM onceward_idempotency_records AS record
     USING (SELECT tenant, endpoint, idempotency_key FROM onceward_idempotency_records
             WHERE expires_at <= p_now ORDER BY expires_at LIMIT p_limit
               FOR UPDATE SKIP LOCKED) AS old
     WHERE record.tenant = old.tenant AND record.endpoint = old.endpoint
       AND record.idempotency_key = old.idempotency_key
    RETURNING 1;
END $$;
