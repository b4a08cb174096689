-- name: add_request
-- Runs in the guard's transaction: the request and the record of its key commit together.
INSERT INTO route_requests (tenant, request_id, status, payload, created_at, updated_at)
VALUES (:tenant, :request_id, 'queued', :payload, :now, :now);

-- name: find_request
SELECT request_id, status, result, created_at, updated_at
  FROM route_requests
 WHERE tenant = :tenant AND request_id = :request_id;

-- name: read_submission
SELECT payload FROM route_requests WHERE tenant = :tenant AND request_id = :request_id;

-- name: save_route
-- Runs in the job's transaction: the route and the job's completion marker commit together.
UPDATE route_requests
   SET status = 'done', result = :result, updated_at = :now
 WHERE tenant = :tenant AND request_id = :request_id;
