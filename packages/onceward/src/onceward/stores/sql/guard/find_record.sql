-- The record of a key unless it is expired. A function, because a plan that is cached while the table is
-- tiny would read all of it, for as long as the connection lives.
CREATE OR REPLACE FUNCTION onceward_find_record(
    p_tenant text, p_endpoint text, p_key text, p_now timestamptz
) RETURNS TABLE (
    canonical_body_hash text, request_fingerprint text, response_status integer,
    response_body bytea, response_headers jsonb, request_id text, correlation_id text,
    audit_id text, created_at timestamptz, expires_at timestamptz, client_generated_at timestamptz
) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT record.canonical_body_hash, record.request_fingerprint, record.response_status,
           record.response_body, record.response_headers, record.request_id,
           record.correlation_id, record.audit_id, record.created_at, record.expires_at,
           record.client_generated_at
      FROM onceward_idempotency_records AS record
     WHERE tenant = p_tenant AND endpoint = p_endpoint AND idempotency_key = p_key
       AND expires_at > p_now;
END $$;
