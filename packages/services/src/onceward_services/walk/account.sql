-- Statements of the walker's account: the energy ledger, everything in one read, deletion.

-- name: ledger_page
-- Newest first, with the balance of the same instant. The page is selected before the join, so that
-- the rest of the ledger is not read.
SELECT w.energy_balance, e.seq, e.delta, e.reason, e.reference, e.balance_after, e.created_at
  FROM walkers w
  LEFT JOIN (
       SELECT seq, delta, reason, reference, balance_after, created_at
         FROM energy_ledger
        WHERE tenant = :tenant AND seq < :before
        ORDER BY seq DESC
        LIMIT :limit) e ON TRUE
 WHERE w.tenant = :tenant
 ORDER BY e.seq DESC;

-- name: snapshot
-- Everything a device shows, in one statement and therefore of one instant: the walker with the
-- streak of the last attested day, the allocations, the quests, and the events after a number.
SELECT 'walker' AS what, w.event_seq AS seq, s.tz AS id, d.day AS name, w.points_banked AS points,
       w.energy_balance AS energy, s.total_lifetime_steps AS steps, d.streak_length AS length,
       d.streak_tier AS tier, w.updated_at AS at, CAST(NULL AS timestamptz) AS due_at,
       CAST(NULL AS text) AS data, w.energy_held AS held, w.energy_debt AS debt,
       w.points_provisional AS unsettled_points,
       (SELECT CAST(coalesce(sum(CASE WHEN p.provisional_energy > p.credited_energy
                                      THEN p.provisional_energy - p.credited_energy
                                      ELSE 0 END), 0) AS bigint)
          FROM step_logs p
         WHERE p.tenant = :tenant AND p.status <> 'ACCEPTED' AND p.status = 'PENDING')
           AS promised
  FROM walkers w
  LEFT JOIN streak_states s ON s.tenant = w.tenant
  LEFT JOIN step_logs d ON d.tenant = w.tenant AND d.day = s.last_attested_date
 WHERE w.tenant = :tenant
 UNION ALL
SELECT 'allocation', seq, node_id, kind, points_cost, energy_cost,
       CASE WHEN provisional THEN 1 ELSE 0 END, NULL, NULL, allocated_at, refund_due_at, NULL,
       NULL, NULL, NULL, NULL
  FROM tree_allocations
 WHERE tenant = :tenant
 UNION ALL
SELECT 'quest', NULL, quest_id, status, points_awarded, NULL, steps_done, NULL, NULL, NULL, NULL,
       unsettled, NULL, NULL, NULL, NULL
  FROM quest_progress
 WHERE tenant = :tenant
 UNION ALL
SELECT 'event', seq, NULL, type, NULL, NULL, NULL, NULL, NULL, created_at, NULL, data, NULL, NULL,
       NULL, NULL
  FROM (
       SELECT seq, type, created_at, data
         FROM walker_events
        WHERE tenant = :tenant AND seq > :after
        ORDER BY seq
        LIMIT :limit) AS e;

-- name: mark_deleting
-- The first request counts. The walker is locked.
UPDATE walkers SET deleting_at = :now WHERE tenant = :tenant AND deleting_at IS NULL;

-- name: is_deleting
SELECT 1 AS found FROM walkers WHERE tenant = :tenant AND deleting_at IS NOT NULL;

-- name: delete_job_failures
-- Failures, steps and causes have no queue: they are found by the jobs, before those are deleted.
-- Markers of completed jobs are kept for a week, so one walker has few.
DELETE FROM onceward_job_failures
 WHERE tenant = :tenant AND job_id IN (
       SELECT job_id FROM onceward_job_completions WHERE tenant = :tenant AND queue = :queue
        UNION ALL
       SELECT job_id FROM onceward_dead_letters WHERE tenant = :tenant AND queue = :queue
        UNION ALL
       SELECT id FROM onceward_jobs WHERE tenant = :tenant AND queue = :queue);

-- name: delete_job_steps
DELETE FROM onceward_job_steps
 WHERE tenant = :tenant AND job_id IN (
       SELECT job_id FROM onceward_job_completions WHERE tenant = :tenant AND queue = :queue
        UNION ALL
       SELECT job_id FROM onceward_dead_letters WHERE tenant = :tenant AND queue = :queue
        UNION ALL
       SELECT id FROM onceward_jobs WHERE tenant = :tenant AND queue = :queue);

-- name: delete_job_causes
DELETE FROM onceward_job_causes
 WHERE tenant = :tenant AND job_id IN (
       SELECT job_id FROM onceward_job_completions WHERE tenant = :tenant AND queue = :queue
        UNION ALL
       SELECT job_id FROM onceward_dead_letters WHERE tenant = :tenant AND queue = :queue
        UNION ALL
       SELECT id FROM onceward_jobs WHERE tenant = :tenant AND queue = :queue);

-- name: delete_job_markers
DELETE FROM onceward_job_completions WHERE tenant = :tenant AND queue = :queue;

-- name: delete_dead_letters
DELETE FROM onceward_dead_letters WHERE tenant = :tenant AND queue = :queue;

-- name: delete_waiting_jobs
-- Jobs of the walker in the queue of walk: without its row a running job cannot commit.
DELETE FROM onceward_jobs WHERE tenant = :tenant AND queue = :queue;

-- name: delete_records
-- One batch of the walker's stored responses. Other services use the same tenant.
DELETE FROM onceward_idempotency_records
 WHERE tenant = :tenant AND (endpoint, idempotency_key) IN (
       SELECT endpoint, idempotency_key
         FROM onceward_idempotency_records
        WHERE tenant = :tenant AND (endpoint LIKE 'tree.%' OR endpoint LIKE 'quest.%'
              OR endpoint LIKE 'step.%' OR endpoint LIKE 'energy.%' OR endpoint LIKE 'walker.%')
        LIMIT :limit)
RETURNING 1 AS deleted;

-- name: delete_walker
-- Last of all. A walker who acts again is a new one.
DELETE FROM walkers WHERE tenant = :tenant AND deleting_at IS NOT NULL;
