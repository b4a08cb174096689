-- When the next job of these queues becomes visible, after an instant; null if there is none. Jobs of
-- paused queues do not count.
CREATE OR REPLACE FUNCTION onceward_next_visible(p_queues text[], p_after timestamptz)
RETURNS timestamptz LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
    v_next timestamptz;
    v_least timestamptz;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        CONTINUE WHEN v_queue = ANY (v_paused);
        SELECT visible_at INTO v_next FROM onceward_jobs
         WHERE queue = v_queue AND visible_at > p_after AND visible_at < 'infinity'
         ORDER BY visible_at LIMIT 1;
        v_least := least(v_least, v_next);
    END LOOP;
    RETURN v_least;
END $$;
