-- Energy that is spent before its day is settled, and what a rejected day takes back.

-- energy_held is the sum of energy_holds; energy_debt is what was taken back after it had been spent,
-- and is paid with the next credits; points_provisional are points of quests completed on unsettled
-- days. settle_due_at is when the next job looks at what is provisional.
ALTER TABLE walkers ADD COLUMN energy_held INTEGER NOT NULL DEFAULT 0;
ALTER TABLE walkers ADD COLUMN energy_debt INTEGER NOT NULL DEFAULT 0;
ALTER TABLE walkers ADD COLUMN points_provisional INTEGER NOT NULL DEFAULT 0;
ALTER TABLE walkers ADD COLUMN first_action_at TEXT;
ALTER TABLE walkers ADD COLUMN settle_due_at TEXT;
UPDATE walkers SET first_action_at = created_at;

-- A balance below zero becomes a debt, with an entry that brings the sum to zero.
INSERT INTO energy_ledger (tenant, seq, delta, reason, reference, balance_after, created_at)
SELECT tenant, ledger_seq + 1, -energy_balance, 'debt', 'upgrade', 0, updated_at
  FROM walkers
 WHERE energy_balance < 0;
UPDATE walkers
   SET energy_debt = -energy_balance, energy_balance = 0, ledger_seq = ledger_seq + 1
 WHERE energy_balance < 0;

-- When the walker acted, the reason of a scheduled refund, and the rejected day that caused it.
ALTER TABLE tree_allocations ADD COLUMN generated_at TEXT;
ALTER TABLE tree_allocations ADD COLUMN refund_reason TEXT;
ALTER TABLE tree_allocations ADD COLUMN rejected_day TEXT;
UPDATE tree_allocations SET generated_at = allocated_at;

-- Energy spent against the provisional credit of open days. It becomes a ledger entry when a settled
-- day pays for it, and is deleted when it is refunded.
CREATE TABLE energy_holds (
    tenant        TEXT NOT NULL,
    seq           INTEGER NOT NULL,
    reason        TEXT NOT NULL,
    reference     TEXT NOT NULL,
    amount        INTEGER NOT NULL CHECK (amount > 0),
    refund_due_at TEXT,
    created_at    TEXT NOT NULL,
    PRIMARY KEY (tenant, reason, reference)
) WITHOUT ROWID;

-- unsettled is JSON: when the steps and the completion were made whose days are not settled yet; empty
-- if all are.
ALTER TABLE quest_progress ADD COLUMN unsettled TEXT NOT NULL DEFAULT '';
ALTER TABLE quest_progress ADD COLUMN revert_due_at TEXT;
ALTER TABLE quest_progress ADD COLUMN rejected_day TEXT;

-- The energy that a day's newest report promises, and a request to read the day again: its id, when
-- it is due, and the number of the report that responded to it.
ALTER TABLE step_logs ADD COLUMN provisional_energy INTEGER NOT NULL DEFAULT 0;
ALTER TABLE step_logs ADD COLUMN challenge_id TEXT;
ALTER TABLE step_logs ADD COLUMN challenge_due_at TEXT;
ALTER TABLE step_logs ADD COLUMN reread_number INTEGER;
ALTER TABLE step_reports ADD COLUMN sample_digest TEXT;
