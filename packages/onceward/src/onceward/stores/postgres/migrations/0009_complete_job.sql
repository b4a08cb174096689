-- Completes a job in the transaction of its effects: a function, so that the call can share a message
-- with COMMIT. It raises if the lease was lost or a marker exists, and the transaction cannot commit.
-- There is no such migration for SQLite, which has no round trips.
CREATE OR REPLACE FUNCTION onceward_complete_job(
    p_tenant text, p_job_id uuid, p_lease bigint, p_worker text, p_result text
) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    WITH deleted AS (
        DELETE FROM onceward_jobs
         WHERE tenant = p_tenant AND id = p_job_id AND lease = p_lease AND worker = p_worker
           AND visible_at > clock_timestamp()
        RETURNING *
    )
    INSERT INTO onceward_job_completions
           (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts, worker,
            request_id, correlation_id, enqueued_at)
    SELECT tenant, id, key, queue, type, resource_id, payload_hash, p_result, attempts, worker,
           request_id, correlation_id, enqueued_at
      FROM deleted
        ON CONFLICT (tenant, job_id) DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease was lost' USING ERRCODE = 'HF003';
    END IF;
END $$;
