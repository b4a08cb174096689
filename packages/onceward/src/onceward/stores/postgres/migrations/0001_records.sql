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
    PRIMARY KEY (tenant, endpoint, idempotency_key)
) WITH (
    -- Rows are written once and deleted once: vacuum early and in small batches.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_insert_scale_factor = 0.05
);

-- For the sweep, which deletes the oldest first.
CREATE INDEX idx_onceward_idempotency_records_expires_at ON onceward_idempotency_records (expires_at);

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
    PRIMARY KEY (tenant, id)
);

-- A random secret of this database: it authenticates cached copies of records.
CREATE TABLE onceward_secret (
    only_row integer PRIMARY KEY CHECK (only_row = 1),
    secret   bytea NOT NULL
);
INSERT INTO onceward_secret (only_row, secret)
VALUES (1, decode(replace(gen_random_uuid()::text || gen_random_uuid()::text, '-', ''), 'hex'));

-- Claims a key: first the lock, then the look-up, in two statements with separate snapshots. In one
-- statement the snapshot would be older than the lock, and a record committed in between would be
-- missed. The lock ends with the transaction, so a killed process leaves none behind. The function
-- never waits for the lock: requests wait without holding a connection.
-- The result is a number of rows, which fits into the command tag of a shared message: 0 if the key
-- is claimed, 1 if it has a live record, 2 if it is held, 3 if it is claimed and has an expired
-- record. (An exception for "held" would write the statement, and with it the key, to the server's
-- log.)
CREATE OR REPLACE FUNCTION onceward_claim(
    p_lock bigint, p_tenant text, p_endpoint text, p_key text, p_now timestamptz
) RETURNS SETOF integer LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_expires_at timestamptz;
BEGIN
    IF NOT pg_try_advisory_xact_lock(p_lock) THEN
        RETURN QUERY SELECT generate_series(1, 2);
        RETURN;
    END IF;
    SELECT expires_at INTO v_expires_at FROM onceward_idempotency_records
     WHERE tenant = p_tenant AND endpoint = p_endpoint AND idempotency_key = p_key;
    IF v_expires_at > p_now THEN
        RETURN NEXT 1;
    ELSIF v_expires_at IS NOT NULL THEN
        RETURN QUERY SELECT generate_series(1, 3);
    END IF;
END $$;

-- Writes the record and the audit event. The primary key decides: if the key has a live record, this
-- raises, and the transaction cannot commit. An expired record is overwritten.
CREATE OR REPLACE FUNCTION onceward_finish(
    p_tenant text, p_endpoint text, p_key text, p_body_hash text, p_fingerprint text,
    p_status integer, p_body bytea, p_headers text,
    p_request_id text, p_correlation_id text, p_created_at timestamptz, p_expires_at timestamptz,
    p_audit_id text, p_actor text, p_resource text, p_version bigint
) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO onceward_idempotency_records AS old
           (tenant, endpoint, idempotency_key, canonical_body_hash, request_fingerprint,
            response_status, response_body, response_headers,
            request_id, correlation_id, audit_id, created_at, expires_at)
    VALUES (p_tenant, p_endpoint, p_key, p_body_hash, p_fingerprint,
            p_status, p_body, p_headers::jsonb,
            p_request_id, p_correlation_id, p_audit_id, p_created_at, p_expires_at)
        ON CONFLICT (tenant, endpoint, idempotency_key) DO UPDATE
       SET canonical_body_hash = excluded.canonical_body_hash,
           request_fingerprint = excluded.request_fingerprint,
           response_status     = excluded.response_status,
           response_body       = excluded.response_body,
           response_headers    = excluded.response_headers,
           request_id          = excluded.request_id,
           correlation_id      = excluded.correlation_id,
           audit_id            = excluded.audit_id,
           created_at          = excluded.created_at,
           expires_at          = excluded.expires_at
     WHERE old.expires_at <= excluded.created_at;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the key was recorded by another' USING ERRCODE = 'HF002';
    END IF;
    IF p_audit_id IS NOT NULL THEN
        INSERT INTO onceward_audit_events
               (tenant, id, actor, endpoint, payload_hash, status, resource, version,
                request_id, correlation_id, created_at)
        VALUES (p_tenant, p_audit_id, p_actor, p_endpoint, p_body_hash, p_status, p_resource,
                p_version, p_request_id, p_correlation_id, p_created_at);
    END IF;
END $$;
