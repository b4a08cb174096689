-- Deletes a batch of old rows of jobs, and returns how many. Completions: a key counts as completed until
-- its marker is deleted here. Dead letters: only requeued ones, an operator decides about the others.
-- Steps, failures and causes: only of jobs that are gone.
CREATE OR REPLACE FUNCTION onceward_clean_jobs(
    p_what text, p_before timestamptz, p_limit integer
) RETURNS integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = on SET enable_sort = off AS $$
DECLARE
    v_deleted integer;
BEGIN
    IF p_what = 'completions' THEN
        SET LOCAL enable_seqscan = off;  -- the others have no index for it
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
