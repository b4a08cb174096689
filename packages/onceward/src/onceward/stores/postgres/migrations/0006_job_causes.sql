-- The W3C trace context of the request that enqueued a job.
ALTER TABLE onceward_jobs ADD COLUMN traceparent text;

-- Requests whose job was merged into one that waited or ran already. The first request is in the row
-- of the job itself.
CREATE TABLE onceward_job_causes (
    tenant         text        COLLATE "C" NOT NULL,
    job_id         uuid        NOT NULL,
    request_id     text        COLLATE "C" NOT NULL,
    correlation_id text        NOT NULL,
    traceparent    text,
    caused_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, job_id, request_id)
);
