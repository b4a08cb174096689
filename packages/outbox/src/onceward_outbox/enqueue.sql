-- Enqueueing. ENTRY is replaced by the columns of an entry, IS_OPEN by the
-- condition on unsettled statuses, written as in the partial index.

-- name: place
-- Position of a new entry: the user's last number, whether the lane has an unsettled entry, and the
-- version of the entity seen last. No row for an unknown user. A separate statement, because an INSERT that reads its own table takes twice as
-- long: SQLite first copies what it reads.
SELECT max(sequence_floor, coalesce((
           SELECT max(sequence_number) FROM offline_sync_queue WHERE user_id = :user_id), 0)),
       EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE user_id = :user_id AND lane = :lane AND IS_OPEN),
       (SELECT seen FROM entity_versions WHERE user_id = :user_id AND entity = :entity)
  FROM users WHERE id = :user_id;

-- name: insert_entry
-- In the order of enqueue.py.
INSERT INTO offline_sync_queue
       (id, user_id, operation, entity_type, local_id, server_id, endpoint, payload, headers,
        idempotency_key, status, max_attempts, sequence_number, dependency_ids, created_at,
        conflict_resolution, priority, client_generated_at, profile, reason, local_refs,
        payload_version, base, base_version, entity, chain, lane, turn, waiting_for,
        enqueued_ms, once, traceparent)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_wait
INSERT INTO entry_waits (awaited, entry_id) VALUES (?, ?);

-- name: count_open
SELECT count(*) FROM offline_sync_queue WHERE user_id = :user_id AND IS_OPEN;

-- name: status_of
SELECT status FROM offline_sync_queue WHERE id = :id AND user_id = :user_id;

-- name: local_state
-- State of a local id: its server id, and the entry that creates it with its status.
SELECT (SELECT server_id FROM id_mappings WHERE user_id = :user_id AND local_id = :local_id),
       (SELECT id FROM offline_sync_queue
         WHERE local_id = :local_id AND user_id = :user_id AND operation = 'create'
         ORDER BY sequence_number DESC LIMIT 1),
       (SELECT status FROM offline_sync_queue
         WHERE local_id = :local_id AND user_id = :user_id AND operation = 'create'
         ORDER BY sequence_number DESC LIMIT 1);

-- name: known_locals
-- Which of these UUIDs are local ids of the user.
SELECT candidate.value FROM json_each(:candidates) AS candidate
 WHERE EXISTS (SELECT 1 FROM id_mappings
                WHERE user_id = :user_id AND local_id = candidate.value)
    OR EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE local_id = candidate.value AND user_id = :user_id);

-- name: local_of_server_id
SELECT local_id FROM id_mappings WHERE user_id = :user_id AND server_id IN (:text, :number);

-- name: lane_tail
-- The last entry of a lane that is not settled.
SELECT ENTRY FROM offline_sync_queue
 WHERE user_id = :user_id AND lane = :lane AND IS_OPEN
 ORDER BY sequence_number DESC LIMIT 1;

-- name: lane_open
SELECT ENTRY FROM offline_sync_queue
 WHERE user_id = :user_id AND lane = :lane AND IS_OPEN
 ORDER BY sequence_number LIMIT :limit;

-- name: is_awaited
-- Whether an entry outside the lane waits for this one or for its local id.
SELECT 1 FROM entry_waits AS wait JOIN offline_sync_queue AS waiting ON waiting.id = wait.entry_id
 WHERE wait.awaited IN (:id, :local) AND wait.met = 0 AND waiting.lane IS NOT :lane
   AND waiting.status IN ('pending', 'in_flight', 'failed', 'conflict')
 LIMIT 1;

-- name: keep_first_request
-- Keep the request that the key was given for, so that an app that enqueues it again finds its entry.
INSERT OR IGNORE INTO former_keys
SELECT idempotency_key, id, user_id, operation, endpoint, payload
  FROM offline_sync_queue WHERE id = :id;

-- name: merge_into
-- Not into an old entry: the new change would inherit its age.
UPDATE offline_sync_queue
   SET operation = :operation, payload = :payload, client_generated_at = :client_generated_at,
       local_refs = :local_refs, payload_version = :payload_version
 WHERE id = :id AND enqueued_ms >= :young_ms
RETURNING ENTRY;

-- name: add_user
INSERT INTO users (id, added_at) VALUES (:user_id, :added_at) ON CONFLICT (id) DO NOTHING;

-- name: users
SELECT id FROM users ORDER BY id;
