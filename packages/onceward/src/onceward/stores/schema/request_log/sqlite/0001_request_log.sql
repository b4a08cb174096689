-- Replays, mismatches and refusals: what leaves no record. Written in batches after the responses,
-- without payloads, and kept for some days. Times are seconds since 1970.
CREATE TABLE onceward_request_log (
    id                    INTEGER PRIMARY KEY,
    at                    REAL    NOT NULL,
    tenant                TEXT    NOT NULL,
    endpoint              TEXT    NOT NULL,
    -- SHA-256 of the key; empty without one.
    key_hash              TEXT    NOT NULL,
    request_id            TEXT    NOT NULL,
    correlation_id        TEXT    NOT NULL,
    outcome               TEXT    NOT NULL,
    status                INTEGER,
    original_request_id   TEXT,
    expected_body_hash    TEXT,
    received_body_hash    TEXT,
    expected_request_hash TEXT,
    received_request_hash TEXT,
    -- The parts in which a mismatched request differs from the first one.
    differs               TEXT,
    -- The error code of the response.
    code                  TEXT
);
CREATE INDEX idx_onceward_request_log_at ON onceward_request_log (at);
CREATE INDEX idx_onceward_request_log_request_id ON onceward_request_log (request_id);
CREATE INDEX idx_onceward_request_log_correlation_id ON onceward_request_log (correlation_id);
CREATE INDEX idx_onceward_request_log_key_hash ON onceward_request_log (tenant, key_hash);
-- Operators look a key up in all tenants, too.
CREATE INDEX idx_onceward_request_log_key ON onceward_request_log (key_hash);

-- Numbers of the last hours by minute, process and name, for the console and onceward top.
CREATE TABLE onceward_request_counts (
    minute  INTEGER NOT NULL,
    process TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    number  REAL    NOT NULL,
    PRIMARY KEY (minute, process, name)
) WITHOUT ROWID;
