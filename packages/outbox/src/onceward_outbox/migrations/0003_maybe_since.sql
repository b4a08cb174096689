-- Since when an entry may have happened: the time of its first claim whose outcome is not known. A
-- server remembers a key for so long and no longer, and after that the same key would do it again.
-- The second column is the same on the device's clock, for the one case in which nothing else tells.
ALTER TABLE offline_sync_queue ADD COLUMN maybe_since_ms INTEGER;
ALTER TABLE offline_sync_queue ADD COLUMN maybe_since_at TEXT;

-- When those were sent that may have been nobody has noted: not before they were queued.
UPDATE offline_sync_queue
   SET maybe_since_ms = enqueued_ms, maybe_since_at = coalesce(claimed_at, created_at)
 WHERE outcome_unknown = 1 OR status = 'in_flight';

CREATE INDEX idx_offline_sync_queue_unknown
    ON offline_sync_queue (maybe_since_ms) WHERE outcome_unknown = 1;
