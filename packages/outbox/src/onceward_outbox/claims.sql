-- Claims and outcomes. IS_HELD is whether the endpoint matches one of the HELD_PATTERNS.

-- name: promote_due
-- Make entries claimable whose delay is over. At most 500 at once, so that claims stay fast after a
-- long outage; the next claim continues.
UPDATE offline_sync_queue SET due_ms = NULL
 WHERE rowid IN (SELECT rowid FROM offline_sync_queue
                  WHERE user_id = :user_id AND due_ms <= :ms ORDER BY due_ms LIMIT 500);

-- name: claim_some
-- Claim the heads of lanes, without the profiles in :skip and the endpoints in :held, JSON arrays.
-- They come back in no particular order.
UPDATE offline_sync_queue
   SET status = 'in_flight', attempt_count = attempt_count + 1, claim_number = claim_number + 1,
       claimed_by = :claimed_by, claimed_at = :now, lease_ms = :lease_ms, next_retry_at = NULL,
       maybe_since_ms = coalesce(maybe_since_ms, :ms),
       maybe_since_at = coalesce(maybe_since_at, :now)
 WHERE rowid IN (WITH HELD_PATTERNS
                 SELECT rowid FROM offline_sync_queue
                  WHERE user_id = :user_id
                    AND status = 'pending' AND turn = 1 AND waiting_for = 0 AND due_ms IS NULL
                    AND profile NOT IN (SELECT value FROM json_each(:skip))
                    AND NOT IS_HELD AND ENTITY_IS_FREE
                  ORDER BY priority DESC, sequence_number LIMIT :limit)
RETURNING ENTRY, VERSION_TO_SEND;

-- name: behind
-- The next entries of a lane: whether each could be sent if all before it had succeeded, but for the
-- entries and mappings that it waits for, a JSON array.
WITH HELD_PATTERNS
SELECT id, operation, local_id, lane, entity,
       status = 'pending' AND due_ms IS NULL
           AND profile NOT IN (SELECT value FROM json_each(:skip)) AND NOT IS_HELD,
       CASE waiting_for WHEN 0 THEN '[]' ELSE WAITS_FOR END
  FROM offline_sync_queue
 WHERE user_id = :user_id AND lane = :lane AND IS_OPEN AND sequence_number > :sequence_number
 ORDER BY sequence_number LIMIT :limit;

-- name: awaiting
-- The heads of other lanes that wait for one of these entries and mappings.
WITH HELD_PATTERNS
SELECT id, operation, local_id, lane, entity, 1, WAITS_FOR
  FROM offline_sync_queue
 WHERE id IN (SELECT entry_id FROM entry_waits
               WHERE awaited IN (SELECT value FROM json_each(:names)) AND met = 0)
   AND user_id = :user_id AND status = 'pending' AND turn = 1 AND due_ms IS NULL
   AND profile NOT IN (SELECT value FROM json_each(:skip)) AND NOT IS_HELD AND ENTITY_IS_FREE
 ORDER BY sequence_number LIMIT :limit;

-- name: claim_behind
UPDATE offline_sync_queue
   SET status = 'in_flight', attempt_count = attempt_count + 1, claim_number = claim_number + 1,
       claimed_by = :claimed_by, claimed_at = :now, lease_ms = :lease_ms, next_retry_at = NULL,
       maybe_since_ms = coalesce(maybe_since_ms, :ms),
       maybe_since_at = coalesce(maybe_since_at, :now)
 WHERE id IN (SELECT value FROM json_each(:ids)) AND status = 'pending'
RETURNING ENTRY, VERSION_TO_SEND;

-- name: pending_in_order
SELECT ENTRY FROM offline_sync_queue
 WHERE user_id = :user_id AND status = 'pending' ORDER BY rowid;

-- name: next_eligible
SELECT ENTRY FROM offline_sync_queue
 WHERE rowid IN (
       SELECT rowid FROM (
           SELECT rowid FROM offline_sync_queue
            WHERE user_id = :user_id
              AND status = 'pending' AND turn = 1 AND waiting_for = 0 AND due_ms IS NULL
              AND ENTITY_IS_FREE
            ORDER BY priority DESC, sequence_number LIMIT 1)
       UNION ALL
       SELECT rowid FROM (
           SELECT rowid FROM offline_sync_queue
            WHERE user_id = :user_id AND due_ms <= :ms
            ORDER BY priority DESC, sequence_number LIMIT 1))
 ORDER BY priority DESC, sequence_number LIMIT 1;

-- name: eligible_users
SELECT id FROM users AS someone
 WHERE EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE user_id = someone.id
                  AND status = 'pending' AND turn = 1 AND waiting_for = 0 AND due_ms IS NULL
                  AND ENTITY_IS_FREE)
    OR EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE user_id = someone.id AND due_ms <= :ms)
 ORDER BY id;

-- name: next_due
SELECT min(due_ms) FROM offline_sync_queue WHERE user_id = :user_id AND due_ms IS NOT NULL;

-- name: renew
UPDATE offline_sync_queue SET lease_ms = :lease_ms
 WHERE id = :id AND status = 'in_flight' AND claim_number = :number
RETURNING id;

-- name: settle
-- End a claim in a final status.
UPDATE offline_sync_queue
   SET status = :status, server_id = coalesce(:server_id, server_id), synced_at = :synced_at,
       last_error = :error, last_error_code = :error_code, last_code = :code, reason = :reason,
       outcome_unknown = 0,
       settled_ms = :ms, lease_ms = NULL, next_retry_at = NULL
 WHERE id = :id AND status = 'in_flight' AND claim_number = :number
RETURNING 1;

-- name: end_claim
-- End a claim in `pending`, `failed` or `conflict`. `uncount` is subtracted from the attempts.
UPDATE offline_sync_queue
   SET status = :status, attempt_count = attempt_count - :uncount, due_ms = :due_ms,
       next_retry_at = :next_retry_at, last_error = coalesce(:error, last_error),
       last_error_code = coalesce(:error_code, last_error_code),
       last_code = CASE WHEN :error_code IS NULL THEN last_code ELSE :code END, reason = :reason,
       outcome_unknown = coalesce(:outcome_unknown, outcome_unknown),
       maybe_since_ms = CASE WHEN coalesce(:outcome_unknown, outcome_unknown) THEN maybe_since_ms END,
       maybe_since_at = CASE WHEN coalesce(:outcome_unknown, outcome_unknown) THEN maybe_since_at END,
       theirs = coalesce(:theirs, theirs), theirs_version = coalesce(:theirs_version, theirs_version),
       conflict_fields = :conflict_fields, base = coalesce(:base, base),
       sent_version = coalesce(:sent_version, sent_version),
       lease_ms = NULL
 WHERE id = :id AND status = 'in_flight' AND claim_number = :number
RETURNING ENTRY;

-- name: add_attempt
INSERT INTO attempts
       (entry_id, number, started_at, ended_at, outcome, status, code, request_id, error)
SELECT id, claim_number, claimed_at, :now, :outcome, :http_status, :code, :request_id, :error
  FROM offline_sync_queue WHERE id = :id;

-- name: map_local_id
INSERT INTO id_mappings (user_id, local_id, server_id, entity_type, entry_id, created_at)
VALUES (:user_id, :local_id, :server_id, :entity_type, :entry_id, :now)
    ON CONFLICT (user_id, local_id) DO NOTHING;

-- name: mappings
SELECT local_id, server_id FROM id_mappings
 WHERE user_id = :user_id AND local_id IN (SELECT value FROM json_each(:local_ids));

-- name: pass_turn
-- Give the turn to the first unsettled entry of the lane. One that may have happened goes before an
-- entry that came back and is not sent: their versions follow in the order of the server. The plus
-- signs keep SQLite from reading the lane, which may be long, for the few that were sent.
UPDATE offline_sync_queue SET turn = 1
 WHERE rowid = (SELECT coalesce(
           CASE WHEN first.turn = 0 AND first.status <> 'in_flight' AND first.outcome_unknown = 0
                THEN (SELECT rowid FROM offline_sync_queue
                       WHERE MAYBE_SENT AND +user_id = :user_id AND +lane = :lane
                         AND +status IN ('pending', 'in_flight')
                       ORDER BY +sequence_number LIMIT 1) END,
           first.place)
      FROM (SELECT rowid AS place, turn, status, outcome_unknown FROM offline_sync_queue
             WHERE user_id = :user_id AND lane = :lane AND IS_OPEN
             ORDER BY sequence_number LIMIT 1) AS first);

-- name: meet_waits
-- An entry that waits for both is returned twice.
UPDATE entry_waits SET met = 1
 WHERE awaited IN (:entry, :local) AND met = 0
RETURNING entry_id;

-- name: count_down
UPDATE offline_sync_queue SET waiting_for = waiting_for - 1 WHERE id = ?;

-- name: lapsed
-- Claims whose lease has expired.
SELECT id, claim_number FROM offline_sync_queue
 WHERE lease_ms <= :ms AND status = 'in_flight';

-- name: end_leases
-- After a restart of the device no process holds a claim.
UPDATE offline_sync_queue SET lease_ms = 0 WHERE lease_ms > 0;

-- name: claim_holders
SELECT DISTINCT claimed_by FROM offline_sync_queue
 WHERE lease_ms > 0 AND status = 'in_flight' AND claimed_by <> :own;

-- name: end_leases_of
-- The holders are processes that have ended.
UPDATE offline_sync_queue SET lease_ms = 0
 WHERE lease_ms > 0 AND status = 'in_flight'
   AND claimed_by IN (SELECT value FROM json_each(:holders));

-- name: wake_due
-- After a restart: due by the device's clock. At worst too early, never lost.
UPDATE offline_sync_queue SET due_ms = NULL
 WHERE due_ms IS NOT NULL AND next_retry_at <= :now;
