-- The collation of the tenant in all other tables: a database that is distributed by tenant needs one.
-- Rebuilds the index.
ALTER TABLE route_requests ALTER COLUMN tenant TYPE text COLLATE "C";
