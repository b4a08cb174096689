-- Queues whose jobs are not claimed, on both databases. Times are seconds since 1970.

-- name: pause
-- Returns no row for a queue that is paused already.
INSERT INTO onceward_paused_queues (queue, actor, reason, paused_at)
VALUES (:queue, :actor, :reason, :paused_at)
    ON CONFLICT (queue) DO NOTHING
RETURNING queue;

-- name: resume
-- Returns no row for a queue that is not paused.
DELETE FROM onceward_paused_queues WHERE queue = :queue RETURNING queue;

-- name: paused
SELECT queue, actor, reason, paused_at FROM onceward_paused_queues ORDER BY queue;
