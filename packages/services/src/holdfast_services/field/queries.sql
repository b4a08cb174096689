-- name: next_change
-- The first statement of every write: it serializes the writes of a user. changed_at never decreases,
-- so "changed since" and the numbers agree.
INSERT INTO field_counters (tenant, seq, changed_at) VALUES (:tenant, 1, :now)
    ON CONFLICT (tenant) DO UPDATE
   SET seq = field_counters.seq + 1,
       changed_at = CASE WHEN excluded.changed_at > field_counters.changed_at
                         THEN excluded.changed_at ELSE field_counters.changed_at END
RETURNING seq, changed_at;

-- name: find
SELECT id, version, document, seq, created_at, updated_at, deleted_at
  FROM field_items
 WHERE tenant = :tenant AND kind = :kind AND id = :id;

-- name: add
INSERT INTO field_items (tenant, kind, id, version, document, seq, created_at, updated_at)
VALUES (:tenant, :kind, :id, 1, :document, :seq, :now, :now);

-- name: change
UPDATE field_items
   SET document = :document, version = :version, seq = :seq, updated_at = :now
 WHERE tenant = :tenant AND kind = :kind AND id = :id;

-- name: remove
UPDATE field_items
   SET version = :version, seq = :seq, updated_at = :now, deleted_at = :now
 WHERE tenant = :tenant AND kind = :kind AND id = :id;

-- name: list
-- Documents that are not deleted, oldest change first.
SELECT id, version, document, seq, created_at, updated_at, deleted_at
  FROM field_items
 WHERE tenant = :tenant AND kind = :kind AND seq > :after AND deleted_at IS NULL
 ORDER BY seq LIMIT :limit;

-- name: list_changes
-- Documents changed since an instant, tombstones included, oldest change first.
SELECT id, version, document, seq, created_at, updated_at, deleted_at
  FROM field_items
 WHERE tenant = :tenant AND kind = :kind AND seq > :after AND updated_at >= :since
 ORDER BY seq LIMIT :limit;
