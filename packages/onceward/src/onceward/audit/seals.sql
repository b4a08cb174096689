-- Statements on the chain of audit events that are the same for SQLite and PostgreSQL. AMONG_IDS is
-- replaced by a comparison with the JSON array :ids.

-- name: unsealed_events
-- The next events that no seal covers, of all tenants. Reads the index of such events only.
SELECT tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
       correlation_id, created_at, reason, seal
  FROM onceward_audit_events
 WHERE seal IS NULL AND (tenant, id) > (:tenant, :id)
   AND PLANNED_FOR(:tenant)
 ORDER BY tenant, id LIMIT :limit;

-- name: unsealed_events_of_tenant
SELECT tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
       correlation_id, created_at, reason, seal
  FROM onceward_audit_events
 WHERE seal IS NULL AND tenant = :tenant AND id > :id
   AND PLANNED_FOR(:tenant)
 ORDER BY id LIMIT :limit;

-- name: events_by_id
SELECT tenant, id, actor, endpoint, payload_hash, status, resource, version, request_id,
       correlation_id, created_at, reason, seal
  FROM onceward_audit_events
 WHERE tenant = :tenant AND id AMONG_IDS
   AND PLANNED_FOR(:tenant);

-- name: seals_of_events
-- Which seal each event names.
SELECT id, seal FROM onceward_audit_events
 WHERE tenant = :tenant AND id > :id
   AND PLANNED_FOR(:tenant) ORDER BY id LIMIT :limit;

-- name: head
SELECT tenant, number, previous, events, newest_at, first_kept, swept, sealed_at, hash, key_id, mac
  FROM onceward_audit_seals WHERE tenant = :tenant
   AND PLANNED_FOR(:tenant) ORDER BY number DESC LIMIT 1;

-- name: seals
SELECT tenant, number, previous, events, newest_at, first_kept, swept, sealed_at, hash, key_id, mac
  FROM onceward_audit_seals
 WHERE tenant = :tenant AND number > :number
   AND PLANNED_FOR(:tenant) ORDER BY number LIMIT :limit;

-- name: next_tenant
-- The next tenant that has events or seals, found by one look into each primary key.
SELECT min(tenant) AS tenant
  FROM (SELECT min(tenant) AS tenant FROM onceward_audit_events WHERE tenant > :tenant
        UNION ALL
        SELECT min(tenant) FROM onceward_audit_seals WHERE tenant > :tenant) AS found;

-- name: add_seal
-- No row if the number is taken: another process has sealed in the meantime.
INSERT INTO onceward_audit_seals
       (tenant, number, previous, events, newest_at, first_kept, swept, sealed_at, hash, key_id, mac)
VALUES (:tenant, :number, :previous, :events, :newest_at, :first_kept, :swept, :sealed_at, :hash,
        :key_id, :mac)
    ON CONFLICT (tenant, number) DO NOTHING
RETURNING number;

-- name: mark_sealed
-- Fewer rows than events if one was deleted or sealed in the meantime.
UPDATE onceward_audit_events SET seal = :number
 WHERE tenant = :tenant AND seal IS NULL AND id AMONG_IDS
   AND PLANNED_FOR(:tenant)
RETURNING id;

-- name: delete_events
DELETE FROM onceward_audit_events
 WHERE tenant = :tenant AND id AMONG_IDS
   AND PLANNED_FOR(:tenant)
RETURNING id;

-- name: delete_seals
DELETE FROM onceward_audit_seals WHERE tenant = :tenant AND number <= :number
   AND PLANNED_FOR(:tenant) RETURNING number;

-- name: delete_old_unsealed
-- Looks at the first unsealed events of a tenant only: if one of them is too young, all others are.
DELETE FROM onceward_audit_events
 WHERE tenant = :tenant AND id IN (
       SELECT id FROM (SELECT id, created_at FROM onceward_audit_events
                        WHERE seal IS NULL AND tenant = :tenant ORDER BY id LIMIT :limit) AS oldest
        WHERE created_at < :before)
   AND PLANNED_FOR(:tenant) AND seal IS NULL
RETURNING id;
