-- Records that jobs are no longer published: their messages are acknowledged, and the relay publishes
-- them again, with the next message id. Returns them, without those that another transaction has locked.
CREATE OR REPLACE FUNCTION onceward_unpublish_jobs(p_tenants text[], p_ids uuid[])
RETURNS TABLE (tenant text, job_id uuid) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
DECLARE
    v_tenant text;
    v_ids uuid[];
BEGIN
    FOR v_tenant, v_ids IN
        SELECT named.tenant, array_agg(named.id)
          FROM unnest(p_tenants, p_ids) AS named(tenant, id)
         GROUP BY named.tenant
    LOOP
        RETURN QUERY
        UPDATE onceward_jobs AS job
           SET published_at = NULL
          FROM (SELECT id FROM onceward_jobs
                 WHERE tenant = v_tenant AND id = ANY (v_ids)
                   FOR UPDATE SKIP LOCKED) AS free
         WHERE job.tenant = v_tenant AND job.id = free.id
        RETURNING job.tenant, job.id;
    END LOOP;
END $$;
