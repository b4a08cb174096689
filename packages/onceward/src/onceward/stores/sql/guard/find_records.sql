-- The records of several keys, expired or not, with the places of their keys. The settings make
-- PostgreSQL look each key up in the index: it sometimes plans a scan of the table.
CREATE OR REPLACE FUNCTION onceward_find_records(
    p_tenants text[], p_endpoints text[], p_keys text[]
) RETURNS TABLE (
    place bigint, canonical_body_hash text, request_fingerprint text, response_status integer,
    response_body bytea, response_headers jsonb, request_id text, correlation_id text,
    audit_id text, created_at timestamptz, expires_at timestamptz, client_generated_at timestamptz
) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off SET enable_bitmapscan = off
  SET enable_hashjoin = off SET enable_mergejoin = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT wanted.place, record.canonical_body_hash, record.request_fingerprint,
           record.response_status, record.response_body, record.response_headers,
           record.request_id, record.correlation_id, record.audit_id, record.created_at,
           record.expires_at, record.client_generated_at
      FROM unnest(p_tenants, p_endpoints, p_keys)
           WITH ORDINALITY AS wanted(tenant, endpoint, idempotency_key, place)
      JOIN onceward_idempotency_records AS record
        ON record.tenant = wanted.tenant AND record.endpoint = wanted.endpoint
       AND record.idempotency_key = wanted.idempotency_key;
END $$;
