-- Functions of the migrations that lock rows of several tenants in one statement, as Citus needs them:
-- one statement for each tenant, which Citus sends to the shard of that tenant. They work on every
-- PostgreSQL, and are slower where one statement is possible: see docs/decisions/0056-portable-sql.md.

-- Leases the given jobs, if they are due and have the given states. Rows that another transaction has locked are skipped. A lease that expired while a worker held it is
-- recorded as a failed attempt. It counts only if the worker ran no other job (alone): else any of them
-- may be the cause. A claim after the last attempt only dead-letters the job, and does not count as an
-- attempt. "completed" is true if the key has a completion marker: the job is then acknowledged without
-- running.
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

-- Deletes a batch of the records that expired first, one statement for each tenant, and returns a row
-- for each. Rows that another transaction has locked are skipped.
CREATE OR REPLACE FUNCTION holdfast_sweep_records(p_now timestamptz, p_limit integer)
RETURNS SETOF integer LANGUAGE plpgsql VOLATILE
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
        RETURN QUERY SELECT generate_series(1, v_deleted);
        v_left := v_left - v_deleted;
        v_skipped := v_skipped + least(cardinality(v_page.keys), v_left + v_deleted) - v_deleted;
        EXIT WHEN v_left <= 0 OR cardinality(v_page.keys) < p_limit;
    END LOOP;
END $$;
