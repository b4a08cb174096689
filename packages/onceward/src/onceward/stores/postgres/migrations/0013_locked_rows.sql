-- Rows that a statement has locked are found again by ctid, which takes less time than their keys. Citus
-- needs the keys: stores/citus.sql has functions of the same names for it.

DROP FUNCTION IF EXISTS onceward_lease_jobs(
    text[], uuid[], text[], timestamptz, text, float8, boolean);
DROP FUNCTION IF EXISTS onceward_sweep_records(timestamptz, integer);

-- Leases jobs that the caller has locked: nothing moves them, so they are found again by ctid. A lease
-- that expired while a worker held it is recorded as a failed attempt. It counts only if the worker ran
-- no other job (alone): else any of them may be the cause. A claim after the last attempt only
-- dead-letters the job, and does not count as an attempt. "completed" is true if the key has a
-- completion marker: the job is then acknowledged without running. (With EXISTS, PostgreSQL may read
-- all markers.)
CREATE OR REPLACE FUNCTION onceward_lease_locked_jobs(
    p_rows tid[], p_has_lost boolean, p_now timestamptz,
    p_worker text, p_lease_seconds float8, p_alone boolean
) RETURNS TABLE (
    tenant text, job_id uuid, lease bigint, key text, queue text, type text, payload text,
    attempts integer, max_attempts integer, lost integer, request_id text, correlation_id text,
    traceparent text, version bigint, resource_id text, order_key text, enqueued_at timestamptz,
    completed boolean
) LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
BEGIN
    IF p_has_lost THEN
        INSERT INTO onceward_job_failures
               (tenant, job_id, attempt, reason, error, worker, failed_at)
        SELECT tenant, id, attempts, 'worker_lost',
               CASE WHEN alone THEN 'the worker died, hung or lost its lease'
                    ELSE 'the worker died, hung or lost its lease while it ran other jobs, '
                         'too: does not count as an attempt' END,
               worker, p_now
          FROM onceward_jobs
         WHERE ctid = ANY (p_rows) AND state = 'running' AND attempts <= max_attempts;
    END IF;
    RETURN QUERY
    UPDATE onceward_jobs AS job
       SET state = 'running', lease = job.lease + 1,
           attempts = job.attempts
                      + CASE WHEN job.state = 'running' AND NOT job.alone THEN 0 ELSE 1 END,
           lost = job.lost + CASE WHEN job.state = 'running' AND NOT job.alone THEN 1 ELSE 0 END,
           alone = p_alone, worker = p_worker, waiting_key = NULL, started_at = p_now,
           visible_at = p_now + make_interval(secs => p_lease_seconds)
     WHERE job.ctid = ANY (p_rows)
    RETURNING job.tenant, job.id, job.lease, job.key, job.queue, job.type, job.payload,
              job.attempts, job.max_attempts, job.lost, job.request_id, job.correlation_id,
              job.traceparent, job.version, job.resource_id, job.order_key, job.enqueued_at,
              (SELECT true FROM onceward_job_completions AS done
                WHERE done.tenant = job.tenant AND done.job_id = job.id) IS NOT NULL;
END $$;

-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. Rows that another
-- transaction has locked are skipped.
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
    v_rows tid[];
    v_has_lost boolean;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
BEGIN
    SELECT array_agg(due.ctid), bool_or(due.state = 'running') INTO v_rows, v_has_lost
      FROM (SELECT found.ctid, found.state
              FROM unnest(p_queues) AS wanted(queue)
             CROSS JOIN LATERAL (
                   SELECT job.ctid, job.state, job.visible_at FROM onceward_jobs AS job
                    WHERE job.queue = wanted.queue AND job.visible_at <= v_now
                    ORDER BY job.visible_at LIMIT p_limit
                      FOR UPDATE SKIP LOCKED) AS found
             WHERE wanted.queue <> ALL (v_paused)
             ORDER BY found.visible_at LIMIT p_limit) AS due;
    IF v_rows IS NOT NULL THEN
        RETURN QUERY
        SELECT * FROM onceward_lease_locked_jobs(
            v_rows, v_has_lost, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
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
    v_rows tid[];
    v_has_lost boolean;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
BEGIN
    SELECT array_agg(due.ctid), bool_or(due.state = 'running') INTO v_rows, v_has_lost
      FROM (SELECT job.ctid, job.state
              FROM unnest(p_tenants, p_ids) AS named(tenant, id)
              JOIN onceward_jobs AS job ON job.tenant = named.tenant AND job.id = named.id
             WHERE job.visible_at <= v_now AND job.queue <> ALL (v_paused)
               FOR UPDATE OF job SKIP LOCKED) AS due;
    IF v_rows IS NOT NULL THEN
        RETURN QUERY
        SELECT * FROM onceward_lease_locked_jobs(
            v_rows, v_has_lost, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
END $$;

-- Deletes a batch of the records that expired first, and returns how many. Rows that another
-- transaction has locked are skipped.
CREATE OR REPLACE FUNCTION onceward_sweep_expired(p_now timestamptz, p_limit integer)
RETURNS integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_deleted integer;
BEGIN
    DELETE FROM onceward_idempotency_records
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM onceward_idempotency_records
            WHERE expires_at <= p_now ORDER BY expires_at LIMIT p_limit
              FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END $$;

-- Deletes a batch of old rows of jobs, and returns how many. Completions: a key counts as completed until
-- its marker is deleted here. Dead letters: only requeued ones, an operator decides about the others.
-- Steps, failures and causes: only of jobs that are gone.
CREATE OR REPLACE FUNCTION onceward_clean_jobs(
    p_what text, p_before timestamptz, p_limit integer
) RETURNS integer LANGUAGE plpgsql VOLATILE SET enable_sort = off AS $$
DECLARE
    v_deleted integer;
BEGIN
    IF p_what = 'completions' THEN
        DELETE FROM onceward_job_completions
         WHERE ctid = ANY (ARRAY(
               SELECT ctid FROM onceward_job_completions
                WHERE completed_at < p_before ORDER BY completed_at LIMIT p_limit
                  FOR UPDATE SKIP LOCKED));
    ELSIF p_what = 'dead_letters' THEN
        DELETE FROM onceward_dead_letters
         WHERE ctid = ANY (ARRAY(
               SELECT ctid FROM onceward_dead_letters
                WHERE requeued_at < p_before LIMIT p_limit
                  FOR UPDATE SKIP LOCKED));
    ELSIF p_what = 'steps' THEN
        DELETE FROM onceward_job_steps
         WHERE ctid = ANY (ARRAY(
               SELECT step.ctid FROM onceward_job_steps AS step
                WHERE finished_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                                   WHERE job.tenant = step.tenant AND job.id = step.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                                   WHERE dead.tenant = step.tenant AND dead.job_id = step.job_id)
                LIMIT p_limit));
    ELSIF p_what = 'failures' THEN
        DELETE FROM onceward_job_failures
         WHERE ctid = ANY (ARRAY(
               SELECT failure.ctid FROM onceward_job_failures AS failure
                WHERE failed_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                                   WHERE job.tenant = failure.tenant AND job.id = failure.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                                   WHERE dead.tenant = failure.tenant AND dead.job_id = failure.job_id)
                LIMIT p_limit));
    ELSIF p_what = 'causes' THEN
        DELETE FROM onceward_job_causes
         WHERE ctid = ANY (ARRAY(
               SELECT cause.ctid FROM onceward_job_causes AS cause
                WHERE caused_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                                   WHERE job.tenant = cause.tenant AND job.id = cause.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_job_completions AS done
                                   WHERE done.tenant = cause.tenant AND done.job_id = cause.job_id)
                  AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                                   WHERE dead.tenant = cause.tenant AND dead.job_id = cause.job_id)
                LIMIT p_limit));
    ELSE
        RAISE EXCEPTION 'there are no % of jobs to clean up', p_what;
    END IF;
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END $$;

-- The records of several keys, expired or not, with the places of their keys. The settings make
-- PostgreSQL look each key up in the index: it sometimes plans a scan of the table.
CREATE OR REPLACE FUNCTION onceward_find_records(
    p_tenants text[], p_endpoints text[], p_keys text[]
) RETURNS TABLE (
    place bigint, canonical_body_hash text, request_fingerprint text, response_status integer,
    response_body bytea, response_headers jsonb, request_id text, correlation_id text,
    audit_id text, created_at timestamptz, expires_at timestamptz, client_generated_at timestamptz
) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off
  SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT wanted.place, record.canonical_body_hash, record.request_fingerprint,
           record.response_status, record.response_body, record.response_headers,
           record.request_id, record.correlation_id, record.audit_id, record.created_at,
           record.expires_at, record.client_generated_at
      FROM unnest(p_tenants, p_endpoints, p_keys)
           WITH ORDINALITY AS wanted(tenant, endpoint, idempotency_key, place)
      JOIN onceward_idempotency_records AS record
        ON record.tenant = wanted.tenant AND record.endpoint = wanted.endpoint
       AND record.idempotency_key = wanted.idempotency_key;
END $$;
