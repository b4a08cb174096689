-- What was asked for and what became of it. The tenant is the user; it comes first in the key, so
-- no look-up can reach another user's request.
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
