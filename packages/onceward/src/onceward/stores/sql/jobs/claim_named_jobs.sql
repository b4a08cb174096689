-- Leases the jobs that a broker has named, if they are due, not leased, and their queue is not paused.
CREATE OR REPLACE FUNCTION onceward_claim_named_jobs(
    p_tenants text[], p_ids uuid[], p_worker text, p_lease_seconds float8, p_alone boolean
) RETURNS TABLE (
    tenant text, job_id uuid, lease bigint, key text, queue text, type text, payload text,
    attempts integer, max_attempts integer, lost integer, request_id text, correlation_id text,
    traceparent text, version bigint, resource_id text, order_key text, enqueued_at timestamptz,
    completed boolean
) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := statement_timestamp();
    v_rows tid[];
    v_has_lost boolean;
    v_paused text[] := ARRAY(SELECT queue FROM onceward_paused_queues);
BEGIN
    SELECT array_agg(due.ctid), bool_or(due.state = 'running') INTO v_rows, v_has_lost
      FROM (SELECT job.ctid, job.state
              FROM unnest(p_tenants, p_ids) AS named(tenant, id)
              JOIN onceward_jobs AS job ON job.tenant = named.tenant AND job.id = named.id
             WHERE job.visible_at <= v_now AND job.queue <> ALL (v_paused)
               FOR UPDATE OF job SKIP LOCKED) AS due;
    IF v_rows IS NOT NULL THEN
        RETURN QUERY
        SELECT * FROM onceward_lease_jobs(
            v_rows, v_has_lost, v_now, p_worker, p_lease_seconds, p_alone);
    END IF;
END $$;
