-- Jobs as the console lists them, on SQLite. Each query reads a limited number of index entries.
-- "place" is where the next page goes on.

-- name: live_jobs
-- Waiting and running jobs, those that are visible next first. The recursion reads one index entry per
-- queue.
WITH RECURSIVE queues AS (
    SELECT min(queue) AS queue FROM holdfast_jobs
    UNION ALL
    SELECT (SELECT next.queue FROM holdfast_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.tenant, found.id AS job_id, found.queue, found.type, found.resource_id, found.state,
       found.attempts, found.max_attempts, found.worker, found.request_id,
       found.enqueued_at / 1000.0 AS enqueued_at,
       CASE WHEN found.visible_at < 9000000000000000 THEN found.visible_at / 1000.0 END AS due_at,
       NULL AS ended_at, NULL AS error, NULL AS reason,
       found.visible_at || ' ' || found.id AS place
  FROM queues
  JOIN holdfast_jobs AS found ON found.seq IN (
       SELECT job.seq FROM holdfast_jobs AS job
        WHERE job.queue = queues.queue AND :queue IN ('', job.queue)
          AND (job.visible_at, job.id) > (CAST(:after_at AS INTEGER), :after_id)
        ORDER BY job.visible_at, job.id LIMIT :scanned)
 ORDER BY found.visible_at, found.id LIMIT :scanned;

-- name: live_jobs_of_tenant
SELECT tenant, id AS job_id, queue, type, resource_id, state,
       attempts, max_attempts, worker, request_id,
       enqueued_at / 1000.0 AS enqueued_at,
       CASE WHEN visible_at < 9000000000000000 THEN visible_at / 1000.0 END AS due_at,
       NULL AS ended_at, NULL AS error, NULL AS reason,
       '-1 ' || id AS place
  FROM holdfast_jobs
 WHERE tenant = :tenant AND id > :after_id AND :queue IN ('', queue)
   AND CAST(:after_at AS INTEGER) IS NOT NULL
 ORDER BY id LIMIT :scanned;

-- name: done_jobs
-- The caller compares the queue: a condition here would read the whole table for a rare one.
SELECT tenant, job_id AS job_id, queue, type, resource_id, 'done' AS state,
       attempts, NULL AS max_attempts, worker, request_id,
       enqueued_at / 1000.0 AS enqueued_at, NULL AS due_at,
       completed_at / 1000.0 AS ended_at, NULL AS error, NULL AS reason,
       completed_at || ' ' || job_id AS place
  FROM holdfast_job_completions
 WHERE (completed_at, job_id) < (CAST(:after_at AS INTEGER), :after_id) AND {tenant}
   AND :queue IS NOT NULL
 ORDER BY completed_at DESC, job_id DESC LIMIT :scanned;

-- name: dead_jobs
SELECT tenant, job_id AS job_id, queue, type, resource_id, 'dead' AS state,
       attempts, max_attempts, NULL AS worker, request_id,
       enqueued_at / 1000.0 AS enqueued_at, NULL AS due_at,
       died_at / 1000.0 AS ended_at, error, reason,
       died_at || ' ' || job_id AS place
  FROM holdfast_dead_letters
 WHERE requeued_at IS NULL AND (died_at, job_id) < (CAST(:after_at AS INTEGER), :after_id) AND {tenant}
   AND :queue IN ('', queue)
 ORDER BY died_at DESC, job_id DESC LIMIT :scanned;

-- name: dead_by_error
-- The newest dead letters by cause.
SELECT queue, type, reason, error, count(*) AS jobs, max(died_at) / 1000.0 AS last_at
  FROM (SELECT queue, type, reason, error, died_at FROM holdfast_dead_letters
         WHERE requeued_at IS NULL AND {tenant}
         ORDER BY died_at DESC LIMIT :scanned) AS dead
 GROUP BY queue, type, reason, error ORDER BY jobs DESC, last_at DESC LIMIT 100;

-- name: matching_dead
-- Dead letters that match a filter, newest first. An empty text matches all.
SELECT tenant, job_id
  FROM (SELECT tenant, job_id, queue, type, error FROM holdfast_dead_letters
         WHERE requeued_at IS NULL AND {tenant}
         ORDER BY died_at DESC LIMIT :scanned) AS dead
 WHERE :queue IN ('', queue) AND :type IN ('', type) AND :error IN ('', error)
 LIMIT :most;

-- name: matching_waiting
-- Waiting jobs that match a filter, those that are due first. An empty text matches all.
WITH RECURSIVE queues AS (
    SELECT min(queue) AS queue FROM holdfast_jobs
    UNION ALL
    SELECT (SELECT next.queue FROM holdfast_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.tenant, found.id AS job_id
  FROM queues
  JOIN holdfast_jobs AS found ON found.seq IN (
       SELECT job.seq FROM holdfast_jobs AS job
        WHERE job.queue = queues.queue AND :queue IN ('', job.queue)
        ORDER BY job.visible_at LIMIT :scanned)
 WHERE found.state = 'waiting' AND :type IN ('', found.type)
 LIMIT :most;

-- name: matching_waiting_of_tenant
SELECT tenant, job_id
  FROM (SELECT tenant, id AS job_id, queue, type, state FROM holdfast_jobs
         WHERE tenant = :tenant
         ORDER BY id LIMIT :scanned) AS found
 WHERE state = 'waiting' AND :queue IN ('', queue) AND :type IN ('', type)
 LIMIT :most;

-- name: leased_jobs
-- Running jobs by worker, of those jobs of each queue that are visible next: leases end soon.
WITH RECURSIVE queues AS (
    SELECT min(queue) AS queue FROM holdfast_jobs
    UNION ALL
    SELECT (SELECT next.queue FROM holdfast_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.worker, found.queue, count(*) AS jobs,
       min(found.started_at) / 1000.0 AS first_started_at,
       min(found.visible_at) / 1000.0 AS first_lease_ends_at
  FROM queues
  JOIN holdfast_jobs AS found ON found.seq IN (
       SELECT job.seq FROM holdfast_jobs AS job
        WHERE job.queue = queues.queue
          AND job.visible_at > CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)
        ORDER BY job.visible_at LIMIT :scanned)
 WHERE found.state = 'running'
 GROUP BY found.worker, found.queue ORDER BY first_started_at LIMIT :most;
