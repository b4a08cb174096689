-- The tenant is the walker. It comes first in every key and index, so no look-up can reach another
-- walker's rows.

-- One row per walker, and the lock that puts a walker's actions in line. The three counters number
-- the walker's allocations, ledger entries and events without a gap.
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

-- What a walker has, each node once. The costs are what was taken, so that is what a refund returns.
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

-- What a walker had and was given the points back for. In a table of its own, so that a long history
-- slows nothing down.
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

-- What came and went. The sum of delta is the walker's energy_balance, always.
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

-- The same thing is booked once, however often it is asked for.
CREATE UNIQUE INDEX idx_energy_ledger_reference ON energy_ledger (tenant, reason, reference);

-- What the walker's devices are told. Data is JSON.
CREATE TABLE walker_events (
    tenant     TEXT NOT NULL,
    seq        INTEGER NOT NULL,
    type       TEXT NOT NULL,
    data       TEXT NOT NULL,
    created_at TEXT NOT NULL,
    PRIMARY KEY (tenant, seq)
) WITHOUT ROWID;
