-- Jobs on SQLite. NOW_MS is replaced by SQLite's clock in whole milliseconds since 1970. A query of
-- several statements runs in one transaction and returns the rows of its last statement. SQLite has
-- one writer at a time, so no other write comes in between.

-- name: enqueue
-- Runs in the caller's transaction. A completed key is not enqueued again. A dead-lettered one is,
-- and its dead letter is marked as requeued.
UPDATE onceward_dead_letters SET requeued_at = NOW_MS
 WHERE tenant = :tenant AND job_id = :id AND requeued_at IS NULL;
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
        correlation_id, created_at)
SELECT :tenant, :audit_id, :actor, :audit_name, :payload_hash, 202, :key, :version, :request_id,
       :correlation_id, :audit_at
 WHERE NOT EXISTS (SELECT 1 FROM onceward_job_completions WHERE tenant = :tenant AND job_id = :id)
   AND NOT EXISTS (SELECT 1 FROM onceward_jobs WHERE tenant = :tenant AND id = :id);
INSERT INTO onceward_jobs
       (tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
        visible_at, run_at, max_attempts, actor, request_id, correlation_id, traceparent,
        version, enqueued_at)
SELECT :tenant, :id, :key, :queue, :type, :resource_id, :payload, :payload_hash, :order_key,
       CASE WHEN :order_key IS NOT NULL AND EXISTS (
                 SELECT 1 FROM onceward_jobs WHERE tenant = :tenant AND order_key = :order_key)
            THEN 9000000000000000 ELSE due.at END,
       due.at, :max_attempts, :actor, :request_id, :correlation_id, :traceparent,
       :version, NOW_MS
  FROM (SELECT CAST(coalesce(:run_at * 1000, NOW_MS) + :delay_seconds * 1000 AS INTEGER) AS at)
       AS due
 WHERE NOT EXISTS (SELECT 1 FROM onceward_job_completions WHERE tenant = :tenant AND job_id = :id)
    ON CONFLICT (tenant, id) DO NOTHING
RETURNING id AS job_id, 0 AS merged;

-- name: enqueue_coalesced
-- Merges the job into a waiting one with the same coalescing key: that one gets the new payload and
-- keeps its due time.
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
        correlation_id, created_at)
SELECT :tenant, :audit_id, :actor, :audit_name, :payload_hash, 202, :key, :version, :request_id,
       :correlation_id, :audit_at
 WHERE NOT EXISTS (SELECT 1 FROM onceward_jobs
                    WHERE tenant = :tenant AND queue = :queue AND type = :type
                      AND waiting_key = :coalesce_key);
INSERT INTO onceward_jobs
       (tenant, id, key, queue, type, resource_id, payload, payload_hash, coalesce_key,
        waiting_key, order_key, visible_at, run_at, max_attempts, actor, request_id,
        correlation_id, traceparent, version, enqueued_at)
SELECT :tenant, :id, :key, :queue, :type, :resource_id, :payload, :payload_hash, :coalesce_key,
       :coalesce_key, :order_key,
       CASE WHEN :order_key IS NOT NULL AND EXISTS (
                 SELECT 1 FROM onceward_jobs WHERE tenant = :tenant AND order_key = :order_key)
            THEN 9000000000000000 ELSE due.at END,
       due.at, :max_attempts, :actor, :request_id, :correlation_id, :traceparent,
       :version, NOW_MS
  FROM (SELECT CAST(coalesce(:run_at * 1000, NOW_MS) + :delay_seconds * 1000 AS INTEGER) AS at)
       AS due
 WHERE true
    ON CONFLICT (tenant, queue, type, waiting_key) WHERE waiting_key IS NOT NULL DO UPDATE
   SET payload = excluded.payload, payload_hash = excluded.payload_hash,
       version = excluded.version, merged = merged + 1
RETURNING id AS job_id, key, merged;

-- name: add_cause
-- A request whose job was merged, and its audit event: the resource is the key of the job that it was
-- merged into.
INSERT INTO onceward_job_causes
       (tenant, job_id, request_id, correlation_id, traceparent, caused_at)
VALUES (:tenant, :job_id, :request_id, :correlation_id, :traceparent, NOW_MS)
    ON CONFLICT (tenant, job_id, request_id) DO NOTHING;
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
        correlation_id, created_at)
VALUES (:tenant, :audit_id, :actor, :audit_name, :payload_hash, 202, :key, :version, :request_id,
        :correlation_id, :audit_at);

-- name: causes
SELECT request_id, correlation_id, caused_at / 1000.0 AS caused_at
  FROM onceward_job_causes WHERE tenant = :tenant AND job_id = :job_id ORDER BY caused_at;

-- name: is_done
SELECT 1 AS done FROM onceward_job_completions WHERE tenant = :tenant AND job_id = :id;

-- name: claim
-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. A job and its completion marker
-- never exist at the same time here, because enqueue and completion cannot overlap.
-- If the lease of another worker has expired, a trigger (onceward_jobs_attempt_lost) records that
-- attempt as failed. It counts only if the worker ran no other job (alone): else any of them may be
-- the cause.
UPDATE onceward_jobs
   SET state = 'running', lease = lease + 1,
       attempts = attempts + CASE WHEN state = 'running' AND NOT alone THEN 0 ELSE 1 END,
       lost = lost + CASE WHEN state = 'running' AND NOT alone THEN 1 ELSE 0 END,
       alone = :alone, worker = :worker, waiting_key = NULL, started_at = NOW_MS,
       visible_at = NOW_MS + CAST(:lease_seconds * 1000 AS INTEGER)
 WHERE seq IN (
       SELECT due.seq
         FROM json_each(:queues) AS wanted
         JOIN onceward_jobs AS due ON due.seq IN (
              SELECT seq FROM onceward_jobs
               WHERE queue = wanted.value AND visible_at <= NOW_MS
               ORDER BY visible_at LIMIT :limit)
        WHERE wanted.value NOT IN (SELECT queue FROM onceward_paused_queues)
        ORDER BY due.visible_at LIMIT :limit)
RETURNING tenant, id AS job_id, lease, key, queue, type, payload, attempts, max_attempts, lost,
          request_id, correlation_id, traceparent, version, resource_id, order_key,
          enqueued_at / 1000.0 AS enqueued_at, 0 AS completed;

-- name: claim_these
-- The same for jobs that a broker has named, if they are due and not leased.
UPDATE onceward_jobs
   SET state = 'running', lease = lease + 1,
       attempts = attempts + CASE WHEN state = 'running' AND NOT alone THEN 0 ELSE 1 END,
       lost = lost + CASE WHEN state = 'running' AND NOT alone THEN 1 ELSE 0 END,
       alone = :alone, worker = :worker, waiting_key = NULL, started_at = NOW_MS,
       visible_at = NOW_MS + CAST(:lease_seconds * 1000 AS INTEGER)
 WHERE seq IN (
       SELECT due.seq
         FROM json_each(:jobs) AS wanted
         JOIN onceward_jobs AS due ON due.tenant = json_extract(wanted.value, '$.tenant')
                         AND due.id = json_extract(wanted.value, '$.job_id')
        WHERE due.visible_at <= NOW_MS
          AND due.queue NOT IN (SELECT queue FROM onceward_paused_queues))
RETURNING tenant, id AS job_id, lease, key, queue, type, payload, attempts, max_attempts, lost,
          request_id, correlation_id, traceparent, version, resource_id, order_key,
          enqueued_at / 1000.0 AS enqueued_at, 0 AS completed;

-- name: lost_before
-- The attempt that was lost before this lease, if one was. The trigger has recorded it with the start
-- of the lease.
SELECT failure.worker, failure.error
  FROM onceward_jobs AS job
  JOIN onceward_job_failures AS failure
    ON failure.tenant = job.tenant AND failure.job_id = job.id
   AND failure.failed_at = job.started_at
 WHERE job.tenant = :tenant AND job.id = :job_id AND job.lease = :lease
   AND failure.reason = 'worker_lost';

-- name: still_to_do
-- Of these jobs, those that are not finished, and in how many seconds each can be leased.
SELECT job.tenant, job.id AS job_id, job.queue,
       CASE WHEN visible_at < 9000000000000000
            THEN max(0, visible_at - NOW_MS) / 1000.0 END AS free_in_seconds
  FROM json_each(:jobs) AS wanted
  JOIN onceward_jobs AS job ON job.tenant = json_extract(wanted.value, '$.tenant')
           AND job.id = json_extract(wanted.value, '$.job_id');

-- name: due_in
-- In how many seconds the next job of these queues can be leased. Paused queues do not count.
SELECT (min(next.at) - NOW_MS) / 1000.0 AS seconds
  FROM (SELECT (SELECT visible_at FROM onceward_jobs
                 WHERE queue = wanted.value AND visible_at < 9000000000000000
                 ORDER BY visible_at LIMIT 1) AS at
          FROM json_each(:queues) AS wanted
         WHERE wanted.value NOT IN (SELECT queue FROM onceward_paused_queues)) AS next;

-- name: renew
-- An expired lease is not renewed: another worker may have leased the job since.
UPDATE onceward_jobs
   SET visible_at = NOW_MS + CAST(:lease_seconds * 1000 AS INTEGER)
 WHERE seq IN (
       SELECT job.seq
         FROM json_each(:leases) AS mine
         JOIN onceward_jobs AS job ON job.tenant = json_extract(mine.value, '$.tenant')
                         AND job.id = json_extract(mine.value, '$.job_id')
                         AND job.lease = json_extract(mine.value, '$.lease')
        WHERE job.worker = :worker AND job.visible_at > NOW_MS)
RETURNING tenant, id AS job_id;

-- name: mark_alone
-- Records whether the worker runs these jobs alone. Returns no row for a lost lease.
UPDATE onceward_jobs
   SET alone = :alone
 WHERE seq IN (
       SELECT job.seq
         FROM json_each(:leases) AS mine
         JOIN onceward_jobs AS job ON job.tenant = json_extract(mine.value, '$.tenant')
                         AND job.id = json_extract(mine.value, '$.job_id')
                         AND job.lease = json_extract(mine.value, '$.lease')
        WHERE job.worker = :worker AND job.visible_at > NOW_MS)
RETURNING tenant, id AS job_id;

-- name: complete
-- Deletes the jobs and writes their completion markers. Returns no row for a lost lease.
INSERT INTO onceward_job_completions
       (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts, worker,
        request_id, correlation_id, enqueued_at, completed_at)
SELECT job.tenant, job.id, job.key, job.queue, job.type, job.resource_id, job.payload_hash,
       json_extract(mine.value, '$.result'), job.attempts, job.worker,
       job.request_id, job.correlation_id, job.enqueued_at, NOW_MS
  FROM json_each(:leases) AS mine
  JOIN onceward_jobs AS job ON job.tenant = json_extract(mine.value, '$.tenant')
                  AND job.id = json_extract(mine.value, '$.job_id')
                  AND job.lease = json_extract(mine.value, '$.lease')
 WHERE job.worker = :worker AND job.visible_at > NOW_MS
    ON CONFLICT (tenant, job_id) DO NOTHING;
DELETE FROM onceward_jobs
 WHERE seq IN (
       SELECT job.seq
         FROM json_each(:leases) AS mine
         JOIN onceward_jobs AS job ON job.tenant = json_extract(mine.value, '$.tenant')
                         AND job.id = json_extract(mine.value, '$.job_id')
                         AND job.lease = json_extract(mine.value, '$.lease')
         JOIN onceward_job_completions AS done ON done.tenant = job.tenant AND done.job_id = job.id
        WHERE job.worker = :worker)
RETURNING tenant, id AS job_id;

-- name: complete_one
-- The same in the transaction of the job's effects. Returns no row if the lease was lost; the
-- transaction must then be rolled back.
INSERT INTO onceward_job_completions
       (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts, worker,
        request_id, correlation_id, enqueued_at, completed_at)
SELECT tenant, id, key, queue, type, resource_id, payload_hash, :result, attempts, worker,
       request_id, correlation_id, enqueued_at, NOW_MS
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND visible_at > NOW_MS
    ON CONFLICT (tenant, job_id) DO NOTHING;
DELETE FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker AND changes() = 1
RETURNING id AS job_id;

-- name: remove_completed
-- A job whose key was completed before it ran.
DELETE FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
RETURNING id AS job_id;

-- name: release_next
-- Makes the next job of an order key visible.
UPDATE onceward_jobs
   SET visible_at = run_at
 WHERE visible_at = 9000000000000000
   AND seq = (SELECT min(seq) FROM onceward_jobs WHERE tenant = :tenant AND order_key = :order_key)
RETURNING queue;

-- name: retry
INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker, failed_at)
SELECT tenant, id, attempts, :reason, :error, :worker, NOW_MS
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND visible_at > NOW_MS;
UPDATE onceward_jobs
   SET state = 'waiting', worker = NULL, lost = 0,
       visible_at = NOW_MS + CAST(:delay_seconds * 1000 AS INTEGER)
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND changes() = 1
RETURNING id AS job_id;

-- name: release
-- A worker that stops releases the jobs it cannot finish. The attempt does not count.
UPDATE onceward_jobs
   SET state = 'waiting', worker = NULL, attempts = attempts - 1, visible_at = NOW_MS
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND visible_at > NOW_MS
RETURNING id AS job_id;

-- name: dead_letter
-- A job that was leased after its last attempt has not run again, so it gets no further failure: those
-- of its lost attempts are recorded already. The audit event shows that the lease was still held.
INSERT INTO onceward_dead_letters
       (tenant, job_id, key, queue, type, resource_id, payload, payload_hash, order_key,
        reason, error, attempts, max_attempts, actor, request_id, correlation_id, enqueued_at,
        died_at, version)
SELECT tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
       :reason, :error, min(attempts, max_attempts), max_attempts, actor, request_id,
       correlation_id, enqueued_at, NOW_MS, version
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND visible_at > NOW_MS
    ON CONFLICT (tenant, job_id) DO UPDATE
   SET payload = excluded.payload, payload_hash = excluded.payload_hash,
       reason = excluded.reason, error = excluded.error, attempts = excluded.attempts,
       deaths = deaths + 1, died_at = excluded.died_at, requeued_at = NULL,
       request_id = excluded.request_id, correlation_id = excluded.correlation_id,
       enqueued_at = excluded.enqueued_at, version = excluded.version;
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
        correlation_id, created_at)
SELECT tenant, :audit_id, actor, 'job.dead ' || queue || ' ' || type, payload_hash, 500, key,
       version, request_id, correlation_id, :audit_at
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker AND changes() = 1;
INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker, failed_at)
SELECT tenant, id, attempts, :reason, :error, :worker, NOW_MS
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker AND changes() = 1
   AND attempts <= max_attempts;
DELETE FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND EXISTS (SELECT 1 FROM onceward_audit_events WHERE tenant = :tenant AND id = :audit_id)
RETURNING id AS job_id;

-- name: save_step
-- Only the worker that holds the lease may record a step.
INSERT INTO onceward_job_steps (tenant, job_id, name, result, attempt, finished_at)
SELECT tenant, id, :name, :result, attempts, NOW_MS
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND lease = :lease AND worker = :worker
   AND visible_at > NOW_MS
    ON CONFLICT (tenant, job_id, name) DO NOTHING
RETURNING name;

-- name: steps
SELECT name, result, attempt, finished_at / 1000.0 AS finished_at
  FROM onceward_job_steps WHERE tenant = :tenant AND job_id = :job_id ORDER BY finished_at, name;

-- name: failures
SELECT attempt, reason, error, worker, failed_at / 1000.0 AS failed_at
  FROM onceward_job_failures WHERE tenant = :tenant AND job_id = :job_id ORDER BY seq;

-- name: list_jobs
-- Jobs in any state, by when they ended or, before that, were enqueued; newest first. NULL matches every
-- tenant.
SELECT * FROM (
    SELECT tenant, id AS job_id, key, queue, type, resource_id, state, attempts, max_attempts,
           worker, NULL AS reason, NULL AS error, request_id, correlation_id, enqueued_at / 1000.0 AS enqueued_at,
           CASE WHEN visible_at < 9000000000000000 THEN visible_at / 1000.0 END AS due_at,
           NULL AS ended_at,
           state = 'running' AND visible_at <= NOW_MS AS lease_expired
      FROM onceward_jobs
     WHERE :state IN ('', state) AND (:tenant IS NULL OR tenant = :tenant)
       AND :queue IN ('', queue) AND :type IN ('', type)
    UNION ALL
    SELECT * FROM (
        SELECT tenant, job_id, key, queue, type, resource_id, 'done', attempts, NULL,
               worker, NULL, NULL, request_id, correlation_id, enqueued_at / 1000.0, NULL,
               completed_at / 1000.0, 0
          FROM onceward_job_completions
         WHERE :state IN ('', 'done') AND (:tenant IS NULL OR tenant = :tenant)
           AND :queue IN ('', queue) AND :type IN ('', type)
         ORDER BY completed_at DESC LIMIT :limit) AS done
    UNION ALL
    SELECT * FROM (
        SELECT tenant, job_id, key, queue, type, resource_id, 'dead', attempts, max_attempts,
               NULL, reason, error, request_id, correlation_id, enqueued_at / 1000.0, NULL,
               died_at / 1000.0, 0
          FROM onceward_dead_letters
         WHERE :state IN ('', 'dead') AND requeued_at IS NULL
           AND (:tenant IS NULL OR tenant = :tenant)
           AND :queue IN ('', queue) AND :type IN ('', type)
         ORDER BY died_at DESC LIMIT :limit) AS dead
) AS found
 ORDER BY coalesce(ended_at, enqueued_at) DESC, enqueued_at DESC, job_id LIMIT :limit;

-- name: find_job
-- One job in any state. NULL matches every tenant.
SELECT tenant, id AS job_id, key, queue, type, resource_id, state, attempts, max_attempts,
       worker, NULL AS reason, NULL AS error, payload, payload_hash, NULL AS result, merged,
       coalesce_key, order_key, request_id, correlation_id, enqueued_at / 1000.0 AS enqueued_at,
       CASE WHEN visible_at < 9000000000000000 THEN visible_at / 1000.0 END AS due_at,
       NULL AS ended_at,
       state = 'running' AND visible_at <= NOW_MS AS lease_expired, 1 AS place
  FROM onceward_jobs WHERE id = :job_id AND (:tenant IS NULL OR tenant = :tenant)
UNION ALL
SELECT tenant, job_id, key, queue, type, resource_id, 'done', attempts, NULL,
       worker, NULL, NULL, NULL, payload_hash, result, 0,
       NULL, NULL, request_id, correlation_id, enqueued_at / 1000.0, NULL,
       completed_at / 1000.0, 0, 2
  FROM onceward_job_completions WHERE job_id = :job_id AND (:tenant IS NULL OR tenant = :tenant)
UNION ALL
SELECT tenant, job_id, key, queue, type, resource_id, 'dead', attempts, max_attempts,
       NULL, reason, error, payload, payload_hash, NULL, 0,
       NULL, order_key, request_id, correlation_id, enqueued_at / 1000.0, NULL,
       died_at / 1000.0, 0, 3
  FROM onceward_dead_letters WHERE job_id = :job_id AND (:tenant IS NULL OR tenant = :tenant)
 ORDER BY place LIMIT 1;

-- name: requeue
-- Moves a dead letter back into its queue with all its attempts. The dead letter stays, marked.
UPDATE onceward_dead_letters
   SET requeued_at = NOW_MS
 WHERE tenant = :tenant AND job_id = :job_id AND requeued_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM onceward_jobs WHERE tenant = :tenant AND id = :job_id)
   AND NOT EXISTS (SELECT 1 FROM onceward_job_completions
                    WHERE tenant = :tenant AND job_id = :job_id);
INSERT INTO onceward_jobs
       (tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
        visible_at, run_at, max_attempts, actor, request_id, correlation_id, enqueued_at, version)
SELECT tenant, job_id, key, queue, type, resource_id, payload, payload_hash, order_key,
       CASE WHEN order_key IS NOT NULL AND EXISTS (
                 SELECT 1 FROM onceward_jobs AS job
                  WHERE job.tenant = dead.tenant AND job.order_key = dead.order_key)
            THEN 9000000000000000 ELSE NOW_MS END,
       NOW_MS, max_attempts, actor, request_id, correlation_id, enqueued_at, version
  FROM onceward_dead_letters AS dead
 WHERE tenant = :tenant AND job_id = :job_id AND changes() = 1;
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
        correlation_id, created_at)
SELECT tenant, :audit_id, :actor, 'job.requeued ' || queue || ' ' || type, payload_hash, 202, key,
       version, request_id, correlation_id, :audit_at
  FROM onceward_dead_letters
 WHERE tenant = :tenant AND job_id = :job_id AND changes() = 1;
SELECT tenant, job_id, queue FROM onceward_dead_letters
 WHERE tenant = :tenant AND job_id = :job_id AND changes() = 1;

-- name: cancel
-- Moves a waiting job to the dead letters. A job that a worker has leased is left alone. The audit
-- event shows that it was waiting.
INSERT INTO onceward_dead_letters
       (tenant, job_id, key, queue, type, resource_id, payload, payload_hash, order_key,
        reason, error, attempts, max_attempts, actor, request_id, correlation_id, enqueued_at,
        died_at, version)
SELECT tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
       'cancelled', :reason, attempts, max_attempts, actor, request_id,
       correlation_id, enqueued_at, NOW_MS, version
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND state = 'waiting'
    ON CONFLICT (tenant, job_id) DO UPDATE
   SET payload = excluded.payload, payload_hash = excluded.payload_hash,
       reason = excluded.reason, error = excluded.error, attempts = excluded.attempts,
       deaths = deaths + 1, died_at = excluded.died_at, requeued_at = NULL,
       request_id = excluded.request_id, correlation_id = excluded.correlation_id,
       enqueued_at = excluded.enqueued_at, version = excluded.version;
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
        correlation_id, created_at, reason)
SELECT tenant, :audit_id, :actor, 'job.cancelled ' || queue || ' ' || type, payload_hash, 200, key,
       version, request_id, correlation_id, :audit_at, :reason
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id AND state = 'waiting' AND changes() = 1;
DELETE FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id
   AND EXISTS (SELECT 1 FROM onceward_audit_events WHERE tenant = :tenant AND id = :audit_id)
RETURNING queue;

-- name: paused_queues
SELECT queue FROM onceward_paused_queues;

-- name: depths
-- The jobs of each queue, and for how long the oldest due one has waited. Reads the whole table.
SELECT queue, state, count(*) AS jobs,
       max(0, (NOW_MS - min(run_at)
               FILTER (WHERE state = 'waiting' AND visible_at <= NOW_MS)) / 1000.0)
         AS oldest_seconds
  FROM onceward_jobs GROUP BY queue, state;

-- name: dead_count
SELECT queue, count(*) AS jobs FROM onceward_dead_letters WHERE requeued_at IS NULL GROUP BY queue;

-- name: queue_depths
-- The same for metrics and the console, which are read every few seconds: of each queue, at most :most
-- waiting, running and dead jobs are counted, and fewer if there are many queues: about :budget in all,
-- but at least 100. Indexes are enough for that; only the first due jobs are looked at, for the oldest.
-- (The recursions read one index entry per queue.)
WITH RECURSIVE live(queue) AS (
    SELECT (SELECT queue FROM onceward_jobs ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM onceward_jobs AS next
             WHERE next.queue > live.queue ORDER BY next.queue LIMIT 1)
      FROM live WHERE live.queue IS NOT NULL
), dead(queue) AS (
    SELECT (SELECT queue FROM onceward_dead_letters WHERE requeued_at IS NULL ORDER BY queue LIMIT 1)
    UNION ALL
    SELECT (SELECT next.queue FROM onceward_dead_letters AS next
             WHERE next.requeued_at IS NULL AND next.queue > dead.queue
             ORDER BY next.queue LIMIT 1)
      FROM dead WHERE dead.queue IS NOT NULL
), queues(queue) AS MATERIALIZED (
    SELECT queue FROM live WHERE queue IS NOT NULL
    UNION
    SELECT queue FROM dead WHERE queue IS NOT NULL
), most(jobs) AS MATERIALIZED (
    SELECT min(:most, max(100, :budget / max(1, count(*)) / 100 * 100)) FROM queues
), counts AS MATERIALIZED (
    SELECT queue,
           (SELECT count(*) FROM (SELECT 1 FROM onceward_jobs
                                   WHERE queue = queues.queue AND state = 'running'
                                   LIMIT (SELECT jobs FROM most))) AS running,
           (SELECT count(*) FROM (SELECT 1 FROM onceward_jobs WHERE queue = queues.queue
                                   LIMIT (SELECT 2 * jobs FROM most))) AS jobs,
           (SELECT count(*) FROM (SELECT 1 FROM onceward_dead_letters
                                   WHERE queue = queues.queue AND requeued_at IS NULL
                                   LIMIT (SELECT jobs FROM most))) AS dead,
           (SELECT min(run_at)
              FROM (SELECT state, run_at FROM onceward_jobs
                     WHERE queue = queues.queue AND visible_at <= NOW_MS
                     ORDER BY visible_at LIMIT 10)
             WHERE state = 'waiting') AS oldest
      FROM queues
)
SELECT queue, min(counts.jobs - running, most.jobs) AS waiting, running, dead,
       max(0, coalesce((NOW_MS - oldest) / 1000.0, 0)) AS oldest_seconds, most.jobs AS counted
  FROM counts CROSS JOIN most;

-- name: to_publish
-- For the relay: due jobs that are not published, or were published and not leased for some time.
-- That time doubles with each publication: a long queue is no reason to publish all of it again.
-- Only the front of each queue is read, so that a long queue costs no more than a short one.
SELECT job.tenant, job.id AS job_id, job.queue, job.seq, job.published
  FROM json_each(:queues) AS wanted
  JOIN onceward_jobs AS job ON job.seq IN (
       SELECT seq FROM onceward_jobs
        WHERE queue = wanted.value AND visible_at <= NOW_MS
        ORDER BY visible_at LIMIT :front)
 WHERE wanted.value NOT IN (SELECT queue FROM onceward_paused_queues)
   AND (job.published_at IS NULL
        OR max(job.published_at, job.visible_at)
           < NOW_MS - :again_after_seconds * 1000 * (1 << min(max(job.published, 1) - 1, 6)))
 ORDER BY job.visible_at LIMIT :limit;

-- name: mark_published
-- A job that was dead-lettered and requeued meanwhile is another row (seq), which has not been
-- published.
UPDATE onceward_jobs AS job
   SET published = max(job.published, mine.published), published_at = NOW_MS
  FROM (SELECT json_extract(value, '$.seq') AS seq,
               json_extract(value, '$.published') AS published
          FROM json_each(:jobs)) AS mine
 WHERE job.seq = mine.seq AND (job.published < mine.published OR job.published_at IS NULL);

-- name: reset_published
-- The broker has lost all messages: published jobs are published again, with the next message id.
UPDATE onceward_jobs SET published_at = NULL WHERE published_at IS NOT NULL RETURNING id AS job_id;

-- name: unpublish
-- The messages about these jobs are acknowledged without running them: they are published again.
UPDATE onceward_jobs
   SET published_at = NULL
 WHERE seq IN (
       SELECT job.seq
         FROM json_each(:jobs) AS wanted
         JOIN onceward_jobs AS job ON job.tenant = json_extract(wanted.value, '$.tenant')
                         AND job.id = json_extract(wanted.value, '$.job_id'))
RETURNING tenant, id AS job_id;

-- name: overdue
-- Jobs of one queue that have been due for so many seconds.
SELECT tenant, id AS job_id, (NOW_MS - visible_at) / 1000.0 AS overdue_seconds
  FROM onceward_jobs
 WHERE queue = :queue AND visible_at <= NOW_MS - :seconds * 1000
 ORDER BY visible_at LIMIT :limit;

-- name: publish_due_in
SELECT (min(next.at) - NOW_MS) / 1000.0 AS seconds
  FROM (SELECT (SELECT visible_at FROM onceward_jobs
                 WHERE queue = wanted.value
                   AND visible_at > NOW_MS AND visible_at < 9000000000000000
                 ORDER BY visible_at LIMIT 1) AS at
          FROM json_each(:queues) AS wanted
         WHERE wanted.value NOT IN (SELECT queue FROM onceward_paused_queues)) AS next;

-- name: now
SELECT NOW_MS / 1000.0 AS now;

-- name: clean_completions
-- A key counts as completed until its marker is deleted here.
DELETE FROM onceward_job_completions
 WHERE rowid IN (SELECT rowid FROM onceward_job_completions
                  WHERE completed_at < NOW_MS - :older_than_seconds * 1000
                  ORDER BY completed_at LIMIT :limit)
RETURNING 1 AS deleted;

-- name: clean_dead_letters
-- Only requeued ones: an operator decides about the others.
DELETE FROM onceward_dead_letters
 WHERE rowid IN (SELECT rowid FROM onceward_dead_letters
                  WHERE requeued_at < NOW_MS - :older_than_seconds * 1000 LIMIT :limit)
RETURNING 1 AS deleted;

-- name: clean_steps
DELETE FROM onceward_job_steps
 WHERE (tenant, job_id, name) IN (
       SELECT tenant, job_id, name FROM onceward_job_steps AS step
        WHERE finished_at < NOW_MS - :older_than_seconds * 1000
          AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                           WHERE job.tenant = step.tenant AND job.id = step.job_id)
          AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                           WHERE dead.tenant = step.tenant AND dead.job_id = step.job_id)
        LIMIT :limit)
RETURNING 1 AS deleted;

-- name: clean_failures
DELETE FROM onceward_job_failures
 WHERE seq IN (
       SELECT seq FROM onceward_job_failures AS failure
        WHERE failed_at < NOW_MS - :older_than_seconds * 1000
          AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                           WHERE job.tenant = failure.tenant AND job.id = failure.job_id)
          AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                           WHERE dead.tenant = failure.tenant AND dead.job_id = failure.job_id)
        LIMIT :limit)
RETURNING 1 AS deleted;

-- name: clean_causes
DELETE FROM onceward_job_causes
 WHERE (tenant, job_id, request_id) IN (
       SELECT tenant, job_id, request_id FROM onceward_job_causes AS cause
        WHERE caused_at < NOW_MS - :older_than_seconds * 1000
          AND NOT EXISTS (SELECT 1 FROM onceward_jobs AS job
                           WHERE job.tenant = cause.tenant AND job.id = cause.job_id)
          AND NOT EXISTS (SELECT 1 FROM onceward_job_completions AS done
                           WHERE done.tenant = cause.tenant AND done.job_id = cause.job_id)
          AND NOT EXISTS (SELECT 1 FROM onceward_dead_letters AS dead
                           WHERE dead.tenant = cause.tenant AND dead.job_id = cause.job_id)
        LIMIT :limit)
RETURNING 1 AS deleted;
