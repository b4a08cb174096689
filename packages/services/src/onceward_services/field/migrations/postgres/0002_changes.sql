-- When the user acted, as the device says; null for documents made before this column existed.
ALTER TABLE field_items ADD COLUMN occurred_at timestamptz;

-- Pages of changes of all kinds, by number.
CREATE UNIQUE INDEX idx_field_items_changes ON field_items (tenant, seq);

-- The epoch of the database at the last change, as a digest, and the branch of the user's history.
-- A write that finds another epoch starts a branch: changes after its start may have been lost by a
-- restore or a failover, and their numbers are used again.
ALTER TABLE field_counters ADD COLUMN epoch text COLLATE "C" NOT NULL DEFAULT '';
ALTER TABLE field_counters ADD COLUMN branch text COLLATE "C" NOT NULL DEFAULT '0';

-- The branches of each user's history. "start" is the last number that a branch shares with the one
-- before.
CREATE TABLE field_branches (
    tenant text   COLLATE "C" NOT NULL,
    start  bigint NOT NULL,
    branch text   COLLATE "C" NOT NULL,
    PRIMARY KEY (tenant, start)
);
