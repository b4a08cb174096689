-- Leases jobs that the caller has locked: nothing moves them, so they are found again by ctid. A lease
-- that expired while a worker held it is recorded as a failed attempt. It counts only if the worker ran
-- no other job (alone): else any of them may be the cause. A claim after the last attempt only
-- dead-letters the job, and does not count as an attempt. "completed" is true if the key has a
-- completion marker: the job is then acknowledged without running. (With EXISTS, PostgreSQL may read
-- all markers.)
CREATE OR REPLACE FUNCTION onceward_lease_jobs(
    p_rows tid[], p_has_lost boolean, p_now timestamptz,
    p_worker text, p_lease_seconds float8, p_alone boolean
) RETURNS TABLE (
    tenant text, job_id uuid, lease bigint, key text, queue text, type text, payload text,
    attempts integer, max_attempts integer, lost integer, request_id text, correlation_id text,
    traceparent text, version bigint, resource_id text, order_key text, enqueued_at timestamptz,
    completed boolean
) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
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
