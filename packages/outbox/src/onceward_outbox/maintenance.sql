-- Maintenance: clock, expiry, migration of payloads and profiles.

-- name: clock
SELECT boot_id, boot_ms, elapsed_ms, gap_ms, server_ms, server_at_ms, server_offset_ms
  FROM outbox_clock WHERE one = 1;

-- name: set_clock
INSERT INTO outbox_clock
       (one, boot_id, boot_ms, elapsed_ms, gap_ms, server_ms, server_at_ms, server_offset_ms)
VALUES (1, :boot_id, :boot_ms, :elapsed_ms, :gap_ms, :server_ms, :server_at_ms, :server_offset_ms)
    ON CONFLICT (one) DO UPDATE
   SET boot_id = excluded.boot_id, boot_ms = excluded.boot_ms, elapsed_ms = excluded.elapsed_ms,
       gap_ms = excluded.gap_ms, server_ms = excluded.server_ms,
       server_at_ms = excluded.server_at_ms, server_offset_ms = excluded.server_offset_ms;

-- name: newest_ms
SELECT enqueued_ms FROM offline_sync_queue ORDER BY rowid DESC LIMIT 1;

-- name: shift_since
-- Missed time may have passed before these were queued: they do not age by it.
UPDATE offline_sync_queue SET enqueued_ms = enqueued_ms + :by_ms
 WHERE status IN ('pending', 'in_flight', 'failed', 'conflict') AND enqueued_ms > :since_ms;

-- name: shift_aged
UPDATE offline_sync_queue SET aged_from_ms = aged_from_ms + :by_ms
 WHERE status IN ('pending', 'in_flight', 'failed', 'conflict') AND aged_from_ms > :since_ms;

-- name: shift_signed_out
UPDATE users SET signed_out_ms = signed_out_ms + :by_ms WHERE signed_out_ms > :since_ms;

-- name: shift_maybe
UPDATE offline_sync_queue SET maybe_since_ms = maybe_since_ms + :by_ms
 WHERE maybe_since_ms > :since_ms AND MAYBE_SENT;

-- name: clamp_maybe
-- After a restart: a send before it cannot be later than now, though the last minutes may not have
-- been written.
UPDATE offline_sync_queue SET maybe_since_ms = :ms
 WHERE maybe_since_ms > :ms AND MAYBE_SENT;

-- name: age_maybe
-- Sent before a gap of unknown length: the time between the device's clock then and the server's now,
-- less what was counted.
UPDATE offline_sync_queue
   SET maybe_since_ms = maybe_since_ms - max(0, :server_ms - (:ms - maybe_since_ms)
           - CAST((julianday(maybe_since_at) - 2440587.5) * 86400000 AS INTEGER))
 WHERE maybe_since_ms <= :since_ms AND MAYBE_SENT;

-- name: shift_leases
UPDATE offline_sync_queue SET lease_ms = lease_ms + :by_ms WHERE lease_ms IS NOT NULL;

-- name: shift_settled
UPDATE offline_sync_queue SET settled_ms = settled_ms + :by_ms WHERE settled_ms > :since_ms;

-- name: pending_by_age
-- In the order in which they were queued, so that reading can stop at the first that is young enough.
SELECT rowid, id, profile, enqueued_ms, AGED_FROM
  FROM offline_sync_queue
 WHERE user_id = :user_id AND status = 'pending' AND rowid > :after
 ORDER BY rowid LIMIT :limit;

-- name: expiring
SELECT entity_type, count(*), min(AGED_FROM) FROM offline_sync_queue
 WHERE user_id = :user_id AND status = 'pending' AND profile = :profile
   AND AGED_FROM >= :since AND AGED_FROM < :before
 GROUP BY entity_type;

-- name: signed_out
SELECT signed_out_ms FROM users WHERE id = :user_id;

-- name: set_signed_out
UPDATE users SET signed_out_ms = :ms WHERE id = :user_id;

-- name: skip_signed_out
-- The time without a sign-in does not count.
UPDATE offline_sync_queue SET aged_from_ms = :ms - max(0, :since_ms - AGED_FROM)
 WHERE user_id = :user_id AND status = 'pending';

-- name: awaited_by
SELECT awaited FROM entry_waits WHERE entry_id = :id AND met = 0;

-- name: warn
-- Returns no row if the user was warned less than a day ago.
UPDATE users SET warned_ms = :ms
 WHERE id = :user_id AND coalesce(warned_ms, :before) <= :before
RETURNING 1;

-- name: maybe_since
SELECT maybe_since_ms, maybe_since_at FROM offline_sync_queue
 WHERE id = :id AND outcome_unknown = 1;

-- name: count_unsettled
-- How many are not settled, and how many of them are refused. Not as IS_OPEN: this uses the index by
-- status, so that settled entries are not read.
SELECT (SELECT count(*) FROM offline_sync_queue
         WHERE user_id = :user_id AND status IN ('pending', 'in_flight', 'failed', 'conflict')),
       (SELECT count(*) FROM offline_sync_queue
         WHERE user_id = :user_id AND status = 'failed' AND IS_REFUSED),
       (SELECT signed_out_ms FROM users WHERE id = :user_id);

-- name: count_refused
SELECT count(*) FROM offline_sync_queue
 WHERE (:user_id IS NULL OR user_id = :user_id) AND status = 'failed' AND IS_REFUSED;

-- name: count_in_flight
SELECT count(*) FROM offline_sync_queue WHERE user_id = :user_id AND status = 'in_flight';

-- name: lease_ends
SELECT min(lease_ms), max(lease_ms) FROM offline_sync_queue
 WHERE lease_ms IS NOT NULL AND status = 'in_flight' AND user_id = :user_id;

-- name: purge_waits
DELETE FROM entry_waits
 WHERE entry_id IN (SELECT id FROM offline_sync_queue WHERE user_id = :user_id);

-- name: purge_attempts
DELETE FROM attempts
 WHERE entry_id IN (SELECT id FROM offline_sync_queue WHERE user_id = :user_id);

-- name: purge_entries
DELETE FROM offline_sync_queue WHERE user_id = :user_id RETURNING 1;

-- name: purge_mappings
DELETE FROM id_mappings WHERE user_id = :user_id;

-- name: purge_user
DELETE FROM users WHERE id = :user_id;

-- name: outdated_payloads
SELECT ENTRY FROM offline_sync_queue
 WHERE rowid > :after AND payload_version < :version AND status IN ('pending', 'failed', 'conflict')
   AND outcome_unknown = 0
 ORDER BY rowid LIMIT :limit;

-- name: rowid_of
SELECT rowid FROM offline_sync_queue WHERE id = :id;

-- name: migrated_payload
UPDATE offline_sync_queue
   SET payload = :payload, headers = :headers, endpoint = :endpoint, idempotency_key = :key,
       local_refs = :local_refs, payload_version = :version
 WHERE id = :id;

-- name: server_rows
SELECT name, value FROM outbox_meta WHERE name IN (:holds, :offer);

-- name: save_holds
INSERT OR REPLACE INTO outbox_meta (name, value) VALUES (:row, :value);

-- name: forget_holds
DELETE FROM outbox_meta WHERE name = :row;

-- name: save_batch_offer
INSERT OR REPLACE INTO outbox_meta (name, value) VALUES (:row, :value);

-- name: forget_batch_offer
DELETE FROM outbox_meta WHERE name = :row;
