-- Work that waits or runs, and nothing else: a finished job leaves the table, so the claim is as
-- quick after a million jobs as after one. Written in the transaction of the write that causes it.
--
-- visible_at says when a worker may take the job: when it is due, and while it runs, when its lease
-- ends. A worker that dies needs nobody to rescue its job: the instant comes by itself. Jobs that
-- stand in line behind another of their order_key are visible at infinity until they are first.
CREATE TABLE jobs (
    tenant         text        COLLATE "C" NOT NULL,
    id             uuid        NOT NULL,
    key            text        NOT NULL,
    queue          text        COLLATE "C" NOT NULL,
    type           text        COLLATE "C" NOT NULL,
    resource_id    text,
    payload        text        NOT NULL,
    payload_hash   text        NOT NULL,
    coalesce_key   text        COLLATE "C",
    -- The coalescing key as long as the job has never been started.
    waiting_key    text        COLLATE "C",
    merged         integer     NOT NULL DEFAULT 0,
    order_key      text        COLLATE "C",
    seq            bigint      GENERATED ALWAYS AS IDENTITY,
    state          text        NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running')),
    visible_at     timestamptz NOT NULL,
    run_at         timestamptz NOT NULL,
    attempts       integer     NOT NULL DEFAULT 0,
    max_attempts   integer     NOT NULL,
    -- The fencing token: a new number for every worker that takes the job.
    lease          bigint      NOT NULL DEFAULT 0,
    worker         text,
    published      integer     NOT NULL DEFAULT 0,
    published_at   timestamptz,
    actor          text        NOT NULL,
    request_id     text        NOT NULL,
    correlation_id text        NOT NULL,
    enqueued_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at     timestamptz,
    PRIMARY KEY (tenant, id)
) WITH (
    -- Every row is written, rewritten and deleted: vacuum early, or the claim walks over the dead.
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_analyze_scale_factor = 0.2
);

-- The claim walks this from its old end. It is the one index without the tenant in front: a worker
-- serves them all.
CREATE INDEX idx_jobs_visible_at ON jobs (queue, visible_at);
CREATE UNIQUE INDEX idx_jobs_waiting_key ON jobs (tenant, queue, type, waiting_key)
 WHERE waiting_key IS NOT NULL;
CREATE INDEX idx_jobs_order_key ON jobs (tenant, order_key, seq) WHERE order_key IS NOT NULL;

-- The completion markers: written in the transaction of the effect, they decide.
CREATE TABLE job_completions (
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
    completed_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, job_id)
);
CREATE INDEX idx_job_completions_completed_at ON job_completions (completed_at);

-- What was given up, and why. A requeued one stays, as history.
CREATE TABLE dead_letters (
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
    died_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    requeued_at    timestamptz,
    PRIMARY KEY (tenant, job_id)
);
CREATE INDEX idx_dead_letters_died_at ON dead_letters (died_at);

-- Every attempt that failed. Attempts that succeed have their marker.
CREATE TABLE job_failures (
    tenant    text        COLLATE "C" NOT NULL,
    job_id    uuid        NOT NULL,
    seq       bigint      GENERATED ALWAYS AS IDENTITY,
    attempt   integer     NOT NULL,
    reason    text        NOT NULL,
    error     text        NOT NULL,
    worker    text,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, job_id, seq)
);

-- The finished steps of jobs with outside effects: a retry goes on after the last one.
CREATE TABLE job_steps (
    tenant      text        COLLATE "C" NOT NULL,
    job_id      uuid        NOT NULL,
    name        text        COLLATE "C" NOT NULL,
    result      text        NOT NULL,
    attempt     integer     NOT NULL,
    finished_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, job_id, name)
);
