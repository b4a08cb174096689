-- Route requests and their results. The tenant is the user; it is the first column of the key, so no
-- query can reach another user's request. Payload and result are JSON stored as text, as on SQLite:
-- jsonb rejects U+0000, which is valid in a body.
CREATE TABLE route_requests (
    tenant     text NOT NULL,
    request_id text NOT NULL,
    status     text NOT NULL CHECK (status IN ('queued', 'running', 'done', 'failed')),
    payload    text NOT NULL,
    result     text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (tenant, request_id)
);
