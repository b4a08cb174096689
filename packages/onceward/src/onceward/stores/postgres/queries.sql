-- Array parameters are text[], and cast. For other arrays asyncpg first looks their types up in the
-- catalogue, once for each connection: that takes a second on Citus, see docs/decisions/0056-portable-sql.md.

-- name: find_record
-- The record of a key unless it is expired.
SELECT * FROM onceward_find_record($1, $2, $3, $4);

-- name: finish
SELECT onceward_save_record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16,
                            $17);

-- name: save_audit_event
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version,
        request_id, correlation_id, created_at, reason)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: sweep_records
-- The DELETE is in stores/sql/guard/sweep_expired.sql.
SELECT onceward_sweep_expired($1, $2) AS deleted;

-- name: list_records
SELECT tenant, endpoint, idempotency_key,
       canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM onceward_idempotency_records
 WHERE ($1::text IS NULL OR tenant = $1)
   AND ($2::text IS NULL OR endpoint = $2)
   AND ($3::text IS NULL OR idempotency_key = $3)
   AND ($4::timestamptz IS NULL
        OR (created_at, tenant, endpoint, idempotency_key) < ($4, $5::text, $6::text, $7::text))
 ORDER BY created_at DESC, tenant DESC, endpoint DESC, idempotency_key DESC
 LIMIT $8;

-- name: read_secret
SELECT secret FROM onceward_secret;

-- name: try_locks
-- Claims several keys without waiting for other holders.
SELECT lock, pg_try_advisory_xact_lock(lock) FROM unnest($1::text[]::bigint[]) AS wanted(lock);

-- name: find_records
-- The records of several keys, expired or not, with the places of their keys.
SELECT * FROM onceward_find_records($1::text[], $2::text[], $3::text[]);

-- name: save_records
-- Writes the records and audit events of several requests, and returns how many records were
-- written. If a key has a live record, it is fewer, and the transaction must not commit.
WITH saved AS (
    INSERT INTO onceward_idempotency_records AS old
           (tenant, endpoint, idempotency_key, canonical_body_hash, request_fingerprint,
            response_status, response_body, response_headers,
            request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at)
    SELECT tenant, endpoint, idempotency_key, body_hash, fingerprint, status, body, headers::jsonb,
           request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
      FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[],
                  $6::text[]::integer[], $7::text[]::bytea[], $8::text[], $9::text[], $10::text[],
                  $11::text[], $12::text[]::timestamptz[], $13::text[]::timestamptz[],
                  $14::text[]::timestamptz[])
           AS new(tenant, endpoint, idempotency_key, body_hash, fingerprint, status, body, headers,
                  request_id, correlation_id, audit_id, created_at, expires_at,
                  client_generated_at)
        ON CONFLICT (tenant, endpoint, idempotency_key) DO UPDATE
       SET canonical_body_hash = excluded.canonical_body_hash,
           request_fingerprint = excluded.request_fingerprint,
           response_status     = excluded.response_status,
           response_body       = excluded.response_body,
           response_headers    = excluded.response_headers,
           request_id          = excluded.request_id,
           correlation_id      = excluded.correlation_id,
           audit_id            = excluded.audit_id,
           created_at          = excluded.created_at,
           expires_at          = excluded.expires_at,
           client_generated_at = excluded.client_generated_at
     WHERE old.expires_at <= excluded.created_at
    RETURNING 1
), audited AS (
    INSERT INTO onceward_audit_events
           (tenant, id, actor, endpoint, payload_hash, status, resource, version,
            request_id, correlation_id, created_at)
    SELECT *
      FROM unnest($15::text[], $16::text[], $17::text[], $18::text[], $19::text[],
                  $20::text[]::integer[], $21::text[], $22::text[]::bigint[], $23::text[],
                  $24::text[], $25::text[]::timestamptz[])
)
SELECT count(*) FROM saved;

-- name: two_phase_commit
-- Before "save_records" on Citus; see sql/guard/two_phase_commit.citus.sql.
SELECT onceward_two_phase_commit();
