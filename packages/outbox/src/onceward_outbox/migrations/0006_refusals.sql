-- A refused entry leaves its lane, and the entries behind it go on. A retry brings it back.
ALTER TABLE offline_sync_queue ADD COLUMN left_lane TEXT;
-- Entries of one chain make no sense without each other: a refusal parks the later ones. NULL: none.
ALTER TABLE offline_sync_queue ADD COLUMN chain TEXT;
CREATE INDEX idx_offline_sync_queue_chain
    ON offline_sync_queue (user_id, chain, sequence_number) WHERE chain IS NOT NULL;
