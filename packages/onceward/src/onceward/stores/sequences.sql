-- The statements of strict sequences. Array parameters are text[], as in postgres/queries.sql.

-- name: find_number
-- How far a stream has come, and the key that a number was used for. Null: not known.
SELECT (SELECT last_number FROM onceward_sequences
         WHERE tenant = :tenant AND client_id = :client_id) AS last_number,
       (SELECT key_hash FROM onceward_sequence_numbers
         WHERE tenant = :tenant AND client_id = :client_id AND number = :number) AS key_hash;

-- name: find_number_at_once
-- The same on PostgreSQL: a function, whose plan never reads a whole table.
SELECT last_number, key_hash FROM onceward_find_number(:tenant, :client_id, :number);

-- name: find_number_at_once on citus
SELECT (SELECT last_number FROM onceward_sequences
         WHERE tenant = :tenant AND client_id = :client_id) AS last_number,
       (SELECT key_hash FROM onceward_sequence_numbers
         WHERE tenant = :tenant AND client_id = :client_id AND number = :number) AS key_hash;

-- name: find_numbers
-- The keys of a number and of those after it.
SELECT number, key_hash FROM onceward_sequence_numbers
 WHERE tenant = :tenant AND client_id = :client_id AND number >= :number;

-- name: find_key
-- The number that a key was used for. Reads up to 1,000 rows; only for requests that are refused.
SELECT max(number) AS number FROM onceward_sequence_numbers
 WHERE tenant = :tenant AND client_id = :client_id AND key_hash = :key_hash;

-- name: try_lock
-- Held until the end of the transaction: one request of a stream runs at a time. PostgreSQL only.
SELECT pg_try_advisory_xact_lock(:lock) AS is_locked;

-- name: begin_at_once
-- Uses the first numbers of a stream, on PostgreSQL. Inserts no row if the stream has begun.
WITH begun AS (
    INSERT INTO onceward_sequences (tenant, client_id, last_number, updated_at)
    VALUES (:tenant, :client_id, :last_number, :now)
        ON CONFLICT (tenant, client_id) DO NOTHING
    RETURNING tenant, client_id
)
INSERT INTO onceward_sequence_numbers (tenant, client_id, number, key_hash)
SELECT begun.tenant, begun.client_id, used.number, used.key_hash
  FROM begun,
       unnest(CAST(CAST(:numbers AS text[]) AS bigint[]), CAST(:hashes AS text[]))
       AS used (number, key_hash);

-- name: advance_at_once
-- Uses the next numbers of a stream, on PostgreSQL. Inserts no row if the stream is not where it was.
SELECT onceward_advance_sequence(
           :tenant, :client_id, :before, :last_number, :now, :forgotten,
           CAST(:numbers AS text[]), CAST(:hashes AS text[]));

-- name: advance_at_once on citus
WITH advanced AS (
    UPDATE onceward_sequences SET last_number = :last_number, updated_at = :now
     WHERE tenant = :tenant AND client_id = :client_id AND last_number = :before
    RETURNING tenant, client_id
), forgotten AS (
    DELETE FROM onceward_sequence_numbers
     WHERE tenant = :tenant AND client_id = :client_id AND number <= :forgotten
)
INSERT INTO onceward_sequence_numbers (tenant, client_id, number, key_hash)
SELECT advanced.tenant, advanced.client_id, used.number, used.key_hash
  FROM advanced,
       unnest(CAST(CAST(:numbers AS text[]) AS bigint[]), CAST(:hashes AS text[]))
       AS used (number, key_hash);

-- name: begin_stream
-- Changes no row if the stream has begun. This and the next three are for SQLite.
INSERT INTO onceward_sequences (tenant, client_id, last_number, updated_at)
VALUES (:tenant, :client_id, :last_number, :now)
    ON CONFLICT (tenant, client_id) DO NOTHING;

-- name: advance_stream
-- Changes no row if the stream is not where it was.
UPDATE onceward_sequences SET last_number = :last_number, updated_at = :now
 WHERE tenant = :tenant AND client_id = :client_id AND last_number = :before;

-- name: save_number
INSERT INTO onceward_sequence_numbers (tenant, client_id, number, key_hash)
VALUES (:tenant, :client_id, :number, :key_hash);

-- name: forget_numbers
DELETE FROM onceward_sequence_numbers
 WHERE tenant = :tenant AND client_id = :client_id AND number <= :forgotten;
