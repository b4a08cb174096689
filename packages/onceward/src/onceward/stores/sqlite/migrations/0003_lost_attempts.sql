-- Records a lost attempt when a claim takes a job from a worker that died, hung or lost its lease. A
-- trigger, because the claim is one statement that commits at once:
-- a second one would cost every claim a transaction and might be lost.
--
-- A claim after the last attempt only dead-letters the job, and does not count as an attempt.
CREATE TRIGGER onceward_jobs_attempt_lost AFTER UPDATE OF lease ON onceward_jobs
WHEN old.state = 'running' AND new.lease > old.lease AND old.attempts <= old.max_attempts
BEGIN
    INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker, failed_at)
    VALUES (old.tenant, old.id, old.attempts, 'worker_lost',
            'the worker died, hung or lost its lease', old.worker, new.started_at);
END;
