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
    -- While it runs, whether the worker runs no other job: only then a lost attempt counts, for the job
    -- may be the cause. One that was lost twice in a row beside others is run alone the next time, so that
    -- a job that kills its worker is found, and the jobs beside it keep their attempts.
    alone          INTEGER NOT NULL DEFAULT 0,
    -- Attempts in a row that were lost beside other jobs. They do not count in attempts.
    lost           INTEGER NOT NULL DEFAULT 0,
    published      INTEGER NOT NULL DEFAULT 0,
    published_at   INTEGER,
    actor          TEXT    NOT NULL,
    request_id     TEXT    NOT NULL,
    correlation_id TEXT    NOT NULL,
    -- The W3C trace context of the request that enqueued it.
    traceparent    TEXT,
    -- The version of the aggregate that it follows from, for its audit events.
    version        INTEGER,
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
CREATE INDEX idx_onceward_jobs_correlation_id ON onceward_jobs (correlation_id);
-- Among many that wait, no other index finds those that run.
CREATE INDEX idx_onceward_jobs_running ON onceward_jobs (queue, visible_at) WHERE state = 'running';

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
CREATE INDEX idx_onceward_job_completions_correlation_id ON onceward_job_completions (correlation_id);
CREATE INDEX idx_onceward_job_completions_by_tenant ON onceward_job_completions (tenant, completed_at);

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
    version        INTEGER,
    PRIMARY KEY (tenant, job_id)
);
CREATE INDEX idx_onceward_dead_letters_died_at ON onceward_dead_letters (died_at);
CREATE INDEX idx_onceward_dead_letters_correlation_id ON onceward_dead_letters (correlation_id);
-- Requeued ones stay for a while; lists and counts must not read them.
CREATE INDEX idx_onceward_dead_letters_open ON onceward_dead_letters (died_at) WHERE requeued_at IS NULL;
CREATE INDEX idx_onceward_dead_letters_by_tenant ON onceward_dead_letters (tenant, died_at)
 WHERE requeued_at IS NULL;
CREATE INDEX idx_onceward_dead_letters_queue ON onceward_dead_letters (queue, died_at)
 WHERE requeued_at IS NULL;

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

-- Records a lost attempt when a claim takes a job from a worker that died, hung or lost its lease. A
-- trigger, because the claim is one statement that commits at once: a second one would cost every claim a
-- transaction and might be lost. A claim after the last attempt only dead-letters the job, and does not
-- count as an attempt.
CREATE TRIGGER onceward_jobs_attempt_lost AFTER UPDATE OF lease ON onceward_jobs
WHEN old.state = 'running' AND new.lease > old.lease AND old.attempts <= old.max_attempts
BEGIN
    INSERT INTO onceward_job_failures (tenant, job_id, attempt, reason, error, worker, failed_at)
    VALUES (old.tenant, old.id, old.attempts, 'worker_lost',
            CASE WHEN old.alone THEN 'the worker died, hung or lost its lease'
                 ELSE 'the worker died, hung or lost its lease while it ran other jobs, too: '
                      || 'does not count as an attempt' END,
            old.worker, new.started_at);
END;

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
CREATE INDEX idx_onceward_job_causes_correlation_id ON onceward_job_causes (correlation_id);

-- Queues whose jobs are not claimed.
CREATE TABLE onceward_paused_queues (
    queue     TEXT NOT NULL PRIMARY KEY,
    actor     TEXT NOT NULL,
    reason    TEXT NOT NULL,
    paused_at REAL NOT NULL
);
