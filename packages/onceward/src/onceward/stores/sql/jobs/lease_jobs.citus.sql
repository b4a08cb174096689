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
) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
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
