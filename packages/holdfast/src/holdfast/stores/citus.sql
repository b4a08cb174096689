-- Functions of the migrations that lock rows of several tenants in one statement, or find rows by ctid,
-- as Citus needs them: rows are found by their keys, and locked with one statement for each tenant,
-- which Citus sends to the shard of that tenant. They work on every PostgreSQL, and are slower where
-- one statement is possible: see docs/decisions/0056-portable-sql.md.

DROP FUNCTION IF EXISTS holdfast_lease_locked_jobs(
    tid[], boolean, timestamptz, text, float8, boolean);

-- Leases the given jobs, if they are due and have the given states. Rows that another transaction has
-- locked are skipped. A lease that expired while a worker held it is recorded as a failed attempt. It
-- counts only if the worker ran no other job (alone): else any of them may be the cause. A claim after
-- the last attempt only dead-letters the job, and does not count as an attempt. "completed" is true if
-- the key has a completion marker: the job is then acknowledged without running.
CREATE OR REPLACE FUNCTION holdfast_lease_jobs(
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
                SELECT id, attempts, alone, worker FROM holdfast_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids) AND state = 'running'
                   AND visible_at <= p_now AND attempts <= max_attempts
                   FOR UPDATE SKIP LOCKED
            LOOP
                INSERT INTO holdfast_job_failures
                       (tenant, job_id, attempt, reason, error, worker, failed_at)
                VALUES (v_tenant, v_lost.id, v_lost.attempts, 'worker_lost',
                        CASE WHEN v_lost.alone THEN 'the worker died, hung or lost its lease'
                             ELSE 'the worker died, hung or lost its lease while it ran other jobs, '
                                  'too: does not count as an attempt' END,
                        v_lost.worker, p_now);
            END LOOP;
        END IF;
        RETURN QUERY
        UPDATE holdfast_jobs AS job
           SET state = 'running', lease = job.lease + 1,
               attempts = job.attempts
                          + CASE WHEN job.state = 'running' AND NOT job.alone THEN 0 ELSE 1 END,
               lost = job.lost
                      + CASE WHEN job.state = 'running' AND NOT job.alone THEN 1 ELSE 0 END,
               alone = p_alone, worker = p_worker, waiting_key = NULL, started_at = p_now,
               visible_at = p_now + make_interval(secs => p_lease_seconds)
          FROM (SELECT id FROM holdfast_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids) AND state = v_state
                   AND visible_at <= p_now
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id
        RETURNING job.tenant, job.id, job.lease, job.key, job.queue, job.type, job.payload,
                  job.attempts, job.max_attempts, job.lost, job.request_id, job.correlation_id,
                  job.traceparent, job.version, job.resource_id, job.order_key, job.enqueued_at,
                  EXISTS (SELECT 1 FROM holdfast_job_completions AS done
                           WHERE done.tenant = v_tenant AND done.job_id = job.id);
    END LOOP;
END $$;

-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. Finds a page of
-- them without a lock, then leases them; if others have locked some, it goes on with those that it has
-- not tried: a job that somebody else leases meanwhile changes no other job's place in the page.
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
    v_tried uuid[] := '{}';
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
        SELECT * FROM holdfast_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
        GET DIAGNOSTICS v_leased = ROW_COUNT;
        v_left := v_left - v_leased;
        v_tried := v_tried || v_due.ids;
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

-- Records which jobs were published. Rows that another transaction has locked are skipped: waiting for
-- them could deadlock, and publishing them once more does no harm. A job that was dead-lettered and
-- requeued meanwhile is another row (seq), which has not been published.
CREATE OR REPLACE FUNCTION holdfast_mark_published(
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
        UPDATE holdfast_jobs AS job
           SET published = greatest(
                   job.published, v_published[array_position(v_ids, job.id)]),
               published_at = statement_timestamp()
          FROM (SELECT id FROM holdfast_jobs
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
CREATE OR REPLACE FUNCTION holdfast_sweep_expired(p_now timestamptz, p_limit integer)
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
          FROM (SELECT tenant, endpoint, idempotency_key FROM holdfast_idempotency_records
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
            DELETE FROM holdfast_idempotency_records AS record
             USING (SELECT endpoint, idempotency_key FROM holdfast_idempotency_records
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
CREATE OR REPLACE FUNCTION holdfast_clean_jobs(
    p_what text, p_before timestamptz, p_limit integer
) RETURNS integer LANGUAGE plpgsql VOLATILE SET enable_sort = off AS $$
DECLARE
    v_deleted integer;
BEGIN
    IF p_what = 'completions' THEN
        DELETE FROM holdfast_job_completions
         WHERE (tenant, job_id) IN (
               SELECT tenant, job_id FROM holdfast_job_completions
                WHERE completed_at < p_before ORDER BY completed_at LIMIT p_limit);
    ELSIF p_what = 'dead_letters' THEN
        DELETE FROM holdfast_dead_letters
         WHERE (tenant, job_id) IN (
               SELECT tenant, job_id FROM holdfast_dead_letters
                WHERE requeued_at < p_before LIMIT p_limit)
           AND requeued_at IS NOT NULL;
    ELSIF p_what = 'steps' THEN
        DELETE FROM holdfast_job_steps
         WHERE (tenant, job_id, name) IN (
               SELECT step.tenant, step.job_id, step.name FROM holdfast_job_steps AS step
                WHERE finished_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM holdfast_jobs AS job
                                   WHERE job.tenant = step.tenant AND job.id = step.job_id)
                  AND NOT EXISTS (SELECT 1 FROM holdfast_dead_letters AS dead
                                   WHERE dead.tenant = step.tenant AND dead.job_id = step.job_id)
                LIMIT p_limit);
    ELSIF p_what = 'failures' THEN
        DELETE FROM holdfast_job_failures
         WHERE (tenant, job_id, seq) IN (
               SELECT failure.tenant, failure.job_id, failure.seq FROM holdfast_job_failures AS failure
                WHERE failed_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM holdfast_jobs AS job
                                   WHERE job.tenant = failure.tenant AND job.id = failure.job_id)
                  AND NOT EXISTS (SELECT 1 FROM holdfast_dead_letters AS dead
                                   WHERE dead.tenant = failure.tenant AND dead.job_id = failure.job_id)
                LIMIT p_limit);
    ELSIF p_what = 'causes' THEN
        DELETE FROM holdfast_job_causes
         WHERE (tenant, job_id, request_id) IN (
               SELECT cause.tenant, cause.job_id, cause.request_id FROM holdfast_job_causes AS cause
                WHERE caused_at < p_before
                  AND NOT EXISTS (SELECT 1 FROM holdfast_jobs AS job
                                   WHERE job.tenant = cause.tenant AND job.id = cause.job_id)
                  AND NOT EXISTS (SELECT 1 FROM holdfast_job_completions AS done
                                   WHERE done.tenant = cause.tenant AND done.job_id = cause.job_id)
                  AND NOT EXISTS (SELECT 1 FROM holdfast_dead_letters AS dead
                                   WHERE dead.tenant = cause.tenant AND dead.job_id = cause.job_id)
                LIMIT p_limit);
    ELSE
        RAISE EXCEPTION 'there are no % of jobs to clean up', p_what;
    END IF;
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END $$;
