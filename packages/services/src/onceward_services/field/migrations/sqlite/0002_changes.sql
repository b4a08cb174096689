-- When the user acted, as the device says; null for documents made before this column existed.
ALTER TABLE field_items ADD COLUMN occurred_at TEXT;

-- Pages of changes of all kinds, by number.
CREATE UNIQUE INDEX idx_field_items_changes ON field_items (tenant, seq);

-- The epoch of the database at the last change, as a digest, and the branch of the user's history.
-- A write that finds another epoch starts a branch: changes after its start may have been lost by a
-- restore or a failover, and their numbers are used again.
ALTER TABLE field_counters ADD COLUMN epoch TEXT NOT NULL DEFAULT '';
ALTER TABLE field_counters ADD COLUMN branch TEXT NOT NULL DEFAULT '0';

-- The branches of each user's history. "start" is the last number that a branch shares with the one
-- before.
CREATE TABLE field_branches (
    tenant TEXT    NOT NULL,
    start  INTEGER NOT NULL,
    branch TEXT    NOT NULL,
    PRIMARY KEY (tenant, start)
) WITHOUT ROWID;
