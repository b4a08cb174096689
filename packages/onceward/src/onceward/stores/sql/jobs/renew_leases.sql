-- Renews leases that have not expired: another worker may have leased the other jobs since.
CREATE OR REPLACE FUNCTION onceward_renew_leases(
    p_leases json, p_worker text, p_lease_seconds float8
) RETURNS TABLE (tenant text, job_id text) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    UPDATE onceward_jobs AS job
       SET visible_at = statement_timestamp() + make_interval(secs => p_lease_seconds)
      FROM json_to_recordset(p_leases) AS mine(tenant text, job_id uuid, lease bigint)
     WHERE job.tenant = mine.tenant AND job.id = mine.job_id AND job.lease = mine.lease
       AND job.worker = p_worker AND job.visible_at > statement_timestamp()
    RETURNING job.tenant, job.id::text;
END $$;
