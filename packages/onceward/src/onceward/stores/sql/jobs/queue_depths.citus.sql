-- The numbers of jobs and dead letters of each queue; see queue_depths.sql. Citus has no generic plan
-- for a statement whose shards depend on no parameter.
CREATE OR REPLACE FUNCTION onceward_queue_depths(p_most integer, p_budget integer)
RETURNS TABLE (
    queue text, waiting bigint, running bigint, dead bigint, oldest_seconds float8, counted integer
) LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_queue text := '';
    v_queues text[] := '{}';
    v_dead text[] := '{}';
    v_most integer;
    v_jobs bigint;
    v_oldest timestamptz;
BEGIN
    LOOP
        SELECT queue INTO v_queue FROM onceward_jobs
         WHERE queue > v_queue ORDER BY queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_queues := v_queues || v_queue;
    END LOOP;
    v_queue := '';
    LOOP
        SELECT queue INTO v_queue FROM onceward_dead_letters
         WHERE queue > v_queue AND requeued_at IS NULL ORDER BY queue LIMIT 1;
        EXIT WHEN NOT FOUND;
        v_dead := v_dead || v_queue;
    END LOOP;
    v_most := least(p_most, greatest(100, p_budget / greatest(
        1, (SELECT count(DISTINCT name)::integer FROM unnest(v_queues || v_dead) AS name))
        / 100 * 100));
    counted := v_most;
    FOREACH v_queue IN ARRAY v_queues LOOP
        queue := v_queue;
        SELECT count(*) INTO running
          FROM (SELECT 1 FROM onceward_jobs
                 WHERE queue = v_queue AND state = 'running' LIMIT v_most) AS first;
        SELECT count(*) INTO v_jobs
          FROM (SELECT 1 FROM onceward_jobs WHERE queue = v_queue LIMIT 2 * v_most) AS first;
        SELECT min(run_at) FILTER (WHERE state = 'waiting') INTO v_oldest
          FROM (SELECT state, run_at FROM onceward_jobs
                 WHERE queue = v_queue AND visible_at <= v_now
                 ORDER BY visible_at LIMIT 10) AS first;
        waiting := least(v_jobs - running, v_most);
        oldest_seconds := coalesce(greatest(0, extract(epoch FROM v_now - v_oldest)), 0);
        dead := 0;
        IF v_queue = ANY (v_dead) THEN
            SELECT count(*) INTO dead
              FROM (SELECT 1 FROM onceward_dead_letters
                     WHERE queue = v_queue AND requeued_at IS NULL LIMIT v_most) AS first;
        END IF;
        RETURN NEXT;
    END LOOP;
    running := 0;
    waiting := 0;
    oldest_seconds := 0;
    FOREACH v_queue IN ARRAY v_dead LOOP
        CONTINUE WHEN v_queue = ANY (v_queues);
        queue := v_queue;
        SELECT count(*) INTO dead
          FROM (SELECT 1 FROM onceward_dead_letters
                 WHERE queue = v_queue AND requeued_at IS NULL LIMIT v_most) AS first;
        RETURN NEXT;
    END LOOP;
END $$;
