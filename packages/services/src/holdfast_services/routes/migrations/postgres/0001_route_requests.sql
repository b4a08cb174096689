-- What was asked for and what became of it. The tenant is the user; it comes first in the key, so
-- no look-up can reach another user's request. Payload and result are JSON kept as text, as on
-- SQLite: jsonb would refuse a U+0000 that the body may lawfully hold.
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
