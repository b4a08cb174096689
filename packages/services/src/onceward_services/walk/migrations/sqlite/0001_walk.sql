-- The tenant is the walker. It is the first column of every key and index, so no query can reach
-- another walker's rows.

-- One row per walker. Its lock serializes the walker's actions. The three counters number the
-- walker's allocations, ledger entries and events without gaps.
CREATE TABLE walkers (
    tenant         TEXT NOT NULL PRIMARY KEY,
    points_banked  INTEGER NOT NULL CHECK (points_banked >= 0),
    energy_balance INTEGER NOT NULL,
    allocation_seq INTEGER NOT NULL,
    ledger_seq     INTEGER NOT NULL,
    event_seq      INTEGER NOT NULL,
    created_at     TEXT NOT NULL,
    updated_at     TEXT NOT NULL
) WITHOUT ROWID;

-- A walker's nodes, each once. The costs are those that were paid, so a refund returns the same.
CREATE TABLE tree_allocations (
    tenant        TEXT NOT NULL,
    node_id       TEXT NOT NULL,
    seq           INTEGER NOT NULL,
    kind          TEXT NOT NULL CHECK (kind IN ('node', 'keystone')),
    points_cost   INTEGER NOT NULL CHECK (points_cost >= 0),
    energy_cost   INTEGER NOT NULL CHECK (energy_cost >= 0),
    provisional   INTEGER NOT NULL CHECK (provisional IN (0, 1)),
    allocated_at  TEXT NOT NULL,
    refund_due_at TEXT,
    PRIMARY KEY (tenant, node_id)
) WITHOUT ROWID;

-- Refunded allocations. In a separate table, so that a long history does not slow queries down.
CREATE TABLE tree_refunds (
    tenant       TEXT NOT NULL,
    seq          INTEGER NOT NULL,
    node_id      TEXT NOT NULL,
    points_cost  INTEGER NOT NULL,
    energy_cost  INTEGER NOT NULL,
    allocated_at TEXT NOT NULL,
    reason       TEXT NOT NULL,
    refunded_at  TEXT NOT NULL,
    PRIMARY KEY (tenant, seq)
) WITHOUT ROWID;

CREATE TABLE quest_progress (
    tenant         TEXT NOT NULL,
    quest_id       TEXT NOT NULL,
    status         TEXT NOT NULL CHECK (status IN ('in_progress', 'completed')),
    steps_done     INTEGER NOT NULL CHECK (steps_done >= 0),
    points_awarded INTEGER NOT NULL CHECK (points_awarded >= 0),
    started_at     TEXT NOT NULL,
    updated_at     TEXT NOT NULL,
    completed_at   TEXT,
    PRIMARY KEY (tenant, quest_id)
) WITHOUT ROWID;

-- Credits and debits of energy. The sum of delta is always the walker's energy_balance.
CREATE TABLE energy_ledger (
    tenant        TEXT NOT NULL,
    seq           INTEGER NOT NULL,
    delta         INTEGER NOT NULL,
    reason        TEXT NOT NULL,
    reference     TEXT NOT NULL,
    balance_after INTEGER NOT NULL,
    created_at    TEXT NOT NULL,
    PRIMARY KEY (tenant, seq)
) WITHOUT ROWID;

-- An entry with the same reason and reference is booked once.
CREATE UNIQUE INDEX idx_energy_ledger_reference ON energy_ledger (tenant, reason, reference);

-- Events for the walker's devices. Data is JSON.
CREATE TABLE walker_events (
    tenant     TEXT NOT NULL,
    seq        INTEGER NOT NULL,
    type       TEXT NOT NULL,
    data       TEXT NOT NULL,
    created_at TEXT NOT NULL,
    PRIMARY KEY (tenant, seq)
) WITHOUT ROWID;
