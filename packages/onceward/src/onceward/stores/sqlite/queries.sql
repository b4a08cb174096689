-- name: find_record
-- The record of a key unless it is expired.
SELECT canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM onceward_idempotency_records
 WHERE tenant = ? AND endpoint = ? AND idempotency_key = ? AND expires_at > ?;

-- name: live_record_exists
-- Runs in the write transaction, so that no other record can be committed after it.
SELECT 1 FROM onceward_idempotency_records
 WHERE tenant = ? AND endpoint = ? AND idempotency_key = ? AND expires_at > ?;

-- name: find_any_record
-- The record of a key, expired or not.
SELECT canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM onceward_idempotency_records
 WHERE tenant = ? AND endpoint = ? AND idempotency_key = ?;

-- name: save_record
-- The primary key decides: if the key has a live record, this changes no row, and the transaction
-- must not commit. An expired record is overwritten.
INSERT INTO onceward_idempotency_records
       (tenant, endpoint, idempotency_key, canonical_body_hash, request_fingerprint,
        response_status, response_body, response_headers,
        request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
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
 WHERE onceward_idempotency_records.expires_at <= excluded.created_at;

-- name: save_audit_event
INSERT INTO onceward_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version,
        request_id, correlation_id, created_at, reason)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: sweep_records
-- A batch of the records that expired first.
DELETE FROM onceward_idempotency_records
 WHERE (tenant, endpoint, idempotency_key) IN
       (SELECT tenant, endpoint, idempotency_key FROM onceward_idempotency_records
         WHERE expires_at <= ? ORDER BY expires_at LIMIT ?);

-- name: list_records
SELECT tenant, endpoint, idempotency_key,
       canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM onceward_idempotency_records
 WHERE (?1 IS NULL OR tenant = ?1)
   AND (?2 IS NULL OR endpoint = ?2)
   AND (?3 IS NULL OR idempotency_key = ?3)
   AND (?4 IS NULL
        OR (created_at, tenant, endpoint, idempotency_key)
         < (?4, ?5, ?6, ?7))
 ORDER BY created_at DESC, tenant DESC, endpoint DESC, idempotency_key DESC
 LIMIT ?8;

-- name: read_secret
SELECT secret FROM onceward_secret;
