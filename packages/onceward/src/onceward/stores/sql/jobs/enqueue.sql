-- Inserts a job and its audit event, unless its key is completed or waits already. A dead-lettered key
-- is enqueued again, and its dead letter is marked as requeued. A job with an order key waits at
-- infinity if it is not the first; the caller holds the lock of the order key.
-- Rows are inserted with VALUES: then it is the server that runs the function, and no node of Citus, that
-- numbers them (seq).
CREATE OR REPLACE FUNCTION onceward_enqueue(
    p_tenant text, p_id uuid, p_key text, p_queue text, p_type text, p_resource_id text,
    p_payload text, p_payload_hash text, p_order_key text, p_run_at float8, p_delay_seconds float8,
    p_max_attempts integer, p_actor text, p_request_id text, p_correlation_id text,
    p_traceparent text, p_version bigint, p_audit_id text, p_audit_name text
) RETURNS boolean LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_run_at timestamptz;
    v_visible_at timestamptz;
BEGIN
    PERFORM 1 FROM onceward_job_completions WHERE tenant = p_tenant AND job_id = p_id;
    IF FOUND THEN
        RETURN false;
    END IF;
    v_run_at := coalesce(to_timestamp(p_run_at), v_now) + make_interval(secs => p_delay_seconds);
    v_visible_at := v_run_at;
    IF p_order_key IS NOT NULL THEN
        PERFORM 1 FROM onceward_jobs WHERE tenant = p_tenant AND order_key = p_order_key LIMIT 1;
        IF FOUND THEN
            v_visible_at := 'infinity';
        END IF;
    END IF;
    INSERT INTO onceward_jobs
           (tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
            visible_at, run_at, max_attempts, actor, request_id, correlation_id, traceparent,
            version, enqueued_at)
    VALUES (p_tenant, p_id, p_key, p_queue, p_type, p_resource_id, p_payload, p_payload_hash,
            p_order_key, v_visible_at, v_run_at, p_max_attempts, p_actor, p_request_id,
            p_correlation_id, p_traceparent, p_version, v_now)
        ON CONFLICT (tenant, id) DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at)
    VALUES (p_tenant, p_audit_id, p_actor, p_audit_name, p_payload_hash, 202, p_key, p_version,
            p_request_id, p_correlation_id, v_now);
    UPDATE onceward_dead_letters SET requeued_at = v_now
     WHERE tenant = p_tenant AND job_id = p_id AND requeued_at IS NULL;
    RETURN true;
END $$;
