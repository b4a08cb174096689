-- Requests that were not executed, as the console lists them, on SQLite and PostgreSQL.

-- name: logged_requests
-- Reads :scanned rows, newest first, and returns those that match, at most :most, and the last one that
-- was read, if there may be more. An empty text matches everything.
WITH scanned AS (
    SELECT *, row_number() OVER (ORDER BY at DESC, id DESC) AS nth
      FROM (SELECT id, at, tenant, endpoint, request_id, outcome, status, code, differs
              FROM onceward_request_log
             WHERE (at, id) < (:before_at, :before_id)
             ORDER BY at DESC, id DESC LIMIT :scanned) AS newest
), compared AS (
    SELECT *, :outcome IN ('', outcome) AND :tenant IN ('', tenant) AS matches FROM scanned
)
SELECT id, at, tenant, endpoint, request_id, outcome, status, code, differs, nth, matches
  FROM compared
 WHERE matches OR nth = :scanned
 ORDER BY nth LIMIT :most;
