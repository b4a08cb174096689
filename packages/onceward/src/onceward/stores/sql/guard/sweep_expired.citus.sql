-- Deletes a batch of the records that expired first, one statement for each tenant, and returns how
-- many. Rows that another transaction has locked are skipped.
CREATE OR REPLACE FUNCTION onceward_sweep_expired(p_now timestamptz, p_limit integer)
RETURNS integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
  SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_left integer := p_limit;
    v_skipped integer := 0;
    v_page record;
    v_group record;
    v_rows integer;
    v_deleted integer;
BEGIN
    LOOP
        SELECT array_agg(tenant) AS tenants, array_agg(endpoint) AS endpoints,
               array_agg(idempotency_key) AS keys
          INTO v_page
          FROM (SELECT tenant, endpoint, idempotency_key FROM onceward_idempotency_records
                 WHERE expires_at <= p_now ORDER BY expires_at
                 LIMIT p_limit OFFSET v_skipped) AS page;
        EXIT WHEN v_page.keys IS NULL;
        v_deleted := 0;
        FOR v_group IN
            SELECT old.tenant, array_agg(old.endpoint) AS endpoints, array_agg(old.key) AS keys
              FROM (SELECT * FROM unnest(v_page.tenants, v_page.endpoints, v_page.keys)
                           AS every(tenant, endpoint, key) LIMIT v_left) AS old
             GROUP BY old.tenant
        LOOP
            DELETE FROM onceward_idempotency_records AS record
             USING (SELECT endpoint, idempotency_key FROM onceward_idempotency_records
                     WHERE tenant = v_group.tenant AND expires_at <= p_now
                       AND endpoint = ANY (v_group.endpoints)
                       AND idempotency_key = ANY (v_group.keys)
                       FOR UPDATE SKIP LOCKED) AS free
             WHERE record.tenant = v_group.tenant AND record.endpoint = free.endpoint
               AND record.idempotency_key = free.idempotency_key;
            GET DIAGNOSTICS v_rows = ROW_COUNT;
            v_deleted := v_deleted + v_rows;
        END LOOP;
        v_left := v_left - v_deleted;
        v_skipped := v_skipped + least(cardinality(v_page.keys), v_left + v_deleted) - v_deleted;
        EXIT WHEN v_left <= 0 OR cardinality(v_page.keys) < p_limit;
    END LOOP;
    RETURN p_limit - v_left;
END $$;
