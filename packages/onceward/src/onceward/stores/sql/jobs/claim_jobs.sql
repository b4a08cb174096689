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
        SELECT * FROM onceward_lease_jobs(
            v_rows, v_has_lost, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
END $$;
