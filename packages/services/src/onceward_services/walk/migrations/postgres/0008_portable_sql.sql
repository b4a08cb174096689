-- The collation of the tenant in all other tables: a database that is distributed by tenant needs one.
-- Rebuilds the indexes of these tables, which are locked meanwhile.
ALTER TABLE walkers ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE tree_allocations ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE tree_refunds ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE quest_progress ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE energy_ledger ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE walker_events ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE step_logs ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE step_reports ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE attestation_logs ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE streak_states ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE walk_reviews ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE energy_holds ALTER COLUMN tenant TYPE text COLLATE "C";
ALTER TABLE walker_devices ALTER COLUMN tenant TYPE text COLLATE "C";

-- A unique index of a distributed table contains the tenant. The ids of reviews are random; that a
-- device has one owner is ensured by a lock, see the query lock_device.
DROP INDEX idx_walk_reviews_id;
CREATE INDEX idx_walk_reviews_id ON walk_reviews (id);
DROP INDEX idx_walker_devices_id;
CREATE INDEX idx_walker_devices_id ON walker_devices (id);
