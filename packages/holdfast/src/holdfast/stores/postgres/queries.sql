-- name: find_record
-- The record of a key unless it is expired.
SELECT canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM holdfast_idempotency_records
 WHERE tenant = $1 AND endpoint = $2 AND idempotency_key = $3 AND expires_at > $4;

-- name: finish
SELECT holdfast_save_record($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16,
                            $17);

-- name: save_audit_event
INSERT INTO holdfast_audit_events
       (tenant, id, actor, endpoint, payload_hash, status, resource, version,
        request_id, correlation_id, created_at, reason)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12);

-- name: sweep_records
-- A batch of the records that expired first. Rows that another sweep has locked are skipped.
DELETE FROM holdfast_idempotency_records
 WHERE ctid = ANY (ARRAY(
       SELECT ctid FROM holdfast_idempotency_records
        WHERE expires_at <= $1 ORDER BY expires_at LIMIT $2
          FOR UPDATE SKIP LOCKED));

-- name: list_records
SELECT tenant, endpoint, idempotency_key,
       canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM holdfast_idempotency_records
 WHERE ($1::text IS NULL OR tenant = $1)
   AND ($2::text IS NULL OR endpoint = $2)
   AND ($3::text IS NULL OR idempotency_key = $3)
   AND ($4::timestamptz IS NULL
        OR (created_at, tenant, endpoint, idempotency_key) < ($4, $5::text, $6::text, $7::text))
 ORDER BY created_at DESC, tenant DESC, endpoint DESC, idempotency_key DESC
 LIMIT $8;

-- name: read_secret
SELECT secret FROM holdfast_secret;
