-- Jobs as the console lists them, on PostgreSQL. Each query reads a limited number of index entries:
-- the lists read :scanned jobs, return those that match, at most :most, and the last one that was read,
-- if there may be more. "place" is where the next page goes on, "nth" counts the jobs that were read. An
-- empty text matches everything.

-- name: live_jobs
-- Waiting or running jobs, those that are visible next first. The recursion reads one index entry per
-- queue.
WITH RECURSIVE queues AS (
    (SELECT queue FROM onceward_jobs ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM onceward_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
), scanned AS (
    SELECT found.*, row_number() OVER (ORDER BY found.visible_at, found.id) AS nth
      FROM queues
     CROSS JOIN LATERAL (
           SELECT * FROM onceward_jobs AS job
            WHERE job.queue = queues.queue AND job.state = '{state}' AND {tenant}
              AND (job.visible_at, job.id) > (:after_at::text::timestamptz, :after_id::uuid)
            ORDER BY job.visible_at, job.id LIMIT :scanned::integer) AS found
     WHERE :queue::text IN ('', queues.queue)
     ORDER BY found.visible_at, found.id LIMIT :scanned::integer
)
SELECT tenant, id::text AS job_id, queue, type, resource_id, state, attempts, max_attempts, worker,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       CASE WHEN isfinite(visible_at) THEN extract(epoch FROM visible_at)::float8 END AS due_at,
       NULL::float8 AS ended_at, NULL::text AS error,
       visible_at::text || ' ' || id::text AS place, nth, :type::text IN ('', type) AS matches
  FROM scanned
 WHERE :type IN ('', type) OR nth = :scanned
 ORDER BY nth LIMIT :most::integer;

-- name: live_jobs on citus
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY visible_at, id) AS nth
      FROM onceward_first_jobs(:queue::text, '{state}', {tenant_name}, :after_at::text::timestamptz,
                               :after_id::uuid, :scanned::integer)
     ORDER BY visible_at, id LIMIT :scanned::integer
)
SELECT tenant, id::text AS job_id, queue, type, resource_id, state, attempts, max_attempts, worker,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       CASE WHEN isfinite(visible_at) THEN extract(epoch FROM visible_at)::float8 END AS due_at,
       NULL::float8 AS ended_at, NULL::text AS error,
       visible_at::text || ' ' || id::text AS place, nth, :type::text IN ('', type) AS matches
  FROM scanned
 WHERE :type IN ('', type) OR nth = :scanned
 ORDER BY nth LIMIT :most::integer;

-- name: waiting_jobs_of_tenant
-- In the order of their ids: no index has the times of one tenant's jobs.
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY id) AS nth
      FROM (SELECT * FROM onceward_jobs
             WHERE tenant = :tenant AND id > :after_id::uuid AND :after_at::text IS NOT NULL
             ORDER BY id LIMIT :scanned::integer) AS read
), compared AS (
    SELECT *, state = 'waiting' AND :queue::text IN ('', queue) AND :type::text IN ('', type) AS matches
      FROM scanned
)
SELECT tenant, id::text AS job_id, queue, type, resource_id, state, attempts, max_attempts, worker,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       CASE WHEN isfinite(visible_at) THEN extract(epoch FROM visible_at)::float8 END AS due_at,
       NULL::float8 AS ended_at, NULL::text AS error,
       '-infinity ' || id::text AS place, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most::integer;

-- name: done_jobs
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY completed_at DESC, job_id DESC) AS nth
      FROM (SELECT * FROM onceward_job_completions
             WHERE (completed_at, job_id) < (:after_at::text::timestamptz, :after_id::uuid) AND {tenant}
             ORDER BY completed_at DESC, job_id DESC LIMIT :scanned::integer) AS read
), compared AS (
    SELECT *, :queue::text IN ('', queue) AND :type::text IN ('', type) AS matches FROM scanned
)
SELECT tenant, job_id::text AS job_id, queue, type, resource_id, 'done' AS state, attempts,
       NULL::integer AS max_attempts, worker,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at, NULL::float8 AS due_at,
       extract(epoch FROM completed_at)::float8 AS ended_at, NULL::text AS error,
       completed_at::text || ' ' || job_id::text AS place, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most::integer;

-- name: dead_jobs
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY died_at DESC, job_id DESC) AS nth
      FROM (SELECT * FROM onceward_dead_letters
             WHERE requeued_at IS NULL AND {tenant} AND {queue}
               AND (died_at, job_id) < (:after_at::text::timestamptz, :after_id::uuid)
             ORDER BY died_at DESC, job_id DESC LIMIT :scanned::integer) AS read
), compared AS (
    SELECT *, :type::text IN ('', type) AND :error::text IN ('', error) AS matches FROM scanned
)
SELECT tenant, job_id::text AS job_id, queue, type, resource_id, 'dead' AS state, attempts,
       max_attempts, NULL::text AS worker,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at, NULL::float8 AS due_at,
       extract(epoch FROM died_at)::float8 AS ended_at, error,
       died_at::text || ' ' || job_id::text AS place, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most::integer;

-- name: dead_by_error
-- The newest dead letters by cause.
SELECT queue, type, reason, error, count(*) AS jobs, extract(epoch FROM max(died_at))::float8 AS last_at
  FROM (SELECT queue, type, reason, error, died_at FROM onceward_dead_letters
         WHERE requeued_at IS NULL AND {tenant} AND {queue}
         ORDER BY died_at DESC LIMIT :scanned::integer) AS dead
 GROUP BY queue, type, reason, error ORDER BY jobs DESC, last_at DESC LIMIT :most::integer;

-- name: matching_dead
-- Dead letters that match a filter, newest first.
SELECT tenant, job_id::text AS job_id
  FROM (SELECT tenant, job_id, type, error FROM onceward_dead_letters
         WHERE requeued_at IS NULL AND {tenant} AND {queue}
         ORDER BY died_at DESC LIMIT :scanned::integer) AS dead
 WHERE :type::text IN ('', type) AND :error::text IN ('', error)
 LIMIT :most::integer;

-- name: count_dead
-- How many dead letters match no filter but tenant and queue, counted up to :most.
SELECT count(*) AS jobs
  FROM (SELECT 1 FROM onceward_dead_letters
         WHERE requeued_at IS NULL AND {tenant} AND {queue} LIMIT :most::integer) AS dead;

-- name: matching_waiting
-- Waiting jobs that match a filter, those that are due first.
WITH RECURSIVE queues AS (
    (SELECT queue FROM onceward_jobs ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM onceward_jobs AS next
             WHERE next.queue > queues.queue ORDER BY next.queue LIMIT 1)
      FROM queues WHERE queues.queue IS NOT NULL
)
SELECT found.tenant, found.id::text AS job_id
  FROM queues
 CROSS JOIN LATERAL (
       SELECT * FROM onceward_jobs AS job
        WHERE job.queue = queues.queue
        ORDER BY job.visible_at LIMIT :scanned::integer) AS found
 WHERE :queue::text IN ('', queues.queue) AND found.state = 'waiting' AND :type::text IN ('', found.type)
 LIMIT :most::integer;

-- name: matching_waiting on citus
SELECT tenant, id::text AS job_id
  FROM onceward_first_jobs(:queue::text, '', NULL, '-infinity',
                           '00000000-0000-0000-0000-000000000000', :scanned::integer)
 WHERE state = 'waiting' AND :type::text IN ('', type)
 LIMIT :most::integer;

-- name: matching_waiting_of_tenant
SELECT tenant, job_id::text AS job_id
  FROM (SELECT tenant, id AS job_id, queue, type, state FROM onceward_jobs
         WHERE tenant = :tenant
         ORDER BY id LIMIT :scanned::integer) AS found
 WHERE state = 'waiting' AND :queue::text IN ('', queue) AND :type::text IN ('', type)
 LIMIT :most::integer;

-- name: leased_jobs
-- Running jobs by worker.
SELECT worker, queue, count(*) AS jobs,
       extract(epoch FROM min(started_at))::float8 AS first_started_at,
       extract(epoch FROM min(visible_at))::float8 AS first_lease_ends_at
  FROM (SELECT * FROM onceward_jobs WHERE state = 'running' LIMIT :scanned::integer) AS running
 GROUP BY worker, queue ORDER BY first_started_at LIMIT :most::integer;

-- name: tenants_of_job
-- The tenants that have a job with this id, among the first :most of each table: indexes begin with the
-- tenant.
WITH RECURSIVE live(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_jobs), 1
    UNION ALL
    SELECT (SELECT min(tenant) FROM onceward_jobs AS next WHERE next.tenant > live.tenant), place + 1
      FROM live WHERE live.tenant IS NOT NULL AND place < :most::integer
), done(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_job_completions), 1
    UNION ALL
    SELECT (SELECT min(tenant) FROM onceward_job_completions AS next WHERE next.tenant > done.tenant),
           place + 1
      FROM done WHERE done.tenant IS NOT NULL AND place < :most::integer
), dead(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_dead_letters), 1
    UNION ALL
    SELECT (SELECT min(tenant) FROM onceward_dead_letters AS next WHERE next.tenant > dead.tenant),
           place + 1
      FROM dead WHERE dead.tenant IS NOT NULL AND place < :most::integer
)
SELECT tenant FROM live
 WHERE EXISTS (SELECT 1 FROM onceward_jobs AS job
                WHERE job.tenant = live.tenant AND job.id = :job_id::uuid)
UNION
SELECT tenant FROM done
 WHERE EXISTS (SELECT 1 FROM onceward_job_completions AS job
                WHERE job.tenant = done.tenant AND job.job_id = :job_id::uuid)
UNION
SELECT tenant FROM dead
 WHERE EXISTS (SELECT 1 FROM onceward_dead_letters AS job
                WHERE job.tenant = dead.tenant AND job.job_id = :job_id::uuid);

-- name: tenants_of_job on citus
SELECT DISTINCT tenant FROM onceward_tenants_of_job(:job_id::uuid, :most::integer) AS found(tenant);
