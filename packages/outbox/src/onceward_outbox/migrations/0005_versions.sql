-- Versions travel with edits. An edit is sent with the version it was made on, followed along the
-- successes of this device.

-- The entity whose version the entry checks: as in its lane, whichever of its ids the entry uses.
-- NULL for creations, which check none.
ALTER TABLE offline_sync_queue ADD COLUMN entity TEXT;
-- What If-Match was in the last send whose outcome was recorded: the next send has the same. NULL: not
-- sent yet. Empty: sent without.
ALTER TABLE offline_sync_queue ADD COLUMN sent_version TEXT;
-- What both sides of a conflict have changed, as JSON Pointers.
ALTER TABLE offline_sync_queue ADD COLUMN conflict_fields TEXT;

UPDATE offline_sync_queue SET entity = lane
 WHERE operation <> 'create' AND substr(lane, 1, length(entity_type) + 1) = entity_type || '/';
UPDATE offline_sync_queue SET base_version = json_extract(headers, '$.If-Match')
 WHERE operation <> 'create' AND json_extract(headers, '$.If-Match') LIKE '"%"';

CREATE TABLE entity_versions (
    user_id TEXT NOT NULL REFERENCES users (id),
    entity  TEXT NOT NULL,
    -- The version that the device's last success produced; empty if the response did not say.
    version TEXT NOT NULL,
    -- JSON array of the versions that the device's successes led from, each to the next, up to
    -- `version`. An edit based on one of them is sent with `version`.
    own     TEXT NOT NULL,
    -- The entity as of `version`, a JSON text: the base for merges. NULL if it is not known.
    body    TEXT,
    -- The version seen last, also in a conflict: the base of new edits.
    seen    TEXT,
    seen_ms INTEGER NOT NULL,
    PRIMARY KEY (user_id, entity)
) WITHOUT ROWID;
