-- Moves a waiting job to the dead letters, and returns its queue; null if it does not wait. A claim
-- that has locked the row is waited for: the job then runs and is not cancelled. The caller holds the
-- lock of the order key.
CREATE OR REPLACE FUNCTION onceward_cancel_job(
    p_tenant text, p_job_id uuid, p_actor text, p_reason text, p_audit_id text
) RETURNS text LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_job onceward_jobs;
BEGIN
    DELETE FROM onceward_jobs
     WHERE tenant = p_tenant AND id = p_job_id AND state = 'waiting'
    RETURNING * INTO v_job;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO onceward_dead_letters AS old
           (tenant, job_id, key, queue, type, resource_id, payload, payload_hash, order_key,
            reason, error, attempts, max_attempts, actor, request_id, correlation_id, enqueued_at,
            died_at, version)
    VALUES (p_tenant, p_job_id, v_job.key, v_job.queue, v_job.type, v_job.resource_id,
            v_job.payload, v_job.payload_hash, v_job.order_key, 'cancelled', p_reason,
            v_job.attempts, v_job.max_attempts, v_job.actor, v_job.request_id,
            v_job.correlation_id, v_job.enqueued_at, v_now, v_job.version)
        ON CONFLICT (tenant, job_id) DO UPDATE
       SET payload = excluded.payload, payload_hash = excluded.payload_hash,
           reason = excluded.reason, error = excluded.error, attempts = excluded.attempts,
           deaths = old.deaths + 1, died_at = excluded.died_at, requeued_at = NULL,
           request_id = excluded.request_id, correlation_id = excluded.correlation_id,
           enqueued_at = excluded.enqueued_at, version = excluded.version;
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at, reason)
    VALUES (p_tenant, p_audit_id, p_actor, 'job.cancelled ' || v_job.queue || ' ' || v_job.type,
            v_job.payload_hash, 200, v_job.key, v_job.version, v_job.request_id,
            v_job.correlation_id, v_now, p_reason);
    RETURN v_job.queue;
END $$;
