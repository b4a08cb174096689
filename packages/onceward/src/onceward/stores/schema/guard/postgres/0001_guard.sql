-- The stored outcome of each guarded request. The tenant is the first column of the primary key, so
-- no query crosses tenants. Its parts are compared byte by byte (COLLATE "C"): faster, the same
-- order as on SQLite, and the order convert_from() yields, without which the claim's look-up
-- could not use this index.
--
-- Not partitioned by time: a unique constraint of a partitioned table must contain the partition
-- key, and the constraint on (tenant, endpoint, idempotency_key) alone is what makes a second
-- effect impossible. See docs/decisions/0005-expiry-at-100-million-records.md.
CREATE TABLE onceward_idempotency_records (
    tenant              text        COLLATE "C" NOT NULL,
    endpoint            text        COLLATE "C" NOT NULL,
    idempotency_key     text        COLLATE "C" NOT NULL,
    canonical_body_hash text        NOT NULL,
    request_fingerprint text        NOT NULL,
    response_status     integer     NOT NULL,
    response_body       bytea       NOT NULL,
    response_headers    jsonb       NOT NULL,
    request_id          text        NOT NULL,
    correlation_id      text        NOT NULL,
    audit_id            text,
    created_at          timestamptz NOT NULL,
    expires_at          timestamptz NOT NULL,
    -- When the user acted, by the device's clock, if the request said so.
    client_generated_at timestamptz,
    PRIMARY KEY (tenant, endpoint, idempotency_key)
) WITH (
    -- Rows are written once and deleted once: vacuum early and in small batches.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_insert_scale_factor = 0.05
);

-- For the sweep, which deletes the oldest first.
CREATE INDEX idx_onceward_idempotency_records_expires_at ON onceward_idempotency_records (expires_at);
-- For operators, who look requests up by what their customers and logs name, and list what is newest.
CREATE INDEX idx_onceward_idempotency_records_key ON onceward_idempotency_records (idempotency_key);
CREATE INDEX idx_onceward_idempotency_records_request ON onceward_idempotency_records (request_id);
CREATE INDEX idx_onceward_idempotency_records_trace ON onceward_idempotency_records (correlation_id);
-- There are few endpoints: the newest records of all are the newest ones of each.
CREATE INDEX idx_onceward_idempotency_records_endpoint ON onceward_idempotency_records (endpoint, created_at);
CREATE INDEX idx_onceward_idempotency_records_by_tenant ON onceward_idempotency_records (tenant, created_at);

-- Who did what. Outlives the record. Ids sort by time, so pages by id are pages by time.
CREATE TABLE onceward_audit_events (
    tenant         text        COLLATE "C" NOT NULL,
    id             text        COLLATE "C" NOT NULL,
    actor          text        NOT NULL,
    endpoint       text        NOT NULL,
    payload_hash   text        NOT NULL,
    status         integer     NOT NULL,
    resource       text,
    version        bigint,
    request_id     text        NOT NULL,
    correlation_id text        NOT NULL,
    created_at     timestamptz NOT NULL,
    -- Why an operator did something, for events that are not requests.
    reason         text,
    -- The seal that covers the event; null until it is sealed. Writers never set it.
    seal           bigint,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX idx_onceward_audit_events_correlation_id ON onceward_audit_events (correlation_id);

-- A random secret of this database: it authenticates cached copies of records.
CREATE TABLE onceward_secret (
    only_row    integer PRIMARY KEY CHECK (only_row = 1),
    secret      bytea NOT NULL,
    -- Copies of records in memory and in Redis count only for the epoch in which they were read. Removing
    -- a record and restoring a backup renew it: copies from before are not replayed any more.
    cache_epoch text NOT NULL DEFAULT ''
);
INSERT INTO onceward_secret (only_row, secret)
VALUES (1, decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));
