-- Writes the record and the audit event. The primary key decides: if the key has a live record, this
-- raises, and the transaction cannot commit. An expired record is overwritten.
CREATE OR REPLACE FUNCTION onceward_save_record(
    p_tenant text, p_endpoint text, p_key text, p_body_hash text, p_fingerprint text,
    p_status integer, p_body bytea, p_headers text,
    p_request_id text, p_correlation_id text, p_created_at timestamptz, p_expires_at timestamptz,
    p_client_generated_at timestamptz,
    p_audit_id text, p_actor text, p_resource text, p_version bigint
) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO onceward_idempotency_records AS old
           (tenant, endpoint, idempotency_key, canonical_body_hash, request_fingerprint,
            response_status, response_body, response_headers,
            request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at)
    VALUES (p_tenant, p_endpoint, p_key, p_body_hash, p_fingerprint,
            p_status, p_body, p_headers::jsonb,
            p_request_id, p_correlation_id, p_audit_id, p_created_at, p_expires_at,
            p_client_generated_at)
        ON CONFLICT (tenant, endpoint, idempotency_key) DO UPDATE
       SET canonical_body_hash = excluded.canonical_body_hash,
           request_fingerprint = excluded.request_fingerprint,
           response_status     = excluded.response_status,
           response_body       = excluded.response_body,
           response_headers    = excluded.response_headers,
           request_id          = excluded.request_id,
           correlation_id      = excluded.correlation_id,
           audit_id            = excluded.audit_id,
           created_at          = excluded.created_at,
           expires_at          = excluded.expires_at,
           client_generated_at = excluded.client_generated_at
     WHERE old.expires_at <= excluded.created_at;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the key was recorded by another' USING ERRCODE = 'HF002';
    END IF;
    IF p_audit_id IS NOT NULL THEN
        INSERT INTO onceward_audit_events
               (tenant, id, actor, endpoint, payload_hash, status, resource, version,
                request_id, correlation_id, created_at)
        VALUES (p_tenant, p_audit_id, p_actor, p_endpoint, p_body_hash, p_status, p_resource,
                p_version, p_request_id, p_correlation_id, p_created_at);
    END IF;
END $$;
