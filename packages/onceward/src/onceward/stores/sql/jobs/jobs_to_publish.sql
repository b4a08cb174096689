-- The first due jobs of each queue that are not published, or were published and not leased for some
-- time. That time doubles with each publication: a long queue is no reason to publish all of it again.
-- Only the front of each queue is read, so that a long queue costs no more than a short one. Paused
-- queues are left out.
CREATE OR REPLACE FUNCTION onceward_jobs_to_publish(
    p_queues text[], p_front integer, p_again_after_seconds float8
) RETURNS TABLE (
    tenant text, job_id uuid, queue text, seq bigint, published integer, visible_at timestamptz
) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        CONTINUE WHEN v_queue = ANY (v_paused);
        RETURN QUERY
        SELECT tenant, id, queue, seq, published, visible_at
          FROM (SELECT tenant, id, queue, seq, published, published_at, visible_at
                  FROM onceward_jobs
                 WHERE queue = v_queue AND visible_at <= v_now
                 ORDER BY visible_at LIMIT p_front) AS front
         WHERE published_at IS NULL
            OR greatest(published_at, visible_at) < v_now - make_interval(
                   secs => p_again_after_seconds * power(2, least(greatest(published, 1) - 1, 6)));
    END LOOP;
END $$;
