-- Sessions of operators in the console. Times are seconds since 1970.
CREATE TABLE onceward_console_sessions (
    id_hash       TEXT NOT NULL PRIMARY KEY,
    subject       TEXT NOT NULL,
    role          TEXT NOT NULL,
    -- JSON: the tenants that may be seen, or null for all.
    tenants       TEXT NOT NULL,
    sees_payloads INTEGER NOT NULL,
    form_token    TEXT NOT NULL,
    used_at       REAL NOT NULL,
    ends_at       REAL NOT NULL
);

-- For operators, who look requests up by what their customers and logs name. Lists by key and time
-- have no index here: each costs a request more than ten microseconds, and a file has fewer records
-- than a server.
CREATE INDEX idx_onceward_idempotency_records_request ON onceward_idempotency_records (request_id);
CREATE INDEX idx_onceward_idempotency_records_trace ON onceward_idempotency_records (correlation_id);
CREATE INDEX idx_onceward_audit_events_correlation_id ON onceward_audit_events (correlation_id);
CREATE INDEX idx_onceward_jobs_correlation_id ON onceward_jobs (correlation_id);
-- Among many that wait, no other index finds those that run.
CREATE INDEX idx_onceward_jobs_running ON onceward_jobs (queue, visible_at) WHERE state = 'running';
CREATE INDEX idx_onceward_job_completions_correlation_id ON onceward_job_completions (correlation_id);
CREATE INDEX idx_onceward_job_completions_by_tenant ON onceward_job_completions (tenant, completed_at);
CREATE INDEX idx_onceward_dead_letters_correlation_id ON onceward_dead_letters (correlation_id);
-- Requeued ones stay for a while; lists and counts must not read them.
CREATE INDEX idx_onceward_dead_letters_open ON onceward_dead_letters (died_at) WHERE requeued_at IS NULL;
CREATE INDEX idx_onceward_dead_letters_by_tenant ON onceward_dead_letters (tenant, died_at)
    WHERE requeued_at IS NULL;
DROP INDEX idx_onceward_dead_letters_queue;
CREATE INDEX idx_onceward_dead_letters_queue ON onceward_dead_letters (queue, died_at)
    WHERE requeued_at IS NULL;

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
    differs               TEXT
);
CREATE INDEX idx_onceward_request_log_at ON onceward_request_log (at);
CREATE INDEX idx_onceward_request_log_request_id ON onceward_request_log (request_id);
CREATE INDEX idx_onceward_request_log_correlation_id ON onceward_request_log (correlation_id);
CREATE INDEX idx_onceward_request_log_key_hash ON onceward_request_log (tenant, key_hash);

-- Numbers of the last hours by minute, process and name, for the console and onceward top.
CREATE TABLE onceward_request_counts (
    minute  INTEGER NOT NULL,
    process TEXT    NOT NULL,
    name    TEXT    NOT NULL,
    number  REAL    NOT NULL,
    PRIMARY KEY (minute, process, name)
) WITHOUT ROWID;

-- Queues whose jobs are not claimed.
CREATE TABLE onceward_paused_queues (
    queue     TEXT NOT NULL PRIMARY KEY,
    actor     TEXT NOT NULL,
    reason    TEXT NOT NULL,
    paused_at REAL NOT NULL
);
