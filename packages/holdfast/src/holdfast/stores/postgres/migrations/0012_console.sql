-- Sessions of operators in the console. Times are seconds since 1970.
CREATE TABLE holdfast_console_sessions (
    id_hash       text NOT NULL PRIMARY KEY,
    subject       text NOT NULL,
    role          text NOT NULL,
    -- JSON: the tenants that may be seen, or null for all.
    tenants       text NOT NULL,
    sees_payloads integer NOT NULL,
    form_token    text NOT NULL,
    used_at       double precision NOT NULL,
    ends_at       double precision NOT NULL
);

-- For operators, who look requests up by what their customers and logs name.
CREATE INDEX idx_holdfast_idempotency_records_key ON holdfast_idempotency_records (idempotency_key);
CREATE INDEX idx_holdfast_idempotency_records_request ON holdfast_idempotency_records (request_id);
CREATE INDEX idx_holdfast_idempotency_records_trace ON holdfast_idempotency_records (correlation_id);
CREATE INDEX idx_holdfast_idempotency_records_created_at ON holdfast_idempotency_records (created_at);
CREATE INDEX idx_holdfast_idempotency_records_by_tenant ON holdfast_idempotency_records (tenant, created_at);
CREATE INDEX idx_holdfast_audit_events_correlation_id ON holdfast_audit_events (correlation_id);
CREATE INDEX idx_holdfast_jobs_correlation_id ON holdfast_jobs (correlation_id);
CREATE INDEX idx_holdfast_job_completions_correlation_id ON holdfast_job_completions (correlation_id);
CREATE INDEX idx_holdfast_job_completions_by_tenant ON holdfast_job_completions (tenant, completed_at);
CREATE INDEX idx_holdfast_dead_letters_by_tenant ON holdfast_dead_letters (tenant, died_at);
CREATE INDEX idx_holdfast_dead_letters_correlation_id ON holdfast_dead_letters (correlation_id);

-- Replays, mismatches and refusals: what leaves no record. Written in batches after the responses,
-- without payloads, and kept for some days. Times are seconds since 1970.
CREATE TABLE holdfast_request_log (
    tenant                text             COLLATE "C" NOT NULL,
    id                    bigint           GENERATED ALWAYS AS IDENTITY,
    at                    double precision NOT NULL,
    endpoint              text             COLLATE "C" NOT NULL,
    -- SHA-256 of the key; empty without one.
    key_hash              text             COLLATE "C" NOT NULL,
    request_id            text             COLLATE "C" NOT NULL,
    correlation_id        text             COLLATE "C" NOT NULL,
    outcome               text             NOT NULL,
    status                integer,
    original_request_id   text,
    expected_body_hash    text,
    received_body_hash    text,
    expected_request_hash text,
    received_request_hash text,
    -- The parts in which a mismatched request differs from the first one.
    differs               text,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX idx_holdfast_request_log_at ON holdfast_request_log (at);
CREATE INDEX idx_holdfast_request_log_request_id ON holdfast_request_log (request_id);
CREATE INDEX idx_holdfast_request_log_correlation_id ON holdfast_request_log (correlation_id);
CREATE INDEX idx_holdfast_request_log_key_hash ON holdfast_request_log (tenant, key_hash);

-- Numbers of the last hours by minute, process and name, for the console and holdfast top.
CREATE TABLE holdfast_request_counts (
    minute  bigint           NOT NULL,
    process text             COLLATE "C" NOT NULL,
    name    text             COLLATE "C" NOT NULL,
    number  double precision NOT NULL,
    PRIMARY KEY (minute, process, name)
);

-- Queues whose jobs are not claimed.
CREATE TABLE holdfast_paused_queues (
    queue     text             COLLATE "C" NOT NULL PRIMARY KEY,
    actor     text             NOT NULL,
    reason    text             NOT NULL,
    paused_at double precision NOT NULL
);
