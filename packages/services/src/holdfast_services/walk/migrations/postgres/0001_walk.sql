-- The tenant is the walker. It comes first in every key and index, so no look-up can reach another
-- walker's rows.

-- One row per walker, and the lock that puts a walker's actions in line. The three counters number
-- the walker's allocations, ledger entries and events without a gap.
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

-- What a walker has, each node once. The costs are what was taken, so that is what a refund returns.
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

-- What a walker had and was given the points back for. In a table of its own, so that a long history
-- slows nothing down.
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

-- What came and went. The sum of delta is the walker's energy_balance, always.
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

-- The same thing is booked once, however often it is asked for.
CREATE UNIQUE INDEX idx_energy_ledger_reference ON energy_ledger (tenant, reason, reference);

-- What the walker's devices are told. Data is JSON.
CREATE TABLE walker_events (
    tenant     text NOT NULL,
    seq        bigint NOT NULL,
    type       text NOT NULL,
    data       text NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, seq)
);
