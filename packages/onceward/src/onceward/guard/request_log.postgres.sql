-- The log of requests without a record, on PostgreSQL. Times are seconds since 1970.

-- name: add_requests
INSERT INTO onceward_request_log
       (at, tenant, endpoint, key_hash, request_id, correlation_id, outcome, status,
        original_request_id, expected_body_hash, received_body_hash,
        expected_request_hash, received_request_hash, differs, code)
SELECT (noted.value ->> 0)::float8, noted.value ->> 1, noted.value ->> 2, noted.value ->> 3,
       noted.value ->> 4, noted.value ->> 5, noted.value ->> 6, (noted.value ->> 7)::integer,
       noted.value ->> 8, noted.value ->> 9, noted.value ->> 10, noted.value ->> 11,
       noted.value ->> 12, noted.value ->> 13, noted.value ->> 14
  FROM jsonb_array_elements(:rows::jsonb) AS noted;

-- name: sweep_requests
-- All of what is too old: without a limit, so that each node of a cluster deletes its own.
DELETE FROM onceward_request_log WHERE at < :before;

-- name: delete_requests
-- Of a tenant that was erased.
DELETE FROM onceward_request_log WHERE tenant = :tenant AND at <= :until;

-- name: oldest_kept
-- The time of the row with which the table has :most rows; none if it has fewer.
SELECT at FROM onceward_request_log ORDER BY at DESC LIMIT 1 OFFSET :most;

-- name: add_counts
-- How often something has happened in a minute, in one process: the newest number counts.
INSERT INTO onceward_request_counts (minute, process, name, number)
SELECT (noted.value ->> 0)::bigint, :process, noted.value ->> 1, (noted.value ->> 2)::float8
  FROM jsonb_array_elements(:rows::jsonb) AS noted
    ON CONFLICT (minute, process, name) DO UPDATE SET number = excluded.number;

-- name: sweep_counts
DELETE FROM onceward_request_counts WHERE minute < :before;

-- name: read_counts
SELECT minute, name, sum(number) AS number FROM onceward_request_counts
 WHERE minute >= :since GROUP BY minute, name ORDER BY minute;
