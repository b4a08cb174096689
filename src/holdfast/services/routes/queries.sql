-- name: add_request
-- Runs in the guard's transaction: the request and the record of its key stand or fall together.
INSERT INTO route_requests (tenant, request_id, status, payload, created_at, updated_at)
VALUES (:tenant, :request_id, 'queued', :payload, :now, :now);

-- name: find_request
SELECT request_id, status, result, created_at, updated_at
  FROM route_requests
 WHERE tenant = :tenant AND request_id = :request_id;
