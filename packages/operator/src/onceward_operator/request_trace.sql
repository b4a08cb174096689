-- What belongs to one action, on SQLite and PostgreSQL. {tenant} is a condition, true for all tenants.

-- name: audit_events
SELECT tenant, id, actor, endpoint, status, resource, version, request_id, created_at, reason
  FROM onceward_audit_events
 WHERE correlation_id = :correlation_id AND {tenant}
 ORDER BY created_at DESC LIMIT :limit;

-- name: logged_requests
SELECT id, at, tenant, endpoint, key_hash, outcome, status, code, request_id, original_request_id
  FROM onceward_request_log
 WHERE correlation_id = :correlation_id AND {tenant}
 ORDER BY at DESC LIMIT :limit;

-- name: requests_of_id
-- Requests that left no record, by their own id.
SELECT at, tenant, endpoint, key_hash, correlation_id, outcome, status, code, request_id,
       original_request_id, expected_body_hash, received_body_hash,
       expected_request_hash, received_request_hash, differs
  FROM onceward_request_log
 WHERE request_id = :request_id AND {tenant}
 ORDER BY at DESC LIMIT :limit;

-- name: requests_of_keys
-- Requests that left no record, by the hashes of their keys.
SELECT id, at, tenant, endpoint, key_hash, outcome, status, code, request_id, correlation_id,
       original_request_id, differs
  FROM onceward_request_log
 WHERE key_hash IN ({hashes}) AND {tenant}
 ORDER BY at DESC LIMIT :limit;

-- name: jobs
-- Jobs in any state. The placeholders in braces are times in seconds since 1970.
SELECT tenant, id AS job_id, type, queue, request_id, state, {enqueued_at} AS enqueued_at,
       NULL AS ended_at
  FROM onceward_jobs WHERE correlation_id = :correlation_id AND {tenant}
UNION ALL
SELECT tenant, job_id, type, queue, request_id, 'done', {enqueued_at}, {completed_at}
  FROM onceward_job_completions WHERE correlation_id = :correlation_id AND {tenant}
UNION ALL
SELECT tenant, job_id, type, queue, request_id, 'dead', {enqueued_at}, {died_at}
  FROM onceward_dead_letters
 WHERE correlation_id = :correlation_id AND {tenant} AND requeued_at IS NULL
 LIMIT :limit;

-- name: merged_jobs
-- Jobs into which one of this correlation id was merged: they ran in its place.
SELECT * FROM (
    SELECT job.tenant, job.id AS job_id, type, queue, job.request_id AS request_id, state AS state,
           {enqueued_at} AS enqueued_at, CAST(NULL AS double precision) AS ended_at,
           cause.request_id AS merged_request_id, {caused_at} AS caused_at
      FROM onceward_job_causes AS cause
      JOIN onceward_jobs AS job ON job.tenant = cause.tenant AND job.id = cause.job_id
     WHERE cause.correlation_id = :correlation_id) AS current WHERE {tenant}
UNION ALL
SELECT * FROM (
    SELECT job.tenant, job.job_id AS job_id, type, queue, job.request_id AS request_id, 'done' AS state,
           {enqueued_at} AS enqueued_at, {completed_at} AS ended_at,
           cause.request_id AS merged_request_id, {caused_at} AS caused_at
      FROM onceward_job_causes AS cause
      JOIN onceward_job_completions AS job ON job.tenant = cause.tenant AND job.job_id = cause.job_id
     WHERE cause.correlation_id = :correlation_id) AS ended WHERE {tenant}
UNION ALL
SELECT * FROM (
    SELECT job.tenant, job.job_id AS job_id, type, queue, job.request_id AS request_id, 'dead' AS state,
           {enqueued_at} AS enqueued_at, {died_at} AS ended_at,
           cause.request_id AS merged_request_id, {caused_at} AS caused_at
      FROM onceward_job_causes AS cause
      JOIN onceward_dead_letters AS job ON job.tenant = cause.tenant AND job.job_id = cause.job_id
     WHERE cause.correlation_id = :correlation_id
       AND requeued_at IS NULL) AS dead WHERE {tenant}
 LIMIT :limit;
