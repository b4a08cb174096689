-- The first p_limit jobs of each queue after a place, in the order of their times. An empty state or
-- queue matches every one, and so does a tenant that is null.
CREATE OR REPLACE FUNCTION onceward_first_jobs(
    p_queue text, p_state text, p_tenant text, p_after timestamptz, p_after_id uuid, p_limit integer
) RETURNS SETOF onceward_jobs LANGUAGE plpgsql STABLE
  SET enable_seqscan = off AS $$
DECLARE
    v_queue text := p_queue;
BEGIN
    LOOP
        IF p_queue = '' THEN
            SELECT queue INTO v_queue FROM onceward_jobs
             WHERE queue > v_queue ORDER BY queue LIMIT 1;
            EXIT WHEN NOT FOUND;
        END IF;
        RETURN QUERY
        SELECT * FROM onceward_jobs
         WHERE queue = v_queue AND (p_state = '' OR state = p_state)
           AND (p_tenant IS NULL OR tenant = p_tenant)
           AND (visible_at, id) > (p_after, p_after_id)
         ORDER BY visible_at, id LIMIT p_limit;
        EXIT WHEN p_queue <> '';
    END LOOP;
END $$;
