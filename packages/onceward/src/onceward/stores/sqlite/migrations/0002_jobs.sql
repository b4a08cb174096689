-- Waiting and running jobs only: a finished job is deleted, so a claim is as fast after a million
-- jobs as after one. Jobs are inserted in the transaction of the request that enqueues them.
--
-- visible_at is when a worker may lease the job: its due time, or, while it runs, the end of its
-- lease. So the job of a dead worker becomes available without any action. Jobs that wait for another
-- one of their order_key are visible at infinity (9e15) until they are first. Times are whole
-- milliseconds since 1970 from SQLite's clock.
CREATE TABLE onceward_jobs (
    seq            INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant         TEXT    NOT NULL,
    id             TEXT    NOT NULL,
    key            TEXT    NOT NULL,
    queue          TEXT    NOT NULL,
    type           TEXT    NOT NULL,
    resource_id    TEXT,
    payload        TEXT    NOT NULL,
    payload_hash   TEXT    NOT NULL,
    coalesce_key   TEXT,
    -- The coalescing key until the job is started for the first time.
    waiting_key    TEXT,
    merged         INTEGER NOT NULL DEFAULT 0,
    order_key      TEXT,
    state          TEXT    NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running')),
    visible_at     INTEGER NOT NULL,
    run_at         INTEGER NOT NULL,
    attempts       INTEGER NOT NULL DEFAULT 0,
    max_attempts   INTEGER NOT NULL,
    -- The fencing token: a new number for every lease.
    lease          INTEGER NOT NULL DEFAULT 0,
    worker         TEXT,
    published      INTEGER NOT NULL DEFAULT 0,
    published_at   INTEGER,
    actor          TEXT    NOT NULL,
    request_id     TEXT    NOT NULL,
    correlation_id TEXT    NOT NULL,
    enqueued_at    INTEGER NOT NULL,
    started_at     INTEGER,
    UNIQUE (tenant, id)
);

-- For the claim, oldest first. The only index that does not start with the tenant: a worker serves
-- all tenants.
CREATE INDEX idx_onceward_jobs_visible_at ON onceward_jobs (queue, visible_at);
CREATE UNIQUE INDEX idx_onceward_jobs_waiting_key ON onceward_jobs (tenant, queue, type, waiting_key)
 WHERE waiting_key IS NOT NULL;
CREATE INDEX idx_onceward_jobs_order_key ON onceward_jobs (tenant, order_key, seq) WHERE order_key IS NOT NULL;

-- Completion markers, written in the transaction of the effects. They decide whether a job is done.
CREATE TABLE onceward_job_completions (
    tenant         TEXT    NOT NULL,
    job_id         TEXT    NOT NULL,
    key            TEXT    NOT NULL,
    queue          TEXT    NOT NULL,
    type           TEXT    NOT NULL,
    resource_id    TEXT,
    payload_hash   TEXT    NOT NULL,
    result         TEXT,
    attempts       INTEGER NOT NULL,
    worker         TEXT,
    request_id     TEXT    NOT NULL,
    correlation_id TEXT    NOT NULL,
    enqueued_at    INTEGER NOT NULL,
    completed_at   INTEGER NOT NULL,
    PRIMARY KEY (tenant, job_id)
);
CREATE INDEX idx_onceward_job_completions_completed_at ON onceward_job_completions (completed_at);

-- Jobs that were given up, with the reason. A requeued one stays.
CREATE TABLE onceward_dead_letters (
    tenant         TEXT    NOT NULL,
    job_id         TEXT    NOT NULL,
    key            TEXT    NOT NULL,
    queue          TEXT    NOT NULL,
    type           TEXT    NOT NULL,
    resource_id    TEXT,
    payload        TEXT    NOT NULL,
    payload_hash   TEXT    NOT NULL,
    order_key      TEXT,
    reason         TEXT    NOT NULL,
    error          TEXT    NOT NULL,
    attempts       INTEGER NOT NULL,
    max_attempts   INTEGER NOT NULL,
    deaths         INTEGER NOT NULL DEFAULT 1,
    actor          TEXT    NOT NULL,
    request_id     TEXT    NOT NULL,
    correlation_id TEXT    NOT NULL,
    enqueued_at    INTEGER NOT NULL,
    died_at        INTEGER NOT NULL,
    requeued_at    INTEGER,
    PRIMARY KEY (tenant, job_id)
);
CREATE INDEX idx_onceward_dead_letters_died_at ON onceward_dead_letters (died_at);

-- Every failed attempt.
CREATE TABLE onceward_job_failures (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant    TEXT    NOT NULL,
    job_id    TEXT    NOT NULL,
    attempt   INTEGER NOT NULL,
    reason    TEXT    NOT NULL,
    error     TEXT    NOT NULL,
    worker    TEXT,
    failed_at INTEGER NOT NULL
);
CREATE INDEX idx_onceward_job_failures_job ON onceward_job_failures (tenant, job_id, seq);

-- Finished steps of jobs that call other services: a retry continues after the last one.
CREATE TABLE onceward_job_steps (
    tenant      TEXT    NOT NULL,
    job_id      TEXT    NOT NULL,
    name        TEXT    NOT NULL,
    result      TEXT    NOT NULL,
    attempt     INTEGER NOT NULL,
    finished_at INTEGER NOT NULL,
    PRIMARY KEY (tenant, job_id, name)
) WITHOUT ROWID;
