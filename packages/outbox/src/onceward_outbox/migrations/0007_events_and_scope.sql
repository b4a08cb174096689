-- The server's code of the last error, as last_error_code is its HTTP status.
ALTER TABLE offline_sync_queue ADD COLUMN last_code TEXT;
UPDATE offline_sync_queue
   SET last_code = (SELECT code FROM attempts
                     WHERE attempts.entry_id = offline_sync_queue.id AND attempts.status IS NOT NULL
                     ORDER BY number DESC LIMIT 1)
 WHERE last_error_code IS NOT NULL;

-- The W3C trace context of the user action.
ALTER TABLE offline_sync_queue ADD COLUMN traceparent TEXT;

-- A user has one unsettled entry with this name.
ALTER TABLE offline_sync_queue ADD COLUMN once TEXT;
CREATE UNIQUE INDEX idx_offline_sync_queue_once ON offline_sync_queue (user_id, once)
 WHERE once IS NOT NULL
   AND status <> 'succeeded' AND status <> 'discarded' AND status <> 'expired';

-- Since when it is failed or in conflict, as the maintenance has found it, and when its removal was
-- announced. Both are cleared when it is pending again.
ALTER TABLE offline_sync_queue ADD COLUMN stuck_ms INTEGER;
ALTER TABLE offline_sync_queue ADD COLUMN notice_ms INTEGER;

-- The same for mappings: when the last entry that refers to it was removed.
ALTER TABLE id_mappings ADD COLUMN used_ms INTEGER;
ALTER TABLE id_mappings ADD COLUMN notice_ms INTEGER;

-- When the user was last warned of entries that will pass the cap.
ALTER TABLE users ADD COLUMN warned_ms INTEGER;
