-- A worker that dies takes all its running jobs with it, and one of them may be the cause. An attempt
-- that is lost counts only if its worker ran no other job at that time. A job that was lost twice in
-- a row beside others is run alone the next time, so a job that kills its worker is found, and the
-- jobs beside it keep their attempts.
--
-- alone: while it runs, whether the worker runs no other job.
-- lost: attempts in a row that were lost beside other jobs. They do not count in attempts.
ALTER TABLE onceward_jobs ADD COLUMN alone INTEGER NOT NULL DEFAULT 0;
ALTER TABLE onceward_jobs ADD COLUMN lost INTEGER NOT NULL DEFAULT 0;

DROP TRIGGER onceward_jobs_attempt_lost;
CREATE TRIGGER onceward_jobs_attempt_lost AFTER UPDATE OF lease ON onceward_jobs
WHEN old.state = 'running' AND new.lease > old.lease AND old.attempts <= old.max_attempts
BEGIN
    INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker, failed_at)
    VALUES (old.tenant, old.id, old.attempts, 'worker_lost',
            CASE WHEN old.alone THEN 'the worker died, hung or lost its lease'
                 ELSE 'the worker died, hung or lost its lease while it ran other jobs, too: '
                      || 'does not count as an attempt' END,
            old.worker, new.started_at);
END;

-- For the number of dead letters in the metrics: requeued ones are not read.
CREATE INDEX idx_onceward_dead_letters_queue ON onceward_dead_letters (queue)
 WHERE requeued_at IS NULL;
