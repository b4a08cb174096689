-- Waiting and running jobs only: a finished job is deleted, so a claim is as fast after a million
-- jobs as after one. Jobs are inserted in the transaction of the request that enqueues them.
--
-- visible_at is when a worker may lease the job: its due time, or, while it runs, the end of its
-- lease. So the job of a dead worker becomes available without any action. Jobs that wait for another
-- one of their order_key are visible at infinity until they are first.
CREATE TABLE onceward_jobs (
    tenant         text        COLLATE "C" NOT NULL,
    id             uuid        NOT NULL,
    key            text        NOT NULL,
    queue          text        COLLATE "C" NOT NULL,
    type           text        COLLATE "C" NOT NULL,
    resource_id    text,
    payload        text        NOT NULL,
    payload_hash   text        NOT NULL,
    coalesce_key   text        COLLATE "C",
    -- The coalescing key until the job is started for the first time.
    waiting_key    text        COLLATE "C",
    merged         integer     NOT NULL DEFAULT 0,
    order_key      text        COLLATE "C",
    seq            bigint      GENERATED ALWAYS AS IDENTITY,
    state          text        NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running')),
    visible_at     timestamptz NOT NULL,
    run_at         timestamptz NOT NULL,
    attempts       integer     NOT NULL DEFAULT 0,
    max_attempts   integer     NOT NULL,
    -- The fencing token: a new number for every lease.
    lease          bigint      NOT NULL DEFAULT 0,
    worker         text,
    -- While it runs, whether the worker runs no other job: only then a lost attempt counts, for the job
    -- may be the cause. One that was lost twice in a row beside others is run alone the next time, so that
    -- a job that kills its worker is found, and the jobs beside it keep their attempts.
    alone          boolean NOT NULL DEFAULT false,
    -- Attempts in a row that were lost beside other jobs. They do not count in attempts.
    lost           integer NOT NULL DEFAULT 0,
    published      integer     NOT NULL DEFAULT 0,
    published_at   timestamptz,
    actor          text        NOT NULL,
    request_id     text        NOT NULL,
    correlation_id text        NOT NULL,
    -- The W3C trace context of the request that enqueued it.
    traceparent    text,
    -- The version of the aggregate that it follows from, for its audit events.
    version        bigint,
    enqueued_at    timestamptz NOT NULL DEFAULT statement_timestamp(),
    started_at     timestamptz,
    PRIMARY KEY (tenant, id)
) WITH (
    -- Every row is inserted, updated and deleted: vacuum early, or the claim reads dead rows.
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0.2
);

-- For the claim, oldest first. The only index that does not start with the tenant: a worker serves
-- all tenants.
CREATE INDEX idx_onceward_jobs_visible_at ON onceward_jobs (queue, visible_at);
CREATE UNIQUE INDEX idx_onceward_jobs_waiting_key ON onceward_jobs (tenant, queue, type, waiting_key)
 WHERE waiting_key IS NOT NULL;
CREATE INDEX idx_onceward_jobs_order_key ON onceward_jobs (tenant, order_key, seq) WHERE order_key IS NOT NULL;
CREATE INDEX idx_onceward_jobs_correlation_id ON onceward_jobs (correlation_id);
-- Among a million that wait, no other index finds those that run.
CREATE INDEX idx_onceward_jobs_running ON onceward_jobs (queue, visible_at) WHERE state = 'running';

-- Completion markers, written in the transaction of the effects. They decide whether a job is done.
CREATE TABLE onceward_job_completions (
    tenant         text        COLLATE "C" NOT NULL,
    job_id         uuid        NOT NULL,
    key            text        NOT NULL,
    queue          text        NOT NULL,
    type           text        NOT NULL,
    resource_id    text,
    payload_hash   text        NOT NULL,
    result         text,
    attempts       integer     NOT NULL,
    worker         text,
    request_id     text        NOT NULL,
    correlation_id text        NOT NULL,
    enqueued_at    timestamptz NOT NULL,
    completed_at   timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (tenant, job_id)
);
CREATE INDEX idx_onceward_job_completions_completed_at ON onceward_job_completions (completed_at);
CREATE INDEX idx_onceward_job_completions_correlation_id ON onceward_job_completions (correlation_id);
CREATE INDEX idx_onceward_job_completions_by_tenant ON onceward_job_completions (tenant, completed_at);

-- Jobs that were given up, with the reason. A requeued one stays.
CREATE TABLE onceward_dead_letters (
    tenant         text        COLLATE "C" NOT NULL,
    job_id         uuid        NOT NULL,
    key            text        NOT NULL,
    queue          text        NOT NULL,
    type           text        NOT NULL,
    resource_id    text,
    payload        text        NOT NULL,
    payload_hash   text        NOT NULL,
    order_key      text,
    reason         text        NOT NULL,
    error          text        NOT NULL,
    attempts       integer     NOT NULL,
    max_attempts   integer     NOT NULL,
    deaths         integer     NOT NULL DEFAULT 1,
    actor          text        NOT NULL,
    request_id     text        NOT NULL,
    correlation_id text        NOT NULL,
    enqueued_at    timestamptz NOT NULL,
    died_at        timestamptz NOT NULL DEFAULT statement_timestamp(),
    requeued_at    timestamptz,
    version        bigint,
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
    tenant    text        COLLATE "C" NOT NULL,
    job_id    uuid        NOT NULL,
    seq       bigint      GENERATED ALWAYS AS IDENTITY,
    attempt   integer     NOT NULL,
    reason    text        NOT NULL,
    error     text        NOT NULL,
    worker    text,
    failed_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (tenant, job_id, seq)
);

-- Finished steps of jobs that call other services: a retry continues after the last one.
CREATE TABLE onceward_job_steps (
    tenant      text        COLLATE "C" NOT NULL,
    job_id      uuid        NOT NULL,
    name        text        COLLATE "C" NOT NULL,
    result      text        NOT NULL,
    attempt     integer     NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (tenant, job_id, name)
);

-- Requests whose job was merged into one that waited or ran already. The first request is in the row
-- of the job itself.
CREATE TABLE onceward_job_causes (
    tenant         text        COLLATE "C" NOT NULL,
    job_id         uuid        NOT NULL,
    request_id     text        COLLATE "C" NOT NULL,
    correlation_id text        NOT NULL,
    traceparent    text,
    caused_at      timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (tenant, job_id, request_id)
);
CREATE INDEX idx_onceward_job_causes_correlation_id ON onceward_job_causes (correlation_id);

-- Queues whose jobs are not claimed.
CREATE TABLE onceward_paused_queues (
    queue     text             COLLATE "C" NOT NULL PRIMARY KEY,
    actor     text             NOT NULL,
    reason    text             NOT NULL,
    paused_at double precision NOT NULL
);
