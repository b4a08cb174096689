-- Records and audit events as the console looks them up, on SQLite and PostgreSQL. :tenant is null
-- for all tenants.

-- name: find_records
-- Newest first. One of the ids, the tenant or the endpoint finds them by an index.
SELECT tenant, endpoint, idempotency_key,
       canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM onceward_idempotency_records
 WHERE {where}
 ORDER BY created_at DESC, tenant DESC, endpoint DESC, idempotency_key DESC
 LIMIT :limit;

-- name: newest_records
-- Of all tenants and endpoints, on PostgreSQL. The recursion reads one index entry per endpoint; {where}
-- has the time and the place in the list.
WITH RECURSIVE endpoints AS (
    (SELECT endpoint FROM onceward_idempotency_records ORDER BY endpoint LIMIT 1)
    UNION ALL
    SELECT (SELECT next.endpoint FROM onceward_idempotency_records AS next
             WHERE next.endpoint > endpoints.endpoint ORDER BY next.endpoint LIMIT 1)
      FROM endpoints WHERE endpoints.endpoint IS NOT NULL
)
SELECT found.tenant, found.endpoint, found.idempotency_key,
       found.canonical_body_hash, found.request_fingerprint, found.response_status,
       found.response_body, found.response_headers, found.request_id, found.correlation_id,
       found.audit_id, found.created_at, found.expires_at, found.client_generated_at
  FROM endpoints
 CROSS JOIN LATERAL (
       SELECT * FROM onceward_idempotency_records AS record
        WHERE record.endpoint = endpoints.endpoint AND {where}
        ORDER BY created_at DESC, tenant DESC, idempotency_key DESC
        LIMIT :limit) AS found
 ORDER BY found.created_at DESC, found.tenant DESC, found.endpoint DESC, found.idempotency_key DESC
 LIMIT :limit;

-- name: newest_records on citus
SELECT tenant, endpoint, idempotency_key,
       canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM onceward_newest_records({before}, {after}, :limit)
 ORDER BY created_at DESC, tenant DESC, endpoint DESC, idempotency_key DESC
 LIMIT :limit;

-- name: find_audit_event
SELECT id, actor, resource, version, created_at, seal
  FROM onceward_audit_events
 WHERE tenant = :tenant AND id = :id;

-- name: jobs_of_request
SELECT tenant, id AS job_id, type, queue, state FROM onceward_jobs
 WHERE correlation_id = :correlation_id AND tenant = :tenant AND request_id = :request_id
UNION ALL
SELECT tenant, job_id, type, queue, 'done' FROM onceward_job_completions
 WHERE correlation_id = :correlation_id AND tenant = :tenant AND request_id = :request_id
UNION ALL
SELECT tenant, job_id, type, queue, 'dead' FROM onceward_dead_letters
 WHERE correlation_id = :correlation_id AND tenant = :tenant AND request_id = :request_id
   AND requeued_at IS NULL
 LIMIT 100;
