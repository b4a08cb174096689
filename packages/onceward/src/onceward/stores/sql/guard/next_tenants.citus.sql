-- The next tenants that have records, in the order of their names.
CREATE OR REPLACE FUNCTION onceward_next_tenants(p_after text, p_limit bigint)
RETURNS SETOF text LANGUAGE plpgsql STABLE
  SET enable_seqscan = off AS $$
DECLARE
    v_tenant text := p_after;
BEGIN
    FOR i IN 1 .. p_limit LOOP
        SELECT tenant INTO v_tenant FROM onceward_idempotency_records
         WHERE tenant > v_tenant ORDER BY tenant LIMIT 1;
        EXIT WHEN NOT FOUND;
        RETURN NEXT v_tenant;
    END LOOP;
END $$;
