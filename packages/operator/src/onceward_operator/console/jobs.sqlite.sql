-- Jobs as the console lists them, on SQLite. Each query reads a limited number of index entries: the
-- lists read :scanned jobs, return those that match, at most :most, and the last one that was read, if
-- there may be more. "place" is where the next page goes on, "nth" counts the jobs that were read. An
-- empty text matches everything.

-- name: live_jobs
-- Waiting or running jobs, those that are visible next first. The recursion reads one index entry per
-- queue.
WITH RECURSIVE queues AS (
    SELECT min(queue) AS queue FROM onceward_jobs
    UNION ALL
    SELECT (SELECT next.queue FROM onceward_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
), scanned AS (
    SELECT found.*, row_number() OVER (ORDER BY found.visible_at, found.id) AS nth
      FROM queues
      JOIN onceward_jobs AS found ON found.seq IN (
           SELECT job.seq FROM onceward_jobs AS job
            WHERE job.queue = queues.queue AND job.state = '{state}' AND {tenant}
              AND (job.visible_at, job.id) > (CAST(:after_at AS INTEGER), :after_id)
            ORDER BY job.visible_at, job.id LIMIT :scanned)
     WHERE :queue IN ('', queues.queue)
     ORDER BY found.visible_at, found.id LIMIT :scanned
)
SELECT tenant, id AS job_id, queue, type, resource_id, state, attempts, max_attempts, worker,
       enqueued_at / 1000.0 AS enqueued_at,
       CASE WHEN visible_at < 9000000000000000 THEN visible_at / 1000.0 END AS due_at,
       NULL AS ended_at, NULL AS error,
       visible_at || ' ' || id AS place, nth, :type IN ('', type) AS matches
  FROM scanned
 WHERE :type IN ('', type) OR nth = :scanned
 ORDER BY nth LIMIT :most;

-- name: waiting_jobs_of_tenant
-- In the order of their ids: no index has the times of one tenant's jobs.
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY id) AS nth
      FROM (SELECT * FROM onceward_jobs
             WHERE tenant = :tenant AND id > :after_id AND :after_at IS NOT NULL
             ORDER BY id LIMIT :scanned) AS read
), compared AS (
    SELECT *, state = 'waiting' AND :queue IN ('', queue) AND :type IN ('', type) AS matches
      FROM scanned
)
SELECT tenant, id AS job_id, queue, type, resource_id, state, attempts, max_attempts, worker,
       enqueued_at / 1000.0 AS enqueued_at,
       CASE WHEN visible_at < 9000000000000000 THEN visible_at / 1000.0 END AS due_at,
       NULL AS ended_at, NULL AS error, '-1 ' || id AS place, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most;

-- name: done_jobs
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY completed_at DESC, job_id DESC) AS nth
      FROM (SELECT * FROM onceward_job_completions
             WHERE (completed_at, job_id) < (CAST(:after_at AS INTEGER), :after_id) AND {tenant}
             ORDER BY completed_at DESC, job_id DESC LIMIT :scanned) AS read
), compared AS (
    SELECT *, :queue IN ('', queue) AND :type IN ('', type) AS matches FROM scanned
)
SELECT tenant, job_id, queue, type, resource_id, 'done' AS state, attempts, NULL AS max_attempts,
       worker, enqueued_at / 1000.0 AS enqueued_at, NULL AS due_at, completed_at / 1000.0 AS ended_at,
       NULL AS error, completed_at || ' ' || job_id AS place, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most;

-- name: dead_jobs
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY died_at DESC, job_id DESC) AS nth
      FROM (SELECT * FROM onceward_dead_letters
             WHERE requeued_at IS NULL AND {tenant} AND {queue}
               AND (died_at, job_id) < (CAST(:after_at AS INTEGER), :after_id)
             ORDER BY died_at DESC, job_id DESC LIMIT :scanned) AS read
), compared AS (
    SELECT *, :type IN ('', type) AND :error IN ('', error) AS matches FROM scanned
)
SELECT tenant, job_id, queue, type, resource_id, 'dead' AS state, attempts, max_attempts,
       NULL AS worker, enqueued_at / 1000.0 AS enqueued_at, NULL AS due_at,
       died_at / 1000.0 AS ended_at, error, died_at || ' ' || job_id AS place, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most;

-- name: dead_by_error
-- The newest dead letters by cause.
SELECT queue, type, reason, error, count(*) AS jobs, max(died_at) / 1000.0 AS last_at
  FROM (SELECT queue, type, reason, error, died_at FROM onceward_dead_letters
         WHERE requeued_at IS NULL AND {tenant} AND {queue}
         ORDER BY died_at DESC LIMIT :scanned) AS dead
 GROUP BY queue, type, reason, error ORDER BY jobs DESC, last_at DESC LIMIT :most;

-- name: matching_dead
-- Dead letters that match a filter, newest first.
SELECT tenant, job_id
  FROM (SELECT tenant, job_id, type, error FROM onceward_dead_letters
         WHERE requeued_at IS NULL AND {tenant} AND {queue}
         ORDER BY died_at DESC LIMIT :scanned) AS dead
 WHERE :type IN ('', type) AND :error IN ('', error)
 LIMIT :most;

-- name: count_dead
-- How many dead letters match no filter but tenant and queue, counted up to :most.
SELECT count(*) AS jobs
  FROM (SELECT 1 FROM onceward_dead_letters
         WHERE requeued_at IS NULL AND {tenant} AND {queue} LIMIT :most) AS dead;

-- name: matching_waiting
-- Waiting jobs that match a filter, those that are due first.
WITH RECURSIVE queues AS (
    SELECT min(queue) AS queue FROM onceward_jobs
    UNION ALL
    SELECT (SELECT next.queue FROM onceward_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.tenant, found.id AS job_id
  FROM queues
  JOIN onceward_jobs AS found ON found.seq IN (
       SELECT job.seq FROM onceward_jobs AS job
        WHERE job.queue = queues.queue
        ORDER BY job.visible_at LIMIT :scanned)
 WHERE :queue IN ('', queues.queue) AND found.state = 'waiting' AND :type IN ('', found.type)
 LIMIT :most;

-- name: matching_waiting_of_tenant
SELECT tenant, job_id
  FROM (SELECT tenant, id AS job_id, queue, type, state FROM onceward_jobs
         WHERE tenant = :tenant
         ORDER BY id LIMIT :scanned) AS found
 WHERE state = 'waiting' AND :queue IN ('', queue) AND :type IN ('', type)
 LIMIT :most;

-- name: leased_jobs
-- Running jobs by worker.
SELECT worker, queue, count(*) AS jobs, min(started_at) / 1000.0 AS first_started_at,
       min(visible_at) / 1000.0 AS first_lease_ends_at
  FROM (SELECT * FROM onceward_jobs WHERE state = 'running' LIMIT :scanned) AS running
 GROUP BY worker, queue ORDER BY first_started_at LIMIT :most;

-- name: tenants_of_job
-- The tenants that have a job with this id, among the first :most of each table: indexes begin with the
-- tenant.
WITH RECURSIVE live(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_jobs), 1
    UNION ALL
    SELECT (SELECT min(tenant) FROM onceward_jobs AS next WHERE next.tenant > live.tenant), place + 1
      FROM live WHERE live.tenant IS NOT NULL AND place < :most
), done(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_job_completions), 1
    UNION ALL
    SELECT (SELECT min(tenant) FROM onceward_job_completions AS next WHERE next.tenant > done.tenant),
           place + 1
      FROM done WHERE done.tenant IS NOT NULL AND place < :most
), dead(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_dead_letters), 1
    UNION ALL
    SELECT (SELECT min(tenant) FROM onceward_dead_letters AS next WHERE next.tenant > dead.tenant),
           place + 1
      FROM dead WHERE dead.tenant IS NOT NULL AND place < :most
)
SELECT tenant FROM live
 WHERE EXISTS (SELECT 1 FROM onceward_jobs AS job
                WHERE job.tenant = live.tenant AND job.id = :job_id)
UNION
SELECT tenant FROM done
 WHERE EXISTS (SELECT 1 FROM onceward_job_completions AS job
                WHERE job.tenant = done.tenant AND job.job_id = :job_id)
UNION
SELECT tenant FROM dead
 WHERE EXISTS (SELECT 1 FROM onceward_dead_letters AS job
                WHERE job.tenant = dead.tenant AND job.job_id = :job_id);
