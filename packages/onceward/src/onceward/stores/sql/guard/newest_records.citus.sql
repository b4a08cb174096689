-- The newest p_limit records of each endpoint: before an instant, and after a place in the list. What is
-- null matches every record.
CREATE OR REPLACE FUNCTION onceward_newest_records(
    p_before timestamptz, p_after_at timestamptz, p_after_tenant text, p_after_endpoint text,
    p_after_key text, p_limit bigint
) RETURNS SETOF onceward_idempotency_records LANGUAGE plpgsql STABLE
  SET enable_seqscan = off AS $$
DECLARE
    v_endpoint text := '';
BEGIN
    LOOP
        SELECT endpoint INTO v_endpoint FROM onceward_idempotency_records
         WHERE endpoint > v_endpoint ORDER BY endpoint LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN QUERY
        SELECT * FROM onceward_idempotency_records
         WHERE endpoint = v_endpoint AND (p_before IS NULL OR created_at < p_before)
           AND (p_after_at IS NULL
                OR (created_at, tenant, endpoint, idempotency_key)
                   < (p_after_at, p_after_tenant, p_after_endpoint, p_after_key))
         ORDER BY created_at DESC, tenant DESC, idempotency_key DESC LIMIT p_limit;
    END LOOP;
END $$;
