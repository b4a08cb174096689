-- Versions of entities.

-- name: saw_success
-- A success led from :sent to :version. NULL or '*' as :sent: sent without a check. A version that is
-- not in `own` was produced by another client: the edits before it conflict on the server.
INSERT INTO entity_versions (user_id, entity, version, own, body, seen, seen_ms)
VALUES (:user_id, :entity, :version, :own, :body, nullif(:version, ''), :ms)
    ON CONFLICT (user_id, entity) DO UPDATE
   SET own = CASE WHEN :sent IS NULL OR :sent = '*'
                    OR EXISTS (SELECT 1 FROM json_each(entity_versions.own) WHERE value = :sent)
                  THEN json_insert(
                           -- The first and the latest are kept.
                           CASE WHEN json_array_length(entity_versions.own) < 1000
                                THEN entity_versions.own
                                ELSE json_remove(entity_versions.own, '$[1]') END,
                           '$[#]', :version)
                  ELSE excluded.own END,
       version = excluded.version, body = excluded.body,
       seen = coalesce(excluded.seen, entity_versions.seen), seen_ms = excluded.seen_ms;

-- name: saw_version
-- A version that another client has produced.
INSERT INTO entity_versions (user_id, entity, version, own, seen, seen_ms)
VALUES (:user_id, :entity, '', '[]', :version, :ms)
    ON CONFLICT (user_id, entity) DO UPDATE SET seen = excluded.seen, seen_ms = excluded.seen_ms;

-- name: forget_version
DELETE FROM entity_versions WHERE user_id = :user_id AND entity = :entity;

-- name: entity_version
SELECT version, body FROM entity_versions WHERE user_id = :user_id AND entity = :entity;

-- name: seen_versions
SELECT entity, seen FROM entity_versions
 WHERE user_id = :user_id AND entity IN (SELECT value FROM json_each(:entities))
   AND seen IS NOT NULL;

-- name: rebase
-- The entity was read before the first send: the edit is based on what was read.
UPDATE offline_sync_queue SET base = coalesce(:base, base), base_version = :version WHERE id = :id;

-- name: base_later_edits
UPDATE offline_sync_queue SET base = :base
 WHERE user_id = :user_id AND entity = :entity AND status = 'pending'
   AND sequence_number > :sequence_number AND base_version IS NOT :theirs_version;

-- name: purge_versions
DELETE FROM entity_versions WHERE user_id = :user_id;
