-- name: lock_walker
-- The update changes updated_at and, for the first action, its time. On PostgreSQL it locks the row, so that a walker's actions run
-- one after another until their commits, and returns it as the previous one left it. On SQLite the
-- first statement of a transaction takes the write lock. A plain update, because waiters for a row
-- are served in order of arrival; with ON CONFLICT all of them wake up at once.
UPDATE walkers
   SET updated_at = :now,
       first_action_at = CASE WHEN first_action_at IS NULL OR :acted_at < first_action_at
                              THEN coalesce(:acted_at, first_action_at) ELSE first_action_at END
 WHERE tenant = :tenant
RETURNING points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, energy_held,
          energy_debt, points_provisional, first_action_at, settle_due_at, deleting_at,
          suspended_at;

-- name: find_walker
SELECT points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, energy_held,
       energy_debt, points_provisional, first_action_at, settle_due_at, deleting_at,
       suspended_at
  FROM walkers
 WHERE tenant = :tenant;

-- name: create_walker
-- For a walker without a row. If another transaction has created it meanwhile, this locks that row.
INSERT INTO walkers (tenant, points_banked, energy_balance, allocation_seq, ledger_seq, event_seq,
                     first_action_at, created_at, updated_at)
VALUES (:tenant, 0, 0, 0, 0, 0, :acted_at, :now, :now)
    ON CONFLICT (tenant) DO UPDATE SET updated_at = excluded.updated_at
RETURNING points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, energy_held,
          energy_debt, points_provisional, first_action_at, settle_due_at, deleting_at,
          suspended_at;

-- name: update_walker
-- The only statement that changes a walker's balances and counters. The row is locked already. It
-- changes nothing if the energy would be below zero.
UPDATE walkers
   SET points_banked  = points_banked + :points,
       energy_balance = energy_balance + :energy,
       allocation_seq = allocation_seq + :allocations,
       ledger_seq     = ledger_seq + :entries,
       event_seq      = event_seq + :events,
       energy_held    = energy_held + :held,
       energy_debt    = energy_debt + :debt,
       points_provisional = points_provisional + :provisional_points,
       updated_at     = :now
 WHERE tenant = :tenant AND energy_balance + :energy >= 0
RETURNING points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, energy_held,
          energy_debt, points_provisional, first_action_at, settle_due_at, deleting_at,
          suspended_at;

-- name: save_settle_due
UPDATE walkers SET settle_due_at = :due_at WHERE tenant = :tenant;

-- name: profile
-- The last attested day has the streak as of the end of that day.
SELECT w.points_banked, w.energy_balance, w.event_seq, s.tz, s.total_lifetime_steps,
       d.day, d.streak_length, d.streak_tier, w.energy_held, w.energy_debt, w.points_provisional,
       (SELECT CAST(coalesce(sum(CASE WHEN p.provisional_energy > p.credited_energy
                                      THEN p.provisional_energy - p.credited_energy
                                      ELSE 0 END), 0) AS bigint)
          FROM step_logs p
         WHERE p.tenant = :tenant AND p.status <> 'ACCEPTED' AND p.status = 'PENDING')
           AS provisional_energy
  FROM walkers w
  LEFT JOIN streak_states s ON s.tenant = w.tenant
  LEFT JOIN step_logs d ON d.tenant = w.tenant AND d.day = s.last_attested_date
 WHERE w.tenant = :tenant;

-- name: find_entry
-- The balance, the provisional credit of pending days, and whether this entry was booked or held
-- before. The first condition on the status repeats that of the partial index, so that it is used.
SELECT w.energy_balance, w.energy_held, w.energy_debt, e.seq, h.seq AS hold_seq,
       (SELECT CAST(coalesce(sum(CASE WHEN d.provisional_energy > d.credited_energy
                                      THEN d.provisional_energy - d.credited_energy
                                      ELSE 0 END), 0) AS bigint)
          FROM step_logs d
         WHERE d.tenant = :tenant AND d.status <> 'ACCEPTED' AND d.status = 'PENDING')
           AS provisional_energy
  FROM walkers w
  LEFT JOIN energy_ledger e
    ON e.tenant = w.tenant AND e.reason = :reason AND e.reference = :reference
  LEFT JOIN energy_holds h
    ON h.tenant = w.tenant AND h.reason = :reason AND h.reference = :reference
 WHERE w.tenant = :tenant;

-- name: add_hold
-- The walker is locked, so numbers follow the order of the actions.
INSERT INTO energy_holds (tenant, seq, reason, reference, amount, created_at)
SELECT :tenant, coalesce(max(seq), 0) + 1, :reason, :reference, :amount, :now
  FROM energy_holds
 WHERE tenant = :tenant;

-- name: list_holds
SELECT seq, reason, reference, amount, refund_due_at
  FROM energy_holds
 WHERE tenant = :tenant
 ORDER BY seq;

-- name: remove_hold
DELETE FROM energy_holds
 WHERE tenant = :tenant AND reason = :reason AND reference = :reference
RETURNING amount;

-- name: schedule_hold_refund
UPDATE energy_holds SET refund_due_at = :due_at
 WHERE tenant = :tenant AND reason = :reason AND reference = :reference;

-- name: add_entry
INSERT INTO energy_ledger (tenant, seq, delta, reason, reference, balance_after, created_at)
VALUES (:tenant, :seq, :delta, :reason, :reference, :balance_after, :now);

-- name: add_event
INSERT INTO walker_events (tenant, seq, type, data, created_at)
VALUES (:tenant, :seq, :type, :data, :now);

-- name: list_events
SELECT seq, type, data, created_at
  FROM walker_events
 WHERE tenant = :tenant AND seq > :after
 ORDER BY seq
 LIMIT :limit;

-- name: allocations
SELECT seq, node_id, kind, points_cost, energy_cost, provisional, allocated_at, refund_due_at,
       generated_at, refund_reason, rejected_day
  FROM tree_allocations
 WHERE tenant = :tenant
 ORDER BY seq;

-- name: tree_state
-- Points and allocations in one statement, so that they are consistent.
SELECT w.points_banked, w.energy_balance, w.energy_held, w.energy_debt,
       (SELECT CAST(coalesce(sum(CASE WHEN p.provisional_energy > p.credited_energy
                                      THEN p.provisional_energy - p.credited_energy
                                      ELSE 0 END), 0) AS bigint)
          FROM step_logs p
         WHERE p.tenant = :tenant AND p.status <> 'ACCEPTED' AND p.status = 'PENDING')
           AS promised_energy,
       a.seq, a.node_id, a.kind, a.points_cost, a.energy_cost, a.provisional, a.allocated_at,
       a.refund_due_at, a.generated_at, a.refund_reason, a.rejected_day
  FROM walkers w
  LEFT JOIN tree_allocations a ON a.tenant = w.tenant
 WHERE w.tenant = :tenant
 ORDER BY a.seq;

-- name: add_allocation
INSERT INTO tree_allocations (tenant, node_id, seq, kind, points_cost, energy_cost, provisional,
                              allocated_at, refund_due_at, generated_at, refund_reason,
                              rejected_day)
VALUES (:tenant, :node_id, :seq, :kind, :points_cost, :energy_cost, :provisional,
        :allocated_at, :refund_due_at, :generated_at, :refund_reason, :rejected_day);

-- name: confirm_allocation
UPDATE tree_allocations
   SET provisional = FALSE, refund_due_at = NULL, refund_reason = NULL, rejected_day = NULL
 WHERE tenant = :tenant AND node_id = :node_id AND provisional;

-- name: schedule_refund
UPDATE tree_allocations
   SET provisional = TRUE, refund_due_at = :due_at, refund_reason = :reason,
       rejected_day = :rejected_day
 WHERE tenant = :tenant AND node_id = :node_id;

-- name: cancel_refund
UPDATE tree_allocations
   SET refund_due_at = NULL, refund_reason = NULL, rejected_day = NULL
 WHERE tenant = :tenant AND node_id = :node_id;

-- name: remove_allocation
DELETE FROM tree_allocations
 WHERE tenant = :tenant AND node_id = :node_id;

-- name: add_refund
INSERT INTO tree_refunds (tenant, seq, node_id, points_cost, energy_cost, allocated_at, reason,
                          refunded_at)
VALUES (:tenant, :seq, :node_id, :points_cost, :energy_cost, :allocated_at, :reason, :now);

-- name: quest_board
-- Progress and keystones in one statement, so that they are consistent.
SELECT 'quest' AS what, quest_id AS id, status, steps_done, points_awarded, unsettled
  FROM quest_progress
 WHERE tenant = :tenant
 UNION ALL
SELECT 'node', node_id, '', 0, 0, ''
  FROM tree_allocations
 WHERE tenant = :tenant;

-- name: start_quest
INSERT INTO quest_progress (tenant, quest_id, status, steps_done, points_awarded,
                            started_at, updated_at)
VALUES (:tenant, :quest_id, 'in_progress', 0, 0, :now, :now);

-- name: advance_quest
UPDATE quest_progress
   SET steps_done = :steps_done, unsettled = :unsettled, updated_at = :now
 WHERE tenant = :tenant AND quest_id = :quest_id AND status = 'in_progress';

-- name: complete_quest
-- Points are awarded only if this updates a row, which happens once.
UPDATE quest_progress
   SET status = 'completed', points_awarded = :points, unsettled = :unsettled, updated_at = :now,
       completed_at = :now
 WHERE tenant = :tenant AND quest_id = :quest_id AND status = 'in_progress';

-- name: unsettled_quests
-- A walker has a row for each quest of the catalogue at most.
SELECT quest_id, status, steps_done, points_awarded, unsettled, revert_due_at, rejected_day
  FROM quest_progress
 WHERE tenant = :tenant AND unsettled <> ''
 ORDER BY quest_id;

-- name: save_unsettled
UPDATE quest_progress
   SET unsettled = :unsettled, revert_due_at = :revert_due_at, rejected_day = :rejected_day
 WHERE tenant = :tenant AND quest_id = :quest_id;

-- name: revert_quest
UPDATE quest_progress
   SET status = 'in_progress', steps_done = :steps_done, points_awarded = 0,
       unsettled = :unsettled, revert_due_at = NULL, rejected_day = NULL, updated_at = :now,
       completed_at = NULL
 WHERE tenant = :tenant AND quest_id = :quest_id;
