-- Tenants for operators, on SQLite and PostgreSQL. Each query reads a limited number of index entries.

-- name: tenants
-- The next tenants that have records, in the order of their names: one index look-up for each.
WITH RECURSIVE found(tenant, place) AS (
    SELECT (SELECT min(tenant) FROM onceward_idempotency_records WHERE tenant > :after), 1
    UNION ALL
    SELECT (SELECT min(record.tenant) FROM onceward_idempotency_records AS record
             WHERE record.tenant > found.tenant), found.place + 1
      FROM found WHERE found.tenant IS NOT NULL AND found.place < :limit
)
SELECT tenant FROM found WHERE tenant IS NOT NULL ORDER BY tenant;

-- name: tenants on citus
SELECT tenant FROM onceward_next_tenants(:after, :limit) AS found(tenant) ORDER BY tenant;

-- name: recent_records
SELECT count(*) AS n
  FROM (SELECT 1 AS one FROM onceward_idempotency_records
         WHERE tenant = :tenant AND created_at > :since LIMIT :most) AS counted;

-- name: recent_refusals
-- Of the last :most rows of the tenant.
SELECT outcome, count(*) AS n
  FROM (SELECT outcome, at FROM onceward_request_log WHERE tenant = :tenant
         ORDER BY id DESC LIMIT :most) AS counted
 WHERE at > :since
 GROUP BY outcome ORDER BY outcome;
