-- name: lock_walker
-- The update changes only updated_at. On PostgreSQL it locks the row, so that a walker's actions run
-- one after another until their commits, and returns it as the previous one left it. On SQLite the
-- first statement of a transaction takes the write lock. A plain update, because waiters for a row
-- are served in order of arrival; with ON CONFLICT all of them wake up at once.
UPDATE walkers SET updated_at = :now WHERE tenant = :tenant
RETURNING points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, deleting_at,
          suspended_at;

-- name: create_walker
-- For a walker without a row. If another transaction has created it meanwhile, this locks that row.
INSERT INTO walkers (tenant, points_banked, energy_balance, allocation_seq, ledger_seq, event_seq,
                     created_at, updated_at)
VALUES (:tenant, 0, 0, 0, 0, 0, :now, :now)
    ON CONFLICT (tenant) DO UPDATE SET updated_at = excluded.updated_at
RETURNING points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, deleting_at,
          suspended_at;

-- name: update_walker
-- The only statement that changes a walker's balances and counters. The row is locked already.
UPDATE walkers
   SET points_banked  = points_banked + :points,
       energy_balance = energy_balance + :energy,
       allocation_seq = allocation_seq + :allocations,
       ledger_seq     = ledger_seq + :entries,
       event_seq      = event_seq + :events,
       updated_at     = :now
 WHERE tenant = :tenant
RETURNING points_banked, energy_balance, allocation_seq, ledger_seq, event_seq, deleting_at,
          suspended_at;

-- name: profile
-- The last attested day has the streak as of the end of that day.
SELECT w.points_banked, w.energy_balance, w.event_seq, s.tz, s.total_lifetime_steps,
       d.day, d.streak_length, d.streak_tier
  FROM walkers w
  LEFT JOIN streak_states s ON s.tenant = w.tenant
  LEFT JOIN step_logs d ON d.tenant = w.tenant AND d.day = s.last_attested_date
 WHERE w.tenant = :tenant;

-- name: find_entry
-- The balance, and whether this entry was booked before.
SELECT w.energy_balance, e.seq
  FROM walkers w
  LEFT JOIN energy_ledger e
    ON e.tenant = w.tenant AND e.reason = :reason AND e.reference = :reference
 WHERE w.tenant = :tenant;

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
SELECT seq, node_id, kind, points_cost, energy_cost, provisional, allocated_at, refund_due_at
  FROM tree_allocations
 WHERE tenant = :tenant
 ORDER BY seq;

-- name: tree_state
-- Points and allocations in one statement, so that they are consistent.
SELECT w.points_banked, w.energy_balance,
       a.seq, a.node_id, a.kind, a.points_cost, a.energy_cost, a.provisional, a.allocated_at,
       a.refund_due_at
  FROM walkers w
  LEFT JOIN tree_allocations a ON a.tenant = w.tenant
 WHERE w.tenant = :tenant
 ORDER BY a.seq;

-- name: add_allocation
INSERT INTO tree_allocations (tenant, node_id, seq, kind, points_cost, energy_cost, provisional,
                              allocated_at, refund_due_at)
VALUES (:tenant, :node_id, :seq, :kind, :points_cost, :energy_cost, :provisional,
        :allocated_at, :refund_due_at);

-- name: confirm_allocation
UPDATE tree_allocations
   SET provisional = FALSE, refund_due_at = NULL
 WHERE tenant = :tenant AND node_id = :node_id AND provisional;

-- name: schedule_refund
UPDATE tree_allocations
   SET provisional = TRUE, refund_due_at = :due_at
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
SELECT 'quest' AS what, quest_id AS id, status, steps_done, points_awarded
  FROM quest_progress
 WHERE tenant = :tenant
 UNION ALL
SELECT 'node', node_id, '', 0, 0
  FROM tree_allocations
 WHERE tenant = :tenant;

-- name: start_quest
INSERT INTO quest_progress (tenant, quest_id, status, steps_done, points_awarded,
                            started_at, updated_at)
VALUES (:tenant, :quest_id, 'in_progress', 0, 0, :now, :now);

-- name: advance_quest
UPDATE quest_progress
   SET steps_done = :steps_done, updated_at = :now
 WHERE tenant = :tenant AND quest_id = :quest_id AND status = 'in_progress';

-- name: complete_quest
-- Points are awarded only if this updates a row, which happens once.
UPDATE quest_progress
   SET status = 'completed', points_awarded = :points, updated_at = :now, completed_at = :now
 WHERE tenant = :tenant AND quest_id = :quest_id AND status = 'in_progress';
