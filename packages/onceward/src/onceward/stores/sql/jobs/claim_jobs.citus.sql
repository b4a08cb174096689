-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. Finds a page of
-- them without a lock, then leases them; if others have locked some, it goes on with those that it has
-- not tried: a job that somebody else leases meanwhile changes no other job's place in the page.
-- The names of the paused queues are read first, not joined: on Citus they are on the coordinator only.
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
    v_left integer := p_limit;
    v_tried uuid[] := '{}';
    v_queue text;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
    v_page record;
    v_due record;
    v_is_last boolean;
    v_leased integer;
BEGIN
    LOOP
        v_due := NULL;
        v_is_last := true;
        FOREACH v_queue IN ARRAY p_queues LOOP
            CONTINUE WHEN v_queue = ANY (v_paused);
            SELECT array_agg(tenant) AS tenants, array_agg(id) AS ids, array_agg(state) AS states,
                   array_agg(visible_at) AS times
              INTO v_page
              FROM (SELECT tenant, id, state, visible_at FROM onceward_jobs
                     WHERE queue = v_queue AND visible_at <= v_now AND id <> ALL (v_tried)
                     ORDER BY visible_at LIMIT p_limit) AS page;
            IF v_page.ids IS NULL THEN
                CONTINUE;
            END IF;
            v_is_last := v_is_last AND cardinality(v_page.ids) < p_limit;
            IF v_due IS NULL THEN
                v_due := v_page;
            ELSE
                v_due.tenants := v_due.tenants || v_page.tenants;
                v_due.ids := v_due.ids || v_page.ids;
                v_due.states := v_due.states || v_page.states;
                v_due.times := v_due.times || v_page.times;
            END IF;
        END LOOP;
        EXIT WHEN v_due IS NULL;
        IF cardinality(v_due.ids) > v_left THEN
            SELECT array_agg(tenant) AS tenants, array_agg(id) AS ids, array_agg(state) AS states,
                   array_agg(visible_at) AS times
              INTO v_due
              FROM (SELECT * FROM unnest(v_due.tenants, v_due.ids, v_due.states, v_due.times)
                           AS due(tenant, id, state, visible_at)
                     ORDER BY visible_at LIMIT v_left) AS oldest;
            v_is_last := false;
        END IF;
        RETURN QUERY
        SELECT * FROM onceward_lease_jobs(
            v_due.tenants, v_due.ids, v_due.states, v_now, p_worker, p_lease_seconds, p_alone);
        GET DIAGNOSTICS v_leased = ROW_COUNT;
        v_left := v_left - v_leased;
        v_tried := v_tried || v_due.ids;
        EXIT WHEN v_left <= 0 OR v_is_last;
    END LOOP;
END $$;
