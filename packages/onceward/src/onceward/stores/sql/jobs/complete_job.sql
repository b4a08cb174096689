-- Completes a job in the transaction of its effects: a function, so that the call can share a message
-- with COMMIT. It raises if the lease was lost or a marker exists, and the transaction cannot commit.
CREATE OR REPLACE FUNCTION onceward_complete_job(
    p_tenant text, p_job_id uuid, p_lease bigint, p_worker text, p_result text
) RETURNS void LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
DECLARE
    v_job onceward_jobs;
BEGIN
    DELETE FROM onceward_jobs
     WHERE tenant = p_tenant AND id = p_job_id AND lease = p_lease AND worker = p_worker
       AND visible_at > statement_timestamp()
    RETURNING * INTO v_job;
    IF FOUND THEN
        INSERT INTO onceward_job_completions
               (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts,
                worker, request_id, correlation_id, enqueued_at, completed_at)
        VALUES (p_tenant, p_job_id, v_job.key, v_job.queue, v_job.type, v_job.resource_id,
                v_job.payload_hash, p_result, v_job.attempts, p_worker, v_job.request_id,
                v_job.correlation_id, v_job.enqueued_at, statement_timestamp())
            ON CONFLICT (tenant, job_id) DO NOTHING;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease was lost' USING ERRCODE = 'HF003';
    END IF;
END $$;
