-- Deletes a batch of the records that expired first, and returns how many. Rows that another
-- transaction has locked are skipped.
CREATE OR REPLACE FUNCTION onceward_sweep_expired(p_now timestamptz, p_limit integer)
RETURNS integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off AS $$
DECLARE
    v_deleted integer;
BEGIN
    DELETE FROM onceward_idempotency_records
     WHERE ctid = ANY (ARRAY(
           SELECT ctid FROM onceward_idempotency_records
            WHERE expires_at <= p_now ORDER BY expires_at LIMIT p_limit
              FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END $$;
