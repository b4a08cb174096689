-- Sessions of operators in the console. Times are seconds since 1970.
CREATE TABLE holdfast_console_sessions (
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

-- For operators, who look requests up by what their customers and logs name.
CREATE INDEX idx_holdfast_idempotency_records_key ON holdfast_idempotency_records (idempotency_key);
CREATE INDEX idx_holdfast_idempotency_records_request_id ON holdfast_idempotency_records (request_id);
CREATE INDEX idx_holdfast_idempotency_records_correlation_id ON holdfast_idempotency_records (correlation_id);
CREATE INDEX idx_holdfast_idempotency_records_created_at ON holdfast_idempotency_records (created_at);
CREATE INDEX idx_holdfast_idempotency_records_tenant_created_at ON holdfast_idempotency_records (tenant, created_at);
CREATE INDEX idx_holdfast_audit_events_correlation_id ON holdfast_audit_events (correlation_id);
CREATE INDEX idx_holdfast_jobs_correlation_id ON holdfast_jobs (correlation_id);
CREATE INDEX idx_holdfast_job_completions_correlation_id ON holdfast_job_completions (correlation_id);
CREATE INDEX idx_holdfast_dead_letters_correlation_id ON holdfast_dead_letters (correlation_id);
