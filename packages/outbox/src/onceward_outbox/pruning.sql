-- Pruning: removal of what is old and not needed any more. Nothing is removed that an unsettled entry
-- refers to.

-- name: prunable
-- Settled long enough ago, and no unsettled entry depends on it.
SELECT rowid, ENTRY FROM offline_sync_queue
 WHERE status = :status AND rowid > :after AND settled_ms <= :settled_before
   AND NOT EXISTS (
       SELECT 1 FROM entry_waits AS wait
         JOIN offline_sync_queue AS waiting ON waiting.id = wait.entry_id
        WHERE wait.awaited IN (offline_sync_queue.id, CREATED_BY(offline_sync_queue))
          AND wait.met = 0 AND waiting.status IN ('pending', 'in_flight', 'failed', 'conflict'))
 ORDER BY rowid LIMIT :limit;

-- name: oldest_settled
-- When the oldest entries of a user were settled: reads a few pages of an index. The entries queued
-- first are usually settled first; where they are not, `prunable`, which reads every row, finds them.
SELECT min(settled_ms) FROM (
    SELECT settled_ms FROM offline_sync_queue
     WHERE user_id = :user_id AND status = :status ORDER BY rowid LIMIT 100);

-- name: raise_floor
UPDATE users SET sequence_floor = max(sequence_floor, :sequence_number) WHERE id = :user_id;

-- name: forget_awaited
DELETE FROM entry_waits WHERE awaited = :id;

-- name: remove
DELETE FROM offline_sync_queue WHERE id = :id;

-- name: note_stuck
-- The time from which a failed entry or a conflict is kept begins when it is first seen here.
UPDATE offline_sync_queue SET stuck_ms = :ms
 WHERE rowid IN (SELECT rowid FROM offline_sync_queue
                  WHERE user_id = :user_id AND status IN ('failed', 'conflict') AND stuck_ms IS NULL
                  LIMIT :limit)
RETURNING 1;

-- name: announce_stuck
UPDATE offline_sync_queue SET notice_ms = :ms
 WHERE rowid IN (SELECT rowid FROM offline_sync_queue
                  WHERE user_id = :user_id AND status IN ('failed', 'conflict')
                    AND stuck_ms <= :stuck_before AND notice_ms IS NULL
                  LIMIT :limit)
RETURNING ENTRY;

-- name: prunable_stuck
-- Announced long enough ago; no unsettled entry depends on it or waits behind it in its lane.
SELECT ENTRY FROM offline_sync_queue
 WHERE user_id = :user_id AND status IN ('failed', 'conflict')
   AND stuck_ms <= :stuck_before AND notice_ms <= :noticed_before
   AND NOT EXISTS (
       SELECT 1 FROM entry_waits AS wait
         JOIN offline_sync_queue AS waiting ON waiting.id = wait.entry_id
        WHERE wait.awaited IN (offline_sync_queue.id, CREATED_BY(offline_sync_queue))
          AND wait.met = 0 AND waiting.status IN ('pending', 'in_flight', 'failed', 'conflict'))
   AND NOT EXISTS (
       SELECT 1 FROM offline_sync_queue AS behind
        WHERE behind.user_id = offline_sync_queue.user_id AND behind.lane = offline_sync_queue.lane
          AND behind.sequence_number > offline_sync_queue.sequence_number
          AND behind.status IN ('pending', 'in_flight', 'failed', 'conflict'))
 ORDER BY sequence_number DESC LIMIT :limit;

-- name: has_stuck
-- Whether one of the three above would find an entry; what still refers to it is not checked.
SELECT 1 FROM offline_sync_queue
 WHERE user_id = :user_id AND status IN ('failed', 'conflict')
   AND (stuck_ms IS NULL OR (stuck_ms <= :stuck_notice AND notice_ms IS NULL)
        OR (stuck_ms <= :stuck_before AND notice_ms <= :noticed_before))
 LIMIT 1;

-- name: note_mappings
UPDATE id_mappings SET used_ms = :ms
 WHERE user_id = :user_id
   AND local_id IN (SELECT local_id FROM id_mappings
                     WHERE user_id = :user_id AND used_ms IS NULL LIMIT :limit)
RETURNING 1;

-- name: use_mappings
-- Entries that refer to them were just removed, or are still there.
UPDATE id_mappings SET used_ms = :ms, notice_ms = NULL
 WHERE user_id = :user_id AND local_id IN (SELECT value FROM json_each(:local_ids));

-- name: old_mappings
-- To be announced, or announced long enough ago.
SELECT local_id, notice_ms IS NOT NULL FROM id_mappings
 WHERE user_id = :user_id
   AND ((used_ms <= :used_notice AND notice_ms IS NULL)
        OR (used_ms <= :used_before AND notice_ms <= :noticed_before))
 LIMIT :limit;

-- name: referring
-- What may name a local id: of every entry of the user, settled ones too.
SELECT local_id, local_refs, lane, left_lane FROM offline_sync_queue WHERE user_id = :user_id;

-- name: announce_mappings
UPDATE id_mappings SET notice_ms = :ms
 WHERE user_id = :user_id AND local_id IN (SELECT value FROM json_each(:local_ids));

-- name: remove_mappings
DELETE FROM id_mappings
 WHERE user_id = :user_id AND local_id IN (SELECT value FROM json_each(:local_ids));

-- name: has_mappings
SELECT 1 FROM id_mappings
 WHERE user_id = :user_id
   AND (used_ms IS NULL OR (used_ms <= :used_notice AND notice_ms IS NULL)
        OR (used_ms <= :used_before AND notice_ms <= :noticed_before))
 LIMIT 1;

-- name: prune_versions
-- Not seen for long, and no unsettled entry is about the entity: the next edit is then sent as one
-- whose base is unknown.
DELETE FROM entity_versions
 WHERE user_id = :user_id
   AND entity IN (SELECT entity FROM entity_versions
                   WHERE user_id = :user_id AND seen_ms <= :seen_before
                     AND entity NOT IN (
                         SELECT entity FROM offline_sync_queue
                          WHERE user_id = :user_id AND entity IS NOT NULL
                            AND status IN ('pending', 'in_flight', 'failed', 'conflict'))
                   LIMIT :limit)
RETURNING 1;

-- name: has_versions
SELECT 1 FROM entity_versions WHERE user_id = :user_id AND seen_ms <= :seen_before LIMIT 1;
