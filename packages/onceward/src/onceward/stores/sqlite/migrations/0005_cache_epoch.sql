-- Copies of records in memory and in Redis count only for the epoch in which they were read. Removing
-- a record and restoring a backup renew it: copies from before are not replayed any more.
ALTER TABLE onceward_secret ADD COLUMN cache_epoch TEXT NOT NULL DEFAULT '';

-- Why an operator did something, for events that are not requests.
ALTER TABLE onceward_audit_events ADD COLUMN reason TEXT;
