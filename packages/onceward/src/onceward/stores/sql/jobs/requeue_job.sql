-- Moves a dead letter back into its queue with all its attempts, and returns the queue; null if there
-- is none. The dead letter stays, marked. The caller holds the lock of the order key.
CREATE OR REPLACE FUNCTION onceward_requeue_job(
    p_tenant text, p_job_id uuid, p_actor text, p_audit_id text
) RETURNS text LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_visible_at timestamptz := v_now;
    v_dead onceward_dead_letters;
BEGIN
    PERFORM 1 FROM onceward_job_completions WHERE tenant = p_tenant AND job_id = p_job_id;
    IF FOUND THEN
        RETURN NULL;
    END IF;
    SELECT * INTO v_dead FROM onceward_dead_letters
     WHERE tenant = p_tenant AND job_id = p_job_id AND requeued_at IS NULL;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF v_dead.order_key IS NOT NULL THEN
        PERFORM 1 FROM onceward_jobs
          WHERE tenant = p_tenant AND order_key = v_dead.order_key LIMIT 1;
        IF FOUND THEN
            v_visible_at := 'infinity';
        END IF;
    END IF;
    INSERT INTO onceward_jobs
           (tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
            visible_at, run_at, max_attempts, actor, request_id, correlation_id, enqueued_at,
            version)
    VALUES (p_tenant, p_job_id, v_dead.key, v_dead.queue, v_dead.type, v_dead.resource_id,
            v_dead.payload, v_dead.payload_hash, v_dead.order_key, v_visible_at, v_now,
            v_dead.max_attempts, v_dead.actor, v_dead.request_id, v_dead.correlation_id,
            v_dead.enqueued_at, v_dead.version)
        ON CONFLICT (tenant, id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    UPDATE onceward_dead_letters SET requeued_at = v_now
     WHERE tenant = p_tenant AND job_id = p_job_id;
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at)
    VALUES (p_tenant, p_audit_id, p_actor, 'job.requeued ' || v_dead.queue || ' ' || v_dead.type,
            v_dead.payload_hash, 202, v_dead.key, v_dead.version, v_dead.request_id,
            v_dead.correlation_id, v_now);
    RETURN v_dead.queue;
END $$;
