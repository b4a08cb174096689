-- Since when an entry may have happened: the time of its first claim whose outcome is not known. A
-- server remembers a key for so long and no longer, and after that the same key would do it again.
ALTER TABLE offline_sync_queue ADD COLUMN maybe_since_ms INTEGER;

-- When those were sent that are unknown already nobody has noted: not before they were queued.
UPDATE offline_sync_queue SET maybe_since_ms = enqueued_ms WHERE outcome_unknown = 1;
