-- The tenants that have a job with this id, among the first p_most of each table.
CREATE OR REPLACE FUNCTION onceward_tenants_of_job(p_job_id uuid, p_most integer)
RETURNS SETOF text LANGUAGE plpgsql STABLE
  SET enable_seqscan = off AS $$
DECLARE
    v_tenant text := '';
BEGIN
    FOR i IN 1 .. p_most LOOP
        SELECT tenant INTO v_tenant FROM onceward_jobs
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY SELECT tenant FROM onceward_jobs WHERE tenant = v_tenant AND id = p_job_id;
    END LOOP;
    v_tenant := '';
    FOR i IN 1 .. p_most LOOP
        SELECT tenant INTO v_tenant FROM onceward_job_completions
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT tenant FROM onceward_job_completions WHERE tenant = v_tenant AND job_id = p_job_id;
    END LOOP;
    v_tenant := '';
    FOR i IN 1 .. p_most LOOP
        SELECT tenant INTO v_tenant FROM onceward_dead_letters
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT tenant FROM onceward_dead_letters WHERE tenant = v_tenant AND job_id = p_job_id;
    END LOOP;
END $$;
