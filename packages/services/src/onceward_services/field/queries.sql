-- name: next_change
-- The first statement of every write: it serializes the writes of a user. changed_at never decreases,
-- so "changed since" and the numbers agree.
-- A write in another epoch of the database starts a branch; without an epoch ('') the branch stays.
INSERT INTO field_counters (tenant, seq, changed_at, epoch, branch)
VALUES (:tenant, 1, :now, :epoch, :branch)
    ON CONFLICT (tenant) DO UPDATE
   SET seq = field_counters.seq + 1,
       changed_at = CASE WHEN excluded.changed_at > field_counters.changed_at
                         THEN excluded.changed_at ELSE field_counters.changed_at END,
       branch = CASE WHEN excluded.epoch IN ('', field_counters.epoch)
                     THEN field_counters.branch ELSE excluded.branch END,
       epoch = CASE WHEN excluded.epoch = '' THEN field_counters.epoch ELSE excluded.epoch END
RETURNING seq, changed_at, branch;

-- name: add_branch
INSERT INTO field_branches (tenant, start, branch) VALUES (:tenant, :start, :branch);

-- name: add_next
-- PostgreSQL: next_change and add in one round trip.
SELECT change_seq, change_at
  FROM field_add(:tenant, :kind, :id, :document, CAST(:now AS timestamptz),
                 CAST(:occurred_at AS timestamptz), :epoch, :branch, NULL, NULL);

-- name: add_next_referring
-- PostgreSQL: the same for a document that refers to others, which are looked up in between.
SELECT change_seq, change_at, missing
  FROM field_add(:tenant, :kind, :id, :document, CAST(:now AS timestamptz),
                 CAST(:occurred_at AS timestamptz), :epoch, :branch,
                 CAST(:kinds AS text[]), CAST(:ids AS text[]));

-- name: begin_change
-- PostgreSQL: next_change and find in one round trip.
SELECT change_seq, change_at, id, version, document, seq, created_at, updated_at, deleted_at,
       occurred_at
  FROM field_begin_change(:tenant, :kind, :id, CAST(:now AS timestamptz), :epoch, :branch);

-- name: branches
-- One row for each restore or failover that a user's writes have seen, oldest first.
SELECT start, branch FROM field_branches WHERE tenant = :tenant ORDER BY start;

-- name: changes
-- Changes of all kinds after a number, and the user's counter, of one snapshot. Without changes it is
-- one row without a document. The page ends with the document that exceeds :most_bytes.
SELECT counter.seq AS last_seq, counter.branch, page.kind, page.id, page.version, page.document,
       page.seq, page.created_at, page.updated_at, page.deleted_at, page.occurred_at
  FROM field_counters AS counter
  LEFT JOIN (
        SELECT sized.*, sum(length(document)) OVER (ORDER BY seq) - length(document) AS bytes_before
          FROM (SELECT kind, id, version, document, seq, created_at, updated_at, deleted_at,
                       occurred_at
                  FROM field_items
                 WHERE tenant = :tenant AND seq > :after
                 ORDER BY seq LIMIT :limit) AS sized
       ) AS page ON page.bytes_before < :most_bytes
 WHERE counter.tenant = :tenant
 ORDER BY page.seq;

-- name: find
SELECT id, version, document, seq, created_at, updated_at, deleted_at, occurred_at
  FROM field_items
 WHERE tenant = :tenant AND kind = :kind AND id = :id;

-- name: add
INSERT INTO field_items (tenant, kind, id, version, document, seq, created_at, updated_at, occurred_at)
VALUES (:tenant, :kind, :id, 1, :document, :seq, :now, :now, :occurred_at);

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
SELECT id, version, document, seq, created_at, updated_at, deleted_at, occurred_at
  FROM field_items
 WHERE tenant = :tenant AND kind = :kind AND seq > :after AND deleted_at IS NULL
 ORDER BY seq LIMIT :limit;

-- name: list_changes
-- Documents changed since an instant, tombstones included, oldest change first.
SELECT id, version, document, seq, created_at, updated_at, deleted_at, occurred_at
  FROM field_items
 WHERE tenant = :tenant AND kind = :kind AND seq > :after AND updated_at >= :since
 ORDER BY seq LIMIT :limit;
