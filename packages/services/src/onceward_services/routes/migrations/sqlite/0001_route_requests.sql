-- Route requests and their results. The tenant is the user; it is the first column of the key, so no
-- query can reach another user's request.
CREATE TABLE route_requests (
    tenant     TEXT NOT NULL,
    request_id TEXT NOT NULL,
    status     TEXT NOT NULL CHECK (status IN ('queued', 'running', 'done', 'failed')),
    payload    TEXT NOT NULL,
    result     TEXT,
    created_at TEXT NOT NULL,
    updated_at TEXT NOT NULL,
    PRIMARY KEY (tenant, request_id)
) WITHOUT ROWID;
