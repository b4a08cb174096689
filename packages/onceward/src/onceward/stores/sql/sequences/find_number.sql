-- How far a stream has come, and the key that a number was used for. Null: not known.
CREATE OR REPLACE FUNCTION onceward_find_number(p_tenant text, p_client_id text, p_number bigint)
RETURNS TABLE (last_number bigint, key_hash text) LANGUAGE plpgsql STABLE
  SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT (SELECT last_number FROM onceward_sequences
             WHERE tenant = p_tenant AND client_id = p_client_id),
           (SELECT key_hash FROM onceward_sequence_numbers
             WHERE tenant = p_tenant AND client_id = p_client_id AND number = p_number);
END $$;
