-- Jobs on PostgreSQL. Instants are those at which the server received the statement
-- (statement_timestamp()): now() is the start of the transaction, and a worker that slept in one would
-- take its expired lease for valid.
--
-- Statements on jobs of several tenants that lock them are functions, see
-- stores/sql/jobs: a file of the name of each.
--
-- A queue is empty most of the time. A plan that PostgreSQL caches while it is empty reads the whole
-- table. So "complete" contains "(SELECT generate_series(1, 1000000) AS n LIMIT …)": without its
-- parameters such a plan looks too expensive, so PostgreSQL plans again for each execution. That
-- costs 0.2 ms.

-- name: enqueue
-- Runs in the caller's transaction. A completed key is not enqueued again. A dead-lettered one is,
-- and its dead letter is marked as requeued.
SELECT :id::text AS job_id, 0 AS merged
 WHERE onceward_enqueue(
           :tenant::text, :id::uuid, :key::text, :queue::text, :type::text, :resource_id::text,
           :payload::text, :payload_hash::text, :order_key::text, :run_at::float8,
           :delay_seconds::float8, :max_attempts::integer, :actor::text, :request_id::text,
           :correlation_id::text, :traceparent::text, :version::bigint, :audit_id::text,
           :audit_name::text);

-- name: enqueue_coalesced
-- Merges the job into a waiting one with the same coalescing key: that one gets the new payload and
-- keeps its due time. No worker can lease it meanwhile, because this transaction locks the row.
SELECT job_id, job_key AS key, merged
  FROM onceward_enqueue_coalesced(
           :tenant::text, :id::uuid, :key::text, :queue::text, :type::text, :resource_id::text,
           :payload::text, :payload_hash::text, :coalesce_key::text, :order_key::text,
           :run_at::float8, :delay_seconds::float8, :max_attempts::integer, :actor::text,
           :request_id::text, :correlation_id::text, :traceparent::text, :version::bigint,
           :audit_id::text, :audit_name::text);

-- name: lock_order
-- Transactions that enqueue or finish jobs of an order key run one at a time: sequence numbers then
-- follow the order of the commits, and no job waits for a deleted one. A separate statement, so that
-- the next one sees what was committed while this one waited.
SELECT pg_advisory_xact_lock(:lock::bigint);

-- name: add_cause
-- A request whose job was merged, and its audit event: the resource is the key of the job that it was
-- merged into.
WITH caused AS (
    INSERT INTO onceward_job_causes (tenant, job_id, request_id, correlation_id, traceparent)
    VALUES (:tenant::text, :job_id::uuid, :request_id::text, :correlation_id::text,
            :traceparent::text)
        ON CONFLICT (tenant, job_id, request_id) DO NOTHING
)
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version,
        request_id, correlation_id, created_at)
VALUES (:tenant, :audit_id::text, :actor::text, :audit_name::text, :payload_hash::text, 202,
        :key::text, :version::bigint, :request_id, :correlation_id, statement_timestamp());

-- name: causes
SELECT request_id, correlation_id, extract(epoch FROM caused_at)::float8 AS caused_at
  FROM onceward_job_causes
 WHERE tenant = :tenant::text AND job_id = :job_id::uuid
   AND PLANNED_FOR(:tenant) ORDER BY caused_at;

-- name: is_done
SELECT 1 AS done FROM onceward_job_completions WHERE tenant = :tenant AND job_id = :id::uuid
   AND PLANNED_FOR(:tenant);

-- name: claim
-- Leases due jobs, oldest first, up to the limit from each queue that is not paused. Rows that another claim has locked
-- are skipped. "completed" is true if the key has a completion marker: the job is then acknowledged
-- without running. If the lease of another worker has expired, that attempt is recorded as failed.
SELECT tenant, job_id::text AS job_id, lease, key, queue, type, payload, attempts, max_attempts, lost,
       request_id, correlation_id, traceparent, version, resource_id, order_key,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at, completed
  FROM onceward_claim_jobs(:queues::text[], :limit::integer, :worker::text,
                           :lease_seconds::float8, :alone::boolean);

-- name: claim_these
-- The same for jobs that a broker has named, if they are due and not leased.
SELECT tenant, job_id::text AS job_id, lease, key, queue, type, payload, attempts, max_attempts, lost,
       request_id, correlation_id, traceparent, version, resource_id, order_key,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at, completed
  FROM onceward_claim_named_jobs(:tenants::text::text[], :ids::text::uuid[], :worker::text,
                                 :lease_seconds::float8, :alone::boolean);

-- name: lost_before
-- The attempt that was lost before this lease, if one was. The claim has recorded it with the start
-- of the lease.
SELECT failure.worker, failure.error
  FROM onceward_jobs AS job
  JOIN onceward_job_failures AS failure
    ON failure.tenant = job.tenant AND failure.job_id = job.id
   AND failure.failed_at = job.started_at
 WHERE job.tenant = :tenant AND job.id = :job_id::uuid AND job.lease = :lease
   AND failure.reason = 'worker_lost'
   AND PLANNED_FOR(:tenant);

-- name: still_to_do
-- Of these jobs, those that are not finished, and in how many seconds each can be leased.
SELECT job.tenant, job.id::text AS job_id, job.queue,
       CASE WHEN isfinite(visible_at)
            THEN greatest(0, extract(epoch FROM visible_at - statement_timestamp()))::float8 END
         AS free_in_seconds
  FROM json_to_recordset(:jobs::json) AS wanted(tenant text, job_id uuid)
  JOIN onceward_jobs AS job ON job.tenant = wanted.tenant AND job.id = wanted.job_id
   AND PLANNED_FOR(:jobs);

-- name: due_in
-- In how many seconds the next job of these queues can be leased. Paused queues do not count.
SELECT extract(epoch FROM onceward_next_visible(:queues::text[], '-infinity')
                          - statement_timestamp())::float8 AS seconds;

-- name: renew
-- An expired lease is not renewed: another worker may have leased the job since.
SELECT tenant, job_id
  FROM onceward_renew_leases(:leases::json, :worker::text, :lease_seconds::float8);

-- name: renew on citus
UPDATE onceward_jobs AS job
   SET visible_at = statement_timestamp() + make_interval(secs => :lease_seconds::float8)
  FROM json_to_recordset(:leases::json) AS mine(tenant text, job_id uuid, lease bigint)
 WHERE job.tenant = mine.tenant AND job.id = mine.job_id AND job.lease = mine.lease
   AND job.worker = :worker AND job.visible_at > statement_timestamp()
RETURNING job.tenant, job.id::text AS job_id;

-- name: mark_alone
-- Records whether the worker runs these jobs alone. Returns no row for a lost lease.
SELECT tenant, job_id
  FROM onceward_mark_jobs_alone(:leases::json, :worker::text, :alone::boolean);

-- name: mark_alone on citus
UPDATE onceward_jobs AS job
   SET alone = :alone::boolean
  FROM json_to_recordset(:leases::json) AS mine(tenant text, job_id uuid, lease bigint)
 WHERE job.tenant = mine.tenant AND job.id = mine.job_id AND job.lease = mine.lease
   AND job.worker = :worker AND job.visible_at > statement_timestamp()
RETURNING job.tenant, job.id::text AS job_id;

-- name: complete
-- Deletes the jobs and writes their completion markers. Returns no row for a lost lease. (Without
-- coalesce, PostgreSQL estimates one row per worker and plans a nested loop.)
WITH deleted AS (
    DELETE FROM onceward_jobs AS job
     USING (SELECT (SELECT :tenants::text::text[])[n] AS tenant, (SELECT :ids::text::uuid[])[n] AS id,
                   (SELECT :numbers::text::bigint[])[n] AS lease,
                   (SELECT :results::text::text[])[n] AS result
              FROM (SELECT generate_series(1, 1000000) AS n LIMIT :count::integer) AS numbers) AS mine
     WHERE job.tenant = mine.tenant AND job.id = mine.id AND job.lease = mine.lease
       AND coalesce(job.worker = :worker, false) AND job.visible_at > statement_timestamp()
    RETURNING job.*, mine.result
), marked AS (
    INSERT INTO onceward_job_completions
           (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts, worker,
            request_id, correlation_id, enqueued_at)
    SELECT tenant, id, key, queue, type, resource_id, payload_hash, result, attempts, worker,
           request_id, correlation_id, enqueued_at
      FROM deleted
        ON CONFLICT (tenant, job_id) DO NOTHING
)
SELECT tenant, id::text AS job_id FROM deleted;

-- name: complete_one
-- The same in the transaction of the job's effects. Returns no row if the lease was lost or a marker
-- exists; the transaction must then be rolled back.
WITH deleted AS (
    DELETE FROM onceward_jobs
     WHERE tenant = :tenant AND id = :job_id::uuid AND lease = :lease AND worker = :worker
   AND PLANNED_FOR(:tenant)
       AND visible_at > statement_timestamp()
    RETURNING *
)
INSERT INTO onceward_job_completions
       (tenant, job_id, key, queue, type, resource_id, payload_hash, result, attempts, worker,
        request_id, correlation_id, enqueued_at)
SELECT tenant, id, key, queue, type, resource_id, payload_hash, :result::text, attempts, worker,
       request_id, correlation_id, enqueued_at
  FROM deleted
    ON CONFLICT (tenant, job_id) DO NOTHING
RETURNING job_id::text AS job_id;

-- name: two_phase_commit
-- Before "complete_one" on Citus; see stores/sql/guard/two_phase_commit.citus.sql.
SELECT onceward_two_phase_commit();

-- name: remove_completed
-- A job whose key was completed before it ran.
DELETE FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id::uuid AND lease = :lease AND worker = :worker
   AND PLANNED_FOR(:tenant)
RETURNING id::text AS job_id;

-- name: release_next
-- Makes the next job of an order key visible.
UPDATE onceward_jobs
   SET visible_at = run_at
 WHERE tenant = :tenant AND order_key = :order_key AND visible_at = 'infinity'
   AND seq = (SELECT min(seq) FROM onceward_jobs WHERE tenant = :tenant AND order_key = :order_key)
   AND PLANNED_FOR(:tenant)
RETURNING queue;

-- name: retry
WITH kept AS (
    UPDATE onceward_jobs
       SET state = 'waiting', worker = NULL, lost = 0,
           visible_at = statement_timestamp() + make_interval(secs => :delay_seconds::float8)
     WHERE tenant = :tenant AND id = :job_id::uuid AND lease = :lease AND worker = :worker::text
       AND visible_at > statement_timestamp()
   AND PLANNED_FOR(:tenant)
    RETURNING tenant, id, attempts
), failed AS (
    INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker)
    SELECT tenant, id, attempts, :reason::text, :error::text, :worker FROM kept
)
SELECT id::text AS job_id FROM kept;

-- name: release
-- A worker that stops releases the jobs it cannot finish. The attempt does not count.
UPDATE onceward_jobs
   SET state = 'waiting', worker = NULL, attempts = attempts - 1, visible_at = statement_timestamp()
 WHERE tenant = :tenant AND id = :job_id::uuid AND lease = :lease AND worker = :worker
   AND visible_at > statement_timestamp()
   AND PLANNED_FOR(:tenant)
RETURNING id::text AS job_id;

-- name: dead_letter
-- A job that was leased after its last attempt has not run again, so it gets no further failure: those
-- of its lost attempts are recorded already.
WITH deleted AS (
    DELETE FROM onceward_jobs
     WHERE tenant = :tenant AND id = :job_id::uuid AND lease = :lease AND worker = :worker::text
       AND visible_at > statement_timestamp()
   AND PLANNED_FOR(:tenant)
    RETURNING *
), failed AS (
    INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker)
    SELECT tenant, id, attempts, :reason::text, :error::text, :worker FROM deleted
     WHERE attempts <= max_attempts
), dead AS (
    INSERT INTO onceward_dead_letters AS old
           (tenant, job_id, key, queue, type, resource_id, payload, payload_hash, order_key,
            reason, error, attempts, max_attempts, actor, request_id, correlation_id, enqueued_at,
            version)
    SELECT tenant, id, key, queue, type, resource_id, payload, payload_hash, order_key,
           :reason, :error, least(attempts, max_attempts), max_attempts, actor, request_id,
           correlation_id, enqueued_at, version
      FROM deleted
        ON CONFLICT (tenant, job_id) DO UPDATE
       SET payload = excluded.payload, payload_hash = excluded.payload_hash,
           reason = excluded.reason, error = excluded.error, attempts = excluded.attempts,
           deaths = old.deaths + 1, died_at = excluded.died_at, requeued_at = NULL,
           request_id = excluded.request_id, correlation_id = excluded.correlation_id,
           enqueued_at = excluded.enqueued_at, version = excluded.version
), audited AS (
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at)
    SELECT tenant, :audit_id::text, actor, 'job.dead ' || queue || ' ' || type, payload_hash, 500,
           key, version, request_id, correlation_id, statement_timestamp()
      FROM deleted
)
SELECT id::text AS job_id FROM deleted;

-- name: save_step
-- Only the worker that holds the lease may record a step.
INSERT INTO onceward_job_steps (tenant, job_id, name, result, attempt)
SELECT tenant, id, :name::text, :result::text, attempts
  FROM onceward_jobs
 WHERE tenant = :tenant AND id = :job_id::uuid AND lease = :lease AND worker = :worker
   AND visible_at > statement_timestamp()
   AND PLANNED_FOR(:tenant)
    ON CONFLICT (tenant, job_id, name) DO NOTHING
RETURNING name;

-- name: steps
SELECT name, result, attempt, extract(epoch FROM finished_at)::float8 AS finished_at
  FROM onceward_job_steps WHERE tenant = :tenant AND job_id = :job_id::uuid
   AND PLANNED_FOR(:tenant)
 ORDER BY finished_at, name;

-- name: failures
SELECT attempt, reason, error, worker, extract(epoch FROM failed_at)::float8 AS failed_at
  FROM onceward_job_failures WHERE tenant = :tenant AND job_id = :job_id::uuid
   AND PLANNED_FOR(:tenant)
 ORDER BY failed_at, seq;

-- name: list_jobs
-- Jobs in any state, by when they ended or, before that, were enqueued; newest first. NULL matches every
-- tenant.
SELECT * FROM (
    SELECT tenant, id::text AS job_id, key, queue, type, resource_id, state, attempts, max_attempts,
           worker, NULL AS reason, NULL AS error, request_id, correlation_id,
           extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
           CASE WHEN isfinite(visible_at) THEN extract(epoch FROM visible_at)::float8 END AS due_at,
           NULL::float8 AS ended_at,
           state = 'running' AND visible_at <= statement_timestamp() AS lease_expired
      FROM onceward_jobs
     WHERE :state::text IN ('', state) AND (:tenant::text IS NULL OR tenant = :tenant)
       AND :queue::text IN ('', queue) AND :type::text IN ('', type)
    UNION ALL
    SELECT * FROM (
        SELECT tenant, job_id::text, key, queue, type, resource_id, 'done', attempts, NULL::integer,
               worker, NULL, NULL, request_id, correlation_id,
               extract(epoch FROM enqueued_at)::float8, NULL::float8,
               extract(epoch FROM completed_at)::float8, false
          FROM onceward_job_completions
         WHERE :state IN ('', 'done') AND (:tenant IS NULL OR tenant = :tenant)
           AND :queue IN ('', queue) AND :type IN ('', type)
         ORDER BY completed_at DESC LIMIT :limit::integer) AS done
    UNION ALL
    SELECT * FROM (
        SELECT tenant, job_id::text, key, queue, type, resource_id, 'dead', attempts, max_attempts,
               NULL, reason, error, request_id, correlation_id,
               extract(epoch FROM enqueued_at)::float8, NULL::float8,
               extract(epoch FROM died_at)::float8, false
          FROM onceward_dead_letters
         WHERE :state IN ('', 'dead') AND requeued_at IS NULL
           AND (:tenant IS NULL OR tenant = :tenant)
           AND :queue IN ('', queue) AND :type IN ('', type)
         ORDER BY died_at DESC LIMIT :limit) AS dead
) AS found
 ORDER BY coalesce(ended_at, enqueued_at) DESC, enqueued_at DESC, job_id LIMIT :limit;

-- name: find_job
-- One job in any state. NULL matches every tenant.
SELECT tenant, id::text AS job_id, key, queue, type, resource_id, state, attempts, max_attempts,
       worker, NULL AS reason, NULL AS error, payload, payload_hash, NULL AS result, merged,
       coalesce_key, order_key, request_id, correlation_id,
       extract(epoch FROM enqueued_at)::float8 AS enqueued_at,
       CASE WHEN isfinite(visible_at) THEN extract(epoch FROM visible_at)::float8 END AS due_at,
       NULL::float8 AS ended_at,
       state = 'running' AND visible_at <= statement_timestamp() AS lease_expired, 1 AS place
  FROM onceward_jobs WHERE id = :job_id::uuid AND (:tenant::text IS NULL OR tenant = :tenant)
UNION ALL
SELECT tenant, job_id::text, key, queue, type, resource_id, 'done', attempts, NULL,
       worker, NULL, NULL, NULL, payload_hash, result, 0,
       NULL, NULL, request_id, correlation_id,
       extract(epoch FROM enqueued_at)::float8, NULL::float8,
       extract(epoch FROM completed_at)::float8, false, 2
  FROM onceward_job_completions WHERE job_id = :job_id::uuid AND (:tenant IS NULL OR tenant = :tenant)
UNION ALL
SELECT tenant, job_id::text, key, queue, type, resource_id, 'dead', attempts, max_attempts,
       NULL, reason, error, payload, payload_hash, NULL, 0,
       NULL, order_key, request_id, correlation_id,
       extract(epoch FROM enqueued_at)::float8, NULL::float8,
       extract(epoch FROM died_at)::float8, false, 3
  FROM onceward_dead_letters WHERE job_id = :job_id::uuid AND (:tenant IS NULL OR tenant = :tenant)
 ORDER BY place LIMIT 1;

-- name: requeue
-- Moves a dead letter back into its queue with all its attempts. The dead letter stays, marked.
SELECT queue
  FROM (SELECT onceward_requeue_job(:tenant::text, :job_id::uuid, :actor::text, :audit_id::text)
               AS queue) AS back
 WHERE queue IS NOT NULL;

-- name: cancel
-- Moves a waiting job to the dead letters. A job that a worker has leased is left alone.
SELECT queue
  FROM (SELECT onceward_cancel_job(:tenant::text, :job_id::uuid, :actor::text, :reason::text,
                                   :audit_id::text) AS queue) AS cancelled
 WHERE queue IS NOT NULL;

-- name: paused_queues
SELECT queue FROM onceward_paused_queues;

-- name: depths
-- The jobs of each queue, and for how long the oldest due one has waited. Reads the whole table.
SELECT queue, state, count(*) AS jobs,
       greatest(0, extract(epoch FROM statement_timestamp() - min(run_at)
                FILTER (WHERE state = 'waiting' AND visible_at <= statement_timestamp())))::float8
         AS oldest_seconds
  FROM onceward_jobs GROUP BY queue, state;

-- name: dead_count
SELECT queue, count(*) AS jobs FROM onceward_dead_letters WHERE requeued_at IS NULL GROUP BY queue;

-- name: queue_depths
-- The same for metrics and the console, which are read every few seconds: of each queue, at most :most
-- waiting, running and dead jobs are counted, and about :budget of all queues.
SELECT queue, waiting, running, dead, oldest_seconds, counted
  FROM onceward_queue_depths(:most::integer, :budget::integer);

-- name: relay_lock
-- One relay publishes at a time; others would only send duplicates. The lock ends with the
-- transaction, so a relay that dies or hangs does not keep it.
SELECT pg_try_advisory_xact_lock(:lock::bigint) AS mine;

-- name: to_publish
-- For the relay: due jobs that are not published, or were published and not leased for some time.
SELECT tenant, job_id::text AS job_id, queue, seq, published
  FROM onceward_jobs_to_publish(:queues::text[], :front::integer, :again_after_seconds::float8)
 ORDER BY visible_at LIMIT :limit::integer;

-- name: mark_published
-- Rows that another transaction has locked are skipped: publishing them once more does no harm.
SELECT onceward_mark_published(:tenants::text::text[], :ids::text::uuid[], :seqs::text::bigint[],
                               :published::text::integer[]);

-- name: reset_published
-- The broker has lost all messages: published jobs are published again, with the next message id.
SELECT onceward_reset_published() AS jobs;

-- name: unpublish
-- The messages about these jobs are acknowledged without running them: they are published again.
SELECT tenant, job_id::text AS job_id
  FROM onceward_unpublish_jobs(:tenants::text::text[], :ids::text::uuid[]);

-- name: overdue
-- Jobs of one queue that have been due for so many seconds. Locks nothing: claim_these decides.
SELECT tenant, id::text AS job_id,
       extract(epoch FROM statement_timestamp() - visible_at)::float8 AS overdue_seconds
  FROM onceward_jobs
 WHERE queue = :queue::text
   AND visible_at <= statement_timestamp() - make_interval(secs => :seconds::float8)
 ORDER BY visible_at LIMIT :limit::integer;

-- name: publish_due_in
SELECT extract(epoch FROM onceward_next_visible(:queues::text[], statement_timestamp())
                          - statement_timestamp())::float8 AS seconds;

-- name: now
SELECT extract(epoch FROM statement_timestamp())::float8 AS now;

-- name: clean_completions
-- A key counts as completed until its marker is deleted here.
SELECT onceward_clean_jobs(
           'completions', statement_timestamp() - make_interval(secs => :older_than_seconds::float8),
           :limit::integer) AS deleted;

-- name: clean_dead_letters
-- Only requeued ones: an operator decides about the others.
SELECT onceward_clean_jobs(
           'dead_letters', statement_timestamp() - make_interval(secs => :older_than_seconds::float8),
           :limit::integer) AS deleted;

-- name: clean_steps
SELECT onceward_clean_jobs(
           'steps', statement_timestamp() - make_interval(secs => :older_than_seconds::float8),
           :limit::integer) AS deleted;

-- name: clean_failures
SELECT onceward_clean_jobs(
           'failures', statement_timestamp() - make_interval(secs => :older_than_seconds::float8),
           :limit::integer) AS deleted;

-- name: clean_causes
SELECT onceward_clean_jobs(
           'causes', statement_timestamp() - make_interval(secs => :older_than_seconds::float8),
           :limit::integer) AS deleted;
