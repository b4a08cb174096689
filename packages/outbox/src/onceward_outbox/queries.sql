-- Queries that change nothing.

-- name: get
SELECT ENTRY FROM offline_sync_queue WHERE id = :id;

-- name: by_key
SELECT ENTRY FROM offline_sync_queue WHERE idempotency_key = :key;

-- name: former_key
SELECT entry_id, user_id, operation, endpoint, payload FROM former_keys
 WHERE idempotency_key = :key;

-- name: by_local_id
SELECT ENTRY FROM offline_sync_queue WHERE local_id = :local_id ORDER BY sequence_number;

-- name: attempts
SELECT entry_id, number, started_at, ended_at, outcome, status, code, request_id, error
  FROM attempts WHERE entry_id = :id ORDER BY number;

-- name: counts
SELECT user_id, status, count(*) FROM offline_sync_queue
 WHERE :user_id IS NULL OR user_id = :user_id GROUP BY user_id, status;

-- name: count_ready
SELECT count(*) FROM offline_sync_queue
 WHERE (:user_id IS NULL OR user_id = :user_id)
   AND status = 'pending' AND turn = 1 AND waiting_for = 0 AND due_ms IS NULL;

-- name: count_waiting
-- Entries that wait for a retry, and how many of those are due.
SELECT count(*), coalesce(sum(due_ms <= :ms), 0) FROM offline_sync_queue
 WHERE (:user_id IS NULL OR user_id = :user_id) AND due_ms IS NOT NULL;

-- name: oldest_unsent
SELECT min(enqueued_ms) FROM (
    SELECT enqueued_ms FROM offline_sync_queue
     WHERE user_id = :user_id AND status = 'pending' ORDER BY rowid LIMIT 1);

-- name: by_once
SELECT ENTRY FROM offline_sync_queue WHERE user_id = :user_id AND once = :once AND COUNTS_FOR_ONCE;

-- name: stuck_like
SELECT ENTRY FROM offline_sync_queue
 WHERE user_id = :user_id AND status IN (SELECT value FROM json_each(:statuses))
   AND (:reason IS NULL OR reason = :reason) AND (:code IS NULL OR last_code = :code)
   AND sequence_number > :after
 ORDER BY sequence_number LIMIT :limit;

-- name: stuck
SELECT ENTRY FROM offline_sync_queue
 WHERE user_id = :user_id AND status IN ('failed', 'conflict') ORDER BY sequence_number;
