-- Adding to the queue. ENTRY stands for the columns of an entry, in the order of rows.py; IS_OPEN for
-- the statuses that keep their place in a lane, spelled as in the partial index.

-- name: place
-- Where a new entry of a user would go: after which number, and behind whom in its lane. No row if the
-- user is not known. Asked in the transaction that then writes the entry. (To insert and ask in one
-- statement takes twice as long: SQLite would first copy what it reads of the table it writes to.)
SELECT max(sequence_floor, coalesce((
           SELECT max(sequence_number) FROM offline_sync_queue WHERE user_id = :user_id), 0)),
       EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE user_id = :user_id AND lane = :lane AND IS_OPEN)
  FROM users WHERE id = :user_id;

-- name: lane_taken
SELECT EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE user_id = :user_id AND lane = :lane AND IS_OPEN);

-- name: lanes_taken
SELECT wanted.value FROM json_each(:lanes) AS wanted
 WHERE EXISTS (SELECT 1 FROM offline_sync_queue
                WHERE user_id = :user_id AND lane = wanted.value AND IS_OPEN);

-- name: insert_entry
-- In the order of adding.py.
INSERT INTO offline_sync_queue
       (id, user_id, operation, entity_type, local_id, server_id, endpoint, payload, headers,
        idempotency_key, status, max_attempts, sequence_number, dependency_ids, created_at,
        conflict_resolution, priority, client_generated_at, profile, reason, local_refs,
        payload_version, base, base_version, lane, turn, waiting_for, enqueued_ms)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: insert_wait
INSERT INTO entry_waits (awaited, entry_id) VALUES (?, ?);

-- name: count_open
SELECT count(*) FROM offline_sync_queue WHERE user_id = :user_id AND IS_OPEN;

-- name: status_of
SELECT status FROM offline_sync_queue WHERE id = :id AND user_id = :user_id;

-- name: local_state
-- What is known of a local id: its server id, and the entry that creates it with its status.
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
-- What the entry's key was given for: an app that enqueues it once more finds its entry.
INSERT OR IGNORE INTO former_keys
SELECT idempotency_key, id, user_id, operation, endpoint, payload
  FROM offline_sync_queue WHERE id = :id;

-- name: merge_into
-- Not into one that is about to be too old to be sent: the new change is not.
UPDATE offline_sync_queue
   SET operation = :operation, payload = :payload, client_generated_at = :client_generated_at,
       local_refs = :local_refs, payload_version = :payload_version
 WHERE id = :id AND enqueued_ms >= :young_ms
RETURNING ENTRY;

-- name: add_user
INSERT INTO users (id, added_at) VALUES (:user_id, :added_at) ON CONFLICT (id) DO NOTHING;

-- name: users
SELECT id FROM users ORDER BY id;
