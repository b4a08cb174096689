-- Records and audit events as the console looks them up, on SQLite and PostgreSQL. :tenant is null
-- for all tenants.

-- name: find_records
-- Newest first. One of the ids, or the tenant, or the time finds them by an index.
SELECT tenant, endpoint, idempotency_key,
       canonical_body_hash, request_fingerprint, response_status, response_body, response_headers,
       request_id, correlation_id, audit_id, created_at, expires_at, client_generated_at
  FROM holdfast_idempotency_records
 WHERE {where}
 ORDER BY created_at DESC, tenant DESC, endpoint DESC, idempotency_key DESC
 LIMIT :limit;

-- name: find_audit_event
SELECT id, actor, resource, version, created_at, seal
  FROM holdfast_audit_events
 WHERE tenant = :tenant AND id = :id;

-- name: jobs_of_request
SELECT tenant, id AS job_id, type, queue, state FROM holdfast_jobs
 WHERE correlation_id = :correlation_id AND tenant = :tenant AND request_id = :request_id
UNION ALL
SELECT tenant, job_id, type, queue, 'done' FROM holdfast_job_completions
 WHERE correlation_id = :correlation_id AND tenant = :tenant AND request_id = :request_id
UNION ALL
SELECT tenant, job_id, type, queue, 'dead' FROM holdfast_dead_letters
 WHERE correlation_id = :correlation_id AND tenant = :tenant AND request_id = :request_id
   AND requeued_at IS NULL
 LIMIT 100;
