-- What admins see of a walker, suspension, and the announcement of reviews.

-- name: walker_for_admins
SELECT w.points_banked, w.energy_balance, w.created_at, w.updated_at, w.suspended_at, w.deleting_at,
       (SELECT count(*) FROM walk_reviews r
         WHERE r.tenant = :tenant AND r.status = 'open') AS open_reviews
  FROM walkers w
 WHERE w.tenant = :tenant;

-- name: stale_actions
-- Stored 422 of walk are stale actions and nothing else: other errors are not stored.
SELECT count(*) AS actions, max(created_at) AS last_at
  FROM onceward_idempotency_records
 WHERE tenant = :tenant AND response_status = 422
   AND (endpoint LIKE 'tree.%' OR endpoint LIKE 'quest.%' OR endpoint LIKE 'energy.%');

-- name: reports_of_day
SELECT number, step_count, source, source_bundle_id, tz, span_start, span_end, client_submitted_at,
       token_id, request_id, received_at
  FROM step_reports
 WHERE tenant = :tenant AND day = :day
 ORDER BY number DESC
 LIMIT :limit;

-- name: attestations_of_walker
SELECT id, verdict, code, anti_cheat, token_id, day, summary, request_id, created_at
  FROM attestation_logs
 WHERE tenant = :tenant
 ORDER BY id DESC
 LIMIT :limit;

-- name: suspend
-- The first suspension counts. The walker is locked.
UPDATE walkers SET suspended_at = :now WHERE tenant = :tenant AND suspended_at IS NULL;

-- name: reinstate
UPDATE walkers SET suspended_at = NULL WHERE tenant = :tenant AND suspended_at IS NOT NULL;

-- name: count_open_reviews
SELECT kind, count(*) AS reviews FROM walk_reviews WHERE status = 'open' GROUP BY kind;

-- name: announce_reviews
-- Open reviews of a walker without a webhook. The walker is locked.
UPDATE walk_reviews
   SET announced_at = :now
 WHERE tenant = :tenant AND status = 'open' AND announced_at IS NULL
RETURNING id;
