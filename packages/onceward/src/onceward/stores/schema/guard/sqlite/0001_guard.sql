-- The stored outcome of each guarded request. The tenant is the first column of the primary key, so
-- no query crosses tenants. Rows are appended, and only the small key index is written at
-- random places: WITHOUT ROWID would scatter whole records.
CREATE TABLE onceward_idempotency_records (
    tenant              TEXT NOT NULL,
    endpoint            TEXT NOT NULL,
    idempotency_key     TEXT NOT NULL,
    canonical_body_hash TEXT NOT NULL,
    request_fingerprint TEXT NOT NULL,
    response_status     INTEGER NOT NULL,
    response_body       BLOB NOT NULL,
    response_headers    TEXT NOT NULL,
    request_id          TEXT NOT NULL,
    correlation_id      TEXT NOT NULL,
    audit_id            TEXT,
    created_at          TEXT NOT NULL,
    expires_at          TEXT NOT NULL,
    -- When the user acted, by the device's clock, if the request said so.
    client_generated_at TEXT,
    PRIMARY KEY (tenant, endpoint, idempotency_key)
);

-- For the sweep, which deletes the oldest first.
CREATE INDEX idx_onceward_idempotency_records_expires_at ON onceward_idempotency_records (expires_at);
-- For operators, who look requests up by what their customers and logs name. Lists by key and time have
-- no index here: each costs a request more than ten microseconds, and a file has fewer records than a
-- server.
CREATE INDEX idx_onceward_idempotency_records_request ON onceward_idempotency_records (request_id);
CREATE INDEX idx_onceward_idempotency_records_trace ON onceward_idempotency_records (correlation_id);

-- Who did what. Outlives the record. Ids sort by time, so pages by id are pages by time.
CREATE TABLE onceward_audit_events (
    tenant         TEXT NOT NULL,
    id             TEXT NOT NULL,
    actor          TEXT NOT NULL,
    endpoint       TEXT NOT NULL,
    payload_hash   TEXT NOT NULL,
    status         INTEGER NOT NULL,
    resource       TEXT,
    version        INTEGER,
    request_id     TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    created_at     TEXT NOT NULL,
    -- Why an operator did something, for events that are not requests.
    reason         TEXT,
    -- The seal that covers the event; null until it is sealed. Writers never set it.
    seal           INTEGER,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX idx_onceward_audit_events_correlation_id ON onceward_audit_events (correlation_id);

-- A random secret of this database: it authenticates cached copies of records.
CREATE TABLE onceward_secret (
    only_row    INTEGER PRIMARY KEY CHECK (only_row = 1),
    secret      BLOB NOT NULL,
    -- Copies of records in memory and in Redis count only for the epoch in which they were read. Removing
    -- a record and restoring a backup renew it: copies from before are not replayed any more.
    cache_epoch TEXT NOT NULL DEFAULT ''
);
INSERT INTO onceward_secret (only_row, secret) VALUES (1, randomblob(32));
