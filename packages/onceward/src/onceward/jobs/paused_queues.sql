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

-- name: add_nothing
-- A row that is removed before the commit: no queue has this name.
INSERT INTO onceward_paused_queues (queue, actor, reason, paused_at) VALUES ('', '', '', 0);

-- name: remove_nothing
DELETE FROM onceward_paused_queues WHERE queue = '';

-- name: paused
SELECT queue, actor, reason, paused_at FROM onceward_paused_queues ORDER BY queue;
