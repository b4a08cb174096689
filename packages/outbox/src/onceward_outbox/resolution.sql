-- Decisions about entries, and what follows for their dependents. CREATED_BY(e) is the name in
-- entry_waits of the mapping that the success of e creates; IS_DEAD(x) says whether what is awaited as
-- x is failed, discarded or expired.

-- name: to_pending
-- From `failed` or `expired` back to `pending`, with all attempts. A refusal may be stored under the
-- key: then it has a new one. With the reason `unknown` a person
-- has been asked to check whether it happened, so the time of the first send is cleared.
UPDATE offline_sync_queue
   SET status = 'pending', attempt_count = 0, due_ms = NULL, next_retry_at = NULL, reason = NULL,
       idempotency_key = CASE WHEN WAS_REFUSED THEN :key ELSE idempotency_key END,
       sent_version = CASE WHEN outcome_unknown THEN sent_version END,
       maybe_since_ms = CASE WHEN reason IS NOT 'unknown' THEN maybe_since_ms END,
       maybe_since_at = CASE WHEN reason IS NOT 'unknown' THEN maybe_since_at END,
       stuck_ms = NULL, notice_ms = NULL, settled_ms = NULL, aged_from_ms = :ms
 WHERE id = :id
RETURNING ENTRY;

-- name: begin_age
-- The age of what waited for an entry begins anew: of pending ones behind it in its lane, and of those
-- that depend on any of them. Not twice within a minute.
WITH RECURSIVE waiting (id, local) AS (
    SELECT first.id, CREATED_BY(first) FROM offline_sync_queue AS first WHERE first.id = :id
    UNION
    SELECT behind.id, CREATED_BY(behind) FROM offline_sync_queue AS behind
     WHERE behind.user_id = :user_id AND behind.lane = :lane AND behind.sequence_number > :sequence_number
       AND behind.status = 'pending' AND behind.status <> 'succeeded' AND behind.status <> 'discarded'
       AND behind.status <> 'expired'
    UNION
    SELECT next.id, CREATED_BY(next)
      FROM waiting
      JOIN entry_waits AS wait ON wait.awaited IN (waiting.id, waiting.local) AND wait.met = 0
      JOIN offline_sync_queue AS next ON next.id = wait.entry_id AND next.status = 'pending'
)
UPDATE offline_sync_queue SET aged_from_ms = :ms
 WHERE id IN (SELECT id FROM waiting) AND id <> :id AND AGED_FROM < :ms - 60000;

-- name: same_once
-- The entry that has the ``once`` of another now.
SELECT id FROM offline_sync_queue
 WHERE user_id = :user_id AND once = :once AND COUNTS_FOR_ONCE AND id <> :id;

-- name: expired_by_server
SELECT 1 FROM attempts WHERE entry_id = :id AND outcome = 'expire';

-- name: rewrite
-- A changed request has a new key and was never sent.
UPDATE offline_sync_queue
   SET status = 'pending', attempt_count = 0, due_ms = NULL, next_retry_at = NULL, reason = NULL,
       payload = :payload, headers = :headers, endpoint = :endpoint, idempotency_key = :key,
       dependency_ids = :dependency_ids, local_refs = :local_refs, waiting_for = :waiting_for,
       payload_version = :payload_version, base = :base, base_version = :base_version, entity = :entity,
       theirs = NULL, theirs_version = NULL, conflict_fields = NULL, sent_version = NULL, forced = :forced, outcome_unknown = 0,
       maybe_since_ms = NULL, maybe_since_at = NULL, stuck_ms = NULL, notice_ms = NULL, aged_from_ms = :ms
 WHERE id = :id
RETURNING ENTRY;

-- name: forget_waits
DELETE FROM entry_waits WHERE entry_id = :entry_id;

-- name: settle_unclaimed
-- End an entry that is not claimed: `discarded` or `expired`.
UPDATE offline_sync_queue
   SET status = :status, reason = :reason, last_error = coalesce(:error, last_error),
       due_ms = NULL, next_retry_at = NULL, settled_ms = :ms
 WHERE id = :id
RETURNING ENTRY;

-- name: park
UPDATE offline_sync_queue
   SET status = 'failed', reason = :reason, last_error = coalesce(:error, last_error),
       due_ms = NULL, next_retry_at = NULL
 WHERE id = :id
RETURNING ENTRY;

-- name: give_up
UPDATE offline_sync_queue SET status = 'failed', reason = :reason WHERE id = :id
RETURNING ENTRY;

-- name: park_dependents
-- All that depend on an entry, directly or indirectly. A recursive query has a queue, not a stack:
-- depth does not matter, and UNION visits each entry once.
WITH RECURSIVE doomed (id, local) AS (
    SELECT :id, :local
    UNION
    SELECT waiting.id, CREATED_BY(waiting)
      FROM doomed
      JOIN entry_waits AS wait ON wait.awaited IN (doomed.id, doomed.local) AND wait.met = 0
      JOIN offline_sync_queue AS waiting
        ON waiting.id = wait.entry_id AND waiting.status = 'pending'
)
UPDATE offline_sync_queue
   SET status = 'failed', reason = 'dependency', due_ms = NULL, next_retry_at = NULL
 WHERE id IN (SELECT id FROM doomed) AND id <> :id AND status = 'pending'
RETURNING ENTRY;

-- name: revive_dependents
-- Entries parked directly behind an entry that is pending again, unless another parent is dead.
UPDATE offline_sync_queue AS parked
   SET status = 'pending', attempt_count = 0, reason = NULL, stuck_ms = NULL, notice_ms = NULL,
       aged_from_ms = :ms
 WHERE id IN (SELECT entry_id FROM entry_waits WHERE awaited IN (:id, :local) AND met = 0)
   AND status = 'failed' AND reason = 'dependency'
   AND NOT EXISTS (
       SELECT 1 FROM entry_waits AS wait
        WHERE wait.entry_id = parked.id AND wait.met = 0 AND IS_DEAD(wait.awaited))
RETURNING ENTRY;

-- name: dead_waits
-- Dead parents of an entry.
SELECT awaited FROM entry_waits AS wait
 WHERE wait.entry_id = :id AND wait.met = 0 AND IS_DEAD(wait.awaited);

-- name: dependents
SELECT ENTRY FROM offline_sync_queue
 WHERE id IN (SELECT entry_id FROM entry_waits WHERE awaited IN (:id, :local))
 ORDER BY sequence_number;

-- name: all_dependents
WITH RECURSIVE waiting (id, local) AS (
    SELECT :id, :local
    UNION
    SELECT next.id, CREATED_BY(next)
      FROM waiting
      JOIN entry_waits AS wait ON wait.awaited IN (waiting.id, waiting.local)
      JOIN offline_sync_queue AS next ON next.id = wait.entry_id
)
SELECT ENTRY FROM offline_sync_queue
 WHERE id IN (SELECT id FROM waiting) AND id <> :id
 ORDER BY sequence_number;

-- name: leave_lane
UPDATE offline_sync_queue SET left_lane = lane, lane = NULL WHERE id = :id AND lane IS NOT NULL
RETURNING left_lane;

-- name: step_aside
-- A pending entry leaves its lane; it can be claimed as soon as it is due.
UPDATE offline_sync_queue SET left_lane = lane, lane = NULL, turn = 1 WHERE id = :id
RETURNING ENTRY;

-- name: yield_turn
-- The first entry of a lane returns the turn to an earlier one that comes back, if it is pending or in
-- conflict.
-- Not if it was sent and may have happened: it keeps its place before the one that comes back.
UPDATE offline_sync_queue SET turn = 0
 WHERE rowid = (SELECT rowid FROM offline_sync_queue
                 WHERE user_id = :user_id AND lane = :lane AND IS_OPEN
                 ORDER BY sequence_number LIMIT 1)
   AND status IN ('pending', 'conflict') AND outcome_unknown = 0 AND turn = 1
   AND sequence_number > :sequence_number
RETURNING 1;

-- name: yield_turn_to_earlier
-- An entry in conflict returns the turn to one that came back while it was sent.
UPDATE offline_sync_queue AS conflicting SET turn = 0
 WHERE id = :id AND turn = 1
   AND EXISTS (SELECT 1 FROM offline_sync_queue AS earlier
                WHERE earlier.user_id = conflicting.user_id AND earlier.lane = conflicting.lane
                  AND earlier.status = 'pending'
                  AND earlier.sequence_number < conflicting.sequence_number)
RETURNING 1;

-- name: rejoin_lane
-- At its old position: it is next, unless another entry of the lane has the turn. That need not be the
-- first one: others may have come back before it.
UPDATE offline_sync_queue AS back
   SET lane = left_lane, left_lane = NULL,
       turn = CASE WHEN :has_turn THEN 1
                   ELSE NOT EXISTS (SELECT 1 FROM offline_sync_queue
                                     WHERE user_id = back.user_id AND lane = back.left_lane
                                       AND IS_OPEN AND turn = 1) END
 WHERE id = :id
RETURNING ENTRY;

-- name: keep_version
-- Send an edit with the version it was made on, not with that of the device's later edits. :before is
-- the last version before those in the list of own ones.
UPDATE offline_sync_queue AS back
   SET sent_version = coalesce(
           sent_version, nullif(base_version, ''),
           -- Made on a version that was not known then.
           (SELECT CASE json_type(own, :before) WHEN 'text' THEN json_extract(own, :before) END
              FROM entity_versions AS known
             WHERE known.user_id = back.user_id AND known.entity = back.entity))
 WHERE id = :id AND operation <> 'create'
RETURNING ENTRY;

-- name: overtaken
-- Whether a later edit of the entity has succeeded in the lane of an entry, which had left it.
SELECT 1 FROM offline_sync_queue
 WHERE user_id = :user_id AND lane = :lane AND entity = :entity AND status = 'succeeded'
   AND sequence_number > :sequence_number
 LIMIT 1;

-- name: being_overtaken
-- Whether a later edit of the entity is being sent in that lane, or was sent and may have succeeded.
SELECT 1 FROM offline_sync_queue
 WHERE user_id = :user_id AND lane = :lane AND entity = :entity AND IS_OPEN
   AND sequence_number > :sequence_number
   AND (status = 'in_flight' OR outcome_unknown = 1)
 LIMIT 1;

-- name: chain_behind
SELECT id FROM offline_sync_queue
 WHERE user_id = :user_id AND chain = :chain AND sequence_number > :sequence_number
   AND status = 'pending'
 ORDER BY sequence_number;

-- name: bind
INSERT INTO entry_waits (awaited, entry_id) VALUES (:awaited, :entry_id)
    ON CONFLICT (awaited, entry_id) DO NOTHING
RETURNING 1;

-- name: count_up
UPDATE offline_sync_queue SET waiting_for = waiting_for + 1 WHERE id = :id;
