-- Versions of entities.

-- name: saw_success
-- A success led from :sent to :version. NULL or '*' as :sent: sent without a check. A version that is
-- not in `own` was produced by another client: the edits before it conflict on the server. Those
-- without a base were made on the chain that ends there: {"before": its last version} keeps it.
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
                  WHEN entity_versions.own = '[]' THEN excluded.own
                  -- A conflict about a base that this device never had, with its own version.
                  WHEN EXISTS (SELECT 1 FROM json_each(entity_versions.own)
                                WHERE value = :version)
                  THEN json_insert(entity_versions.own, '$[#]', :sent)
                  ELSE json_insert(
                           json_array(json_object('before', coalesce(
                               json_extract(entity_versions.own, '$[0].before'),
                               entity_versions.version))),
                           '$[#]', :sent, '$[#]', :version) END,
       version = excluded.version, body = excluded.body,
       seen = coalesce(excluded.seen, entity_versions.seen), seen_ms = excluded.seen_ms;

-- name: saw_version
-- A version that another client has produced.
INSERT INTO entity_versions (user_id, entity, version, own, seen, seen_ms)
VALUES (:user_id, :entity, '', '[]', :version, :ms)
    ON CONFLICT (user_id, entity) DO UPDATE SET seen = excluded.seen, seen_ms = excluded.seen_ms;

-- name: entity_version
SELECT version, body FROM entity_versions WHERE user_id = :user_id AND entity = :entity;

-- name: seen_versions
SELECT entity, seen FROM entity_versions
 WHERE user_id = :user_id AND entity IN (SELECT value FROM json_each(:entities))
   AND seen IS NOT NULL;

-- name: rebase
-- The entity was read before the first send: the edit is based on what was read.
UPDATE offline_sync_queue SET base = coalesce(:base, base), base_version = :version WHERE id = :id
RETURNING ENTRY;

-- name: is_own_version
-- Whether this device has led the entity from :sent to :version, without a write of another client.
SELECT 1 FROM entity_versions AS known
 WHERE known.user_id = :user_id AND known.entity = :entity AND known.version = :version
   AND EXISTS (SELECT 1 FROM json_each(known.own) WHERE value = :sent)
   -- Edits without a base would be sent with it once more.
   AND coalesce(json_extract(known.own, '$[0].before'), '') <> :sent;

-- name: resend
-- The server has refused the request, so it has not happened.
UPDATE offline_sync_queue
   SET idempotency_key = :key, sent_version = NULL, outcome_unknown = 0,
       maybe_since_ms = NULL, maybe_since_at = NULL
 WHERE id = :id
RETURNING ENTRY;

-- name: base_later_edits
UPDATE offline_sync_queue SET base = :base
 WHERE user_id = :user_id AND entity = :entity AND status = 'pending'
   AND sequence_number > :sequence_number AND base_version IS NOT :theirs_version;

-- name: purge_versions
DELETE FROM entity_versions WHERE user_id = :user_id;

-- name: forget_bodies
-- The version stays: without it the next edit would be sent without a check.
UPDATE entity_versions SET body = NULL
 WHERE seen_ms <= :before AND body IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM offline_sync_queue AS entry
                    WHERE entry.user_id = entity_versions.user_id
                      AND entry.status IN ('pending', 'in_flight', 'failed', 'conflict'));
