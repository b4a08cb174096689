-- Jobs as the console lists them, on PostgreSQL. Each query reads a limited number of index entries.
-- "place" is where the next page goes on.

-- name: live_jobs
-- Waiting and running jobs, those that are visible next first. The recursion reads one index entry per
-- queue.
WITH RECURSIVE queues AS (
    (SELECT queue FROM holdfast_jobs ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM holdfast_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.tenant, found.id::text AS job_id, found.queue, found.type, found.resource_id, found.state,
       found.attempts, found.max_attempts, found.worker, found.request_id,
       extract(epoch FROM found.enqueued_at)::float8 AS enqueued_at,
       CASE WHEN isfinite(found.visible_at) THEN extract(epoch FROM found.visible_at)::float8 END AS due_at,
       NULL::float8 AS ended_at, NULL::text AS error, NULL::text AS reason,
       found.visible_at::text || ' ' || found.id::text AS place
  FROM queues
 CROSS JOIN LATERAL (
       SELECT * FROM holdfast_jobs AS job
        WHERE job.queue = queues.queue AND :queue::text IN ('', job.queue)
          AND (job.visible_at, job.id) > (:after_at::text::timestamptz, :after_id::uuid)
        ORDER BY job.visible_at, job.id LIMIT :scanned::integer) AS found
 ORDER BY found.visible_at, found.id LIMIT :scanned::integer;

-- name: live_jobs_of_tenant
SELECT tenant, id::text AS job_id, queue, type, resource_id, state,
       attempts, max_attempts, worker, request_id,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       CASE WHEN isfinite(visible_at) THEN extract(epoch FROM visible_at)::float8 END AS due_at,
       NULL::float8 AS ended_at, NULL::text AS error, NULL::text AS reason,
       '-infinity ' || id::text AS place
  FROM holdfast_jobs
 WHERE tenant = :tenant AND id > :after_id::uuid AND :queue::text IN ('', queue)
   AND :after_at::text::timestamptz IS NOT NULL
 ORDER BY id LIMIT :scanned::integer;

-- name: done_jobs
-- The caller compares the queue: a condition here would read the whole table for a rare one.
SELECT tenant, job_id::text AS job_id, queue, type, resource_id, 'done' AS state,
       attempts, NULL::integer AS max_attempts, worker, request_id,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at, NULL::float8 AS due_at,
       extract(epoch FROM completed_at)::float8 AS ended_at, NULL::text AS error, NULL::text AS reason,
       completed_at::text || ' ' || job_id::text AS place
  FROM holdfast_job_completions
 WHERE (completed_at, job_id) < (:after_at::text::timestamptz, :after_id::uuid) AND {tenant}
   AND :queue::text IS NOT NULL
 ORDER BY completed_at DESC, job_id DESC LIMIT :scanned::integer;

-- name: dead_jobs
SELECT tenant, job_id::text AS job_id, queue, type, resource_id, 'dead' AS state,
       attempts, max_attempts, NULL::text AS worker, request_id,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at, NULL::float8 AS due_at,
       extract(epoch FROM died_at)::float8 AS ended_at, error, reason,
       died_at::text || ' ' || job_id::text AS place
  FROM holdfast_dead_letters
 WHERE requeued_at IS NULL AND (died_at, job_id) < (:after_at::text::timestamptz, :after_id::uuid) AND {tenant}
   AND :queue::text IN ('', queue)
 ORDER BY died_at DESC, job_id DESC LIMIT :scanned::integer;

-- name: dead_by_error
-- The newest dead letters by cause.
SELECT queue, type, reason, error, count(*) AS jobs, max(extract(epoch FROM died_at))::float8 AS last_at
  FROM (SELECT queue, type, reason, error, died_at FROM holdfast_dead_letters
         WHERE requeued_at IS NULL AND {tenant}
         ORDER BY died_at DESC LIMIT :scanned::integer) AS dead
 GROUP BY queue, type, reason, error ORDER BY jobs DESC, last_at DESC LIMIT 100;

-- name: matching_dead
-- Dead letters that match a filter, newest first. An empty text matches all.
SELECT tenant, job_id::text AS job_id
  FROM (SELECT tenant, job_id, queue, type, error FROM holdfast_dead_letters
         WHERE requeued_at IS NULL AND {tenant}
         ORDER BY died_at DESC LIMIT :scanned::integer) AS dead
 WHERE :queue::text IN ('', queue) AND :type::text IN ('', type) AND :error::text IN ('', error)
 LIMIT :most::integer;

-- name: matching_waiting
-- Waiting jobs that match a filter, those that are due first. An empty text matches all.
WITH RECURSIVE queues AS (
    (SELECT queue FROM holdfast_jobs ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM holdfast_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.tenant, found.id::text AS job_id
  FROM queues
 CROSS JOIN LATERAL (
       SELECT * FROM holdfast_jobs AS job
        WHERE job.queue = queues.queue AND :queue::text IN ('', job.queue)
        ORDER BY job.visible_at LIMIT :scanned::integer) AS found
 WHERE found.state = 'waiting' AND :type::text IN ('', found.type)
 LIMIT :most::integer;

-- name: matching_waiting_of_tenant
SELECT tenant, job_id::text AS job_id
  FROM (SELECT tenant, id AS job_id, queue, type, state FROM holdfast_jobs
         WHERE tenant = :tenant
         ORDER BY id LIMIT :scanned::integer) AS found
 WHERE state = 'waiting' AND :queue::text IN ('', queue) AND :type::text IN ('', type)
 LIMIT :most::integer;

-- name: leased_jobs
-- Running jobs by worker, of those jobs of each queue that are visible next: leases end soon.
WITH RECURSIVE queues AS (
    (SELECT queue FROM holdfast_jobs ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM holdfast_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.worker, found.queue, count(*) AS jobs,
       extract(epoch FROM min(found.started_at))::float8 AS first_started_at,
       extract(epoch FROM min(found.visible_at))::float8 AS first_lease_ends_at
  FROM queues
 CROSS JOIN LATERAL (
       SELECT * FROM holdfast_jobs AS job
        WHERE job.queue = queues.queue AND job.visible_at > statement_timestamp()
        ORDER BY job.visible_at LIMIT :scanned::integer) AS found
 WHERE found.state = 'running'
 GROUP BY found.worker, found.queue ORDER BY first_started_at LIMIT :most::integer;
