-- Uses the next numbers of a stream, and forgets those of long ago. Returns a row for each number: none
-- if the stream is not where it was.
CREATE OR REPLACE FUNCTION onceward_advance_sequence(
    p_tenant text, p_client_id text, p_before bigint, p_last_number bigint, p_now timestamptz,
    p_forgotten bigint, p_numbers text[], p_hashes text[]
) RETURNS SETOF integer LANGUAGE plpgsql VOLATILE
  SET enable_seqscan = off AS $$
BEGIN
    UPDATE onceward_sequences SET last_number = p_last_number, updated_at = p_now
     WHERE tenant = p_tenant AND client_id = p_client_id AND last_number = p_before;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    DELETE FROM onceward_sequence_numbers
     WHERE tenant = p_tenant AND client_id = p_client_id AND number <= p_forgotten;
    RETURN QUERY
    INSERT INTO onceward_sequence_numbers (tenant, client_id, number, key_hash)
    SELECT p_tenant, p_client_id, used.number, used.key_hash
      FROM unnest(p_numbers::bigint[], p_hashes) AS used (number, key_hash)
    RETURNING 1;
END $$;
