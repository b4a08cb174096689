-- A claim that takes a job over from a worker that died, hung or lost its lease writes down what was
-- lost: which attempt, and whose. A trigger, because the claim is one statement and commits by itself:
-- a second one would cost every claim a round trip, and one after it could be lost in its turn.
-- (Nor a WITH around the claim, which would have to be planned with it each time.)
--
-- A job past its last attempt is only taken to be buried, and that is no attempt.
CREATE FUNCTION holdfast_attempt_lost() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_failures (tenant, job_id, attempt, reason, error, worker, failed_at)
    VALUES (old.tenant, old.id, old.attempts, 'worker_lost',
            'the worker died, hung or lost its lease', old.worker, new.started_at);
    RETURN NULL;
END
$$;

CREATE TRIGGER jobs_attempt_lost AFTER UPDATE OF lease ON jobs FOR EACH ROW
  WHEN (old.state = 'running' AND new.lease > old.lease AND old.attempts <= old.max_attempts)
  EXECUTE FUNCTION holdfast_attempt_lost();
