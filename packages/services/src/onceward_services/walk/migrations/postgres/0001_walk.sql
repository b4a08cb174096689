-- The tenant is the walker. It is the first column of every key and index, so no query can reach
-- another walker's rows.

-- One row per walker. Its lock serializes the walker's actions. The three counters number the
-- walker's allocations, ledger entries and events without gaps.
CREATE TABLE walkers (
    tenant         text NOT NULL PRIMARY KEY,
    points_banked  integer NOT NULL CHECK (points_banked >= 0),
    energy_balance bigint NOT NULL,
    allocation_seq bigint NOT NULL,
    ledger_seq     bigint NOT NULL,
    event_seq      bigint NOT NULL,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL
);

-- A walker's nodes, each once. The costs are those that were paid, so a refund returns the same.
CREATE TABLE tree_allocations (
    tenant        text NOT NULL,
    node_id       text NOT NULL,
    seq           bigint NOT NULL,
    kind          text NOT NULL CHECK (kind IN ('node', 'keystone')),
    points_cost   integer NOT NULL CHECK (points_cost >= 0),
    energy_cost   bigint NOT NULL CHECK (energy_cost >= 0),
    provisional   boolean NOT NULL,
    allocated_at  timestamptz NOT NULL,
    refund_due_at timestamptz,
    PRIMARY KEY (tenant, node_id)
);

-- Refunded allocations. In a separate table, so that a long history does not slow queries down.
CREATE TABLE tree_refunds (
    tenant       text NOT NULL,
    seq          bigint NOT NULL,
    node_id      text NOT NULL,
    points_cost  integer NOT NULL,
    energy_cost  bigint NOT NULL,
    allocated_at timestamptz NOT NULL,
    reason       text NOT NULL,
    refunded_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant, seq)
);

CREATE TABLE quest_progress (
    tenant         text NOT NULL,
    quest_id       text NOT NULL,
    status         text NOT NULL CHECK (status IN ('in_progress', 'completed')),
    steps_done     integer NOT NULL CHECK (steps_done >= 0),
    points_awarded integer NOT NULL CHECK (points_awarded >= 0),
    started_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    completed_at   timestamptz,
    PRIMARY KEY (tenant, quest_id)
);

-- Credits and debits of energy. The sum of delta is always the walker's energy_balance.
CREATE TABLE energy_ledger (
    tenant        text NOT NULL,
    seq           bigint NOT NULL,
    delta         bigint NOT NULL,
    reason        text NOT NULL,
    reference     text NOT NULL,
    balance_after bigint NOT NULL,
    created_at    timestamptz NOT NULL,
    PRIMARY KEY (tenant, seq)
);

-- An entry with the same reason and reference is booked once.
CREATE UNIQUE INDEX idx_energy_ledger_reference ON energy_ledger (tenant, reason, reference);

-- Events for the walker's devices. Data is JSON.
CREATE TABLE walker_events (
    tenant     text NOT NULL,
    seq        bigint NOT NULL,
    type       text NOT NULL,
    data       text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, seq)
);
