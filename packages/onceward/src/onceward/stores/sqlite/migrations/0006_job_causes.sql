-- The W3C trace context of the request that enqueued a job.
ALTER TABLE onceward_jobs ADD COLUMN traceparent TEXT;

-- Requests whose job was merged into one that waited or ran already. The first request is in the row
-- of the job itself.
CREATE TABLE onceward_job_causes (
    tenant         TEXT    NOT NULL,
    job_id         TEXT    NOT NULL,
    request_id     TEXT    NOT NULL,
    correlation_id TEXT    NOT NULL,
    traceparent    TEXT,
    caused_at      INTEGER NOT NULL,
    PRIMARY KEY (tenant, job_id, request_id)
) WITHOUT ROWID;
