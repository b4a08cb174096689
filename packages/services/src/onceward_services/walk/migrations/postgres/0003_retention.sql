-- Old rows are found by their time, so that deleting them reads nothing else.
CREATE INDEX idx_walker_events_age ON walker_events (created_at);
CREATE INDEX idx_tree_refunds_age ON tree_refunds (refunded_at);
CREATE INDEX idx_energy_ledger_age ON energy_ledger (created_at);
