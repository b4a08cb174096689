-- Claims a key: first the lock, then the look-up, in two statements with separate snapshots. In one
-- statement the snapshot would be older than the lock, and a record committed in between would be
-- missed. The lock ends with the transaction, so a killed process leaves none behind. The function
-- never waits for the lock: requests wait without holding a connection.
-- The result is a number of rows, which fits into the command tag of a shared message: 0 if the key
-- is claimed, 1 if it has a live record, 2 if it is held, 3 if it is claimed and has an expired
-- record. (An exception for "held" would write the statement, and with it the key, to the server's
-- log.)
CREATE OR REPLACE FUNCTION onceward_claim(
    p_lock bigint, p_tenant text, p_endpoint text, p_key text, p_now timestamptz
) RETURNS SETOF integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
DECLARE
    v_expires_at timestamptz;
BEGIN
    IF NOT pg_try_advisory_xact_lock(p_lock) THEN
        RETURN QUERY SELECT generate_series(1, 2);
        RETURN;
    END IF;
    SELECT expires_at INTO v_expires_at FROM onceward_idempotency_records
     WHERE tenant = p_tenant AND endpoint = p_endpoint AND idempotency_key = p_key;
    IF v_expires_at > p_now THEN
        RETURN NEXT 1;
    ELSIF v_expires_at IS NOT NULL THEN
        RETURN QUERY SELECT generate_series(1, 3);
    END IF;
END $$;
