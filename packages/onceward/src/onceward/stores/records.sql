-- Statements on records that are the same for SQLite and PostgreSQL.

-- name: read_cache_epoch
SELECT cache_epoch FROM onceward_secret;

-- name: read_newest_record
-- Of SQLite, which has no clock: the row that was inserted last.
SELECT created_at FROM onceward_idempotency_records ORDER BY rowid DESC LIMIT 1;

-- name: renew_cache_epoch
UPDATE onceward_secret SET cache_epoch = :epoch;

-- name: replace_cache_epoch
-- Only if no other process has done it: all of them detect the same loss.
UPDATE onceward_secret SET cache_epoch = :epoch WHERE cache_epoch = :before;

-- name: delete_record
-- Expired or not. The request: not a record that has replaced it in the meantime.
DELETE FROM onceward_idempotency_records
 WHERE tenant = :tenant AND endpoint = :endpoint AND idempotency_key = :key
   AND request_id = :request_id;

-- name: sweep_records_of_tenant
-- One batch of expired records; the caches forget the ones returned.
DELETE FROM onceward_idempotency_records
 WHERE tenant = :tenant AND (endpoint, idempotency_key) IN (
       SELECT endpoint, idempotency_key FROM onceward_idempotency_records
        WHERE tenant = :tenant AND expires_at <= :now LIMIT :limit)
RETURNING endpoint, idempotency_key;

-- name: count_of_tenant
-- How many records a tenant has, counted up to :most. Expired ones count until they are swept.
SELECT count(*) AS records
FROM (
    SELECT 1 AS one FROM onceward_idempotency_records WHERE tenant = :tenant LIMIT :most
) AS counted
