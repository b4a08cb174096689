-- Merges the job into a waiting one with the same coalescing key: that one gets the new payload and
-- keeps its due time. No worker can lease it meanwhile, because this transaction locks the row.
CREATE OR REPLACE FUNCTION onceward_enqueue_coalesced(
    p_tenant text, p_id uuid, p_key text, p_queue text, p_type text, p_resource_id text,
    p_payload text, p_payload_hash text, p_coalesce_key text, p_order_key text, p_run_at float8,
    p_delay_seconds float8, p_max_attempts integer, p_actor text, p_request_id text,
    p_correlation_id text, p_traceparent text, p_version bigint, p_audit_id text,
    p_audit_name text,
    OUT job_id text, OUT job_key text, OUT merged integer
) LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
DECLARE
    v_now timestamptz := statement_timestamp();
    v_run_at timestamptz;
    v_visible_at timestamptz;
BEGIN
    v_run_at := coalesce(to_timestamp(p_run_at), v_now) + make_interval(secs => p_delay_seconds);
    v_visible_at := v_run_at;
    IF p_order_key IS NOT NULL THEN
        PERFORM 1 FROM onceward_jobs WHERE tenant = p_tenant AND order_key = p_order_key LIMIT 1;
        IF FOUND THEN
            v_visible_at := 'infinity';
        END IF;
    END IF;
    INSERT INTO onceward_jobs AS old
           (tenant, id, key, queue, type, resource_id, payload, payload_hash, coalesce_key,
            waiting_key, order_key, visible_at, run_at, max_attempts, actor, request_id,
            correlation_id, traceparent, version, enqueued_at)
    VALUES (p_tenant, p_id, p_key, p_queue, p_type, p_resource_id, p_payload, p_payload_hash,
            p_coalesce_key, p_coalesce_key, p_order_key, v_visible_at, v_run_at, p_max_attempts,
            p_actor, p_request_id, p_correlation_id, p_traceparent, p_version, v_now)
        ON CONFLICT (tenant, queue, type, waiting_key) WHERE waiting_key IS NOT NULL DO UPDATE
       SET payload = excluded.payload, payload_hash = excluded.payload_hash,
           version = excluded.version, merged = old.merged + 1
    RETURNING old.id::text, old.key, old.merged INTO job_id, job_key, merged;
    IF merged = 0 THEN
        INSERT INTO onceward_audit_events
               (tenant, id, actor, endpoint, payload_hash, status, resource, version,
                request_id, correlation_id, created_at)
        VALUES (p_tenant, p_audit_id, p_actor, p_audit_name, p_payload_hash, 202, p_key, p_version,
                p_request_id, p_correlation_id, v_now);
    END IF;
END $$;
