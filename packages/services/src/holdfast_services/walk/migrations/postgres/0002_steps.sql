-- One row per walker and day: what was reported, what of it counts, and what became of it. The day
-- is the walker's own calendar day (YYYY-MM-DD). Text, as on SQLite: days are compared and sorted,
-- never reckoned with, in SQL.
CREATE TABLE step_logs (
    tenant           text NOT NULL,
    day              text NOT NULL,
    status           text NOT NULL
                     CHECK (status IN ('PENDING', 'ACCEPTED', 'QUARANTINED', 'REJECTED')),
    reported_count   integer NOT NULL CHECK (reported_count >= 0),
    accepted_count   integer NOT NULL DEFAULT 0 CHECK (accepted_count >= 0),
    source           text NOT NULL,
    source_bundle_id text NOT NULL,
    tz               text NOT NULL,
    span_start       timestamptz NOT NULL,
    span_end         timestamptz NOT NULL,
    reports          integer NOT NULL,
    -- The streak at the end of this day; NULL unless the day reached the goal.
    streak_length    integer,
    streak_tier      integer,
    -- What the ledger holds for this day, and how often it was changed.
    credited_energy  bigint NOT NULL DEFAULT 0,
    settlements      integer NOT NULL DEFAULT 0,
    -- What a person decided, about the first so many reports, and how many steps they are worth.
    ruling           text CHECK (ruling IN ('accept', 'reject')),
    ruled_reports    integer,
    ruled_count      integer,
    reported_at      timestamptz NOT NULL,
    reconciled_at    timestamptz,
    PRIMARY KEY (tenant, day)
);

-- Days that are not settled, or badly: nearly always none, or today. By status and not by day, as
-- SQLite would else take the primary key and read every day there ever was.
CREATE INDEX idx_step_logs_doubtful ON step_logs (tenant, status) WHERE status <> 'ACCEPTED';

-- Days that carry a streak, so that the one before a day is found at once.
CREATE INDEX idx_step_logs_attested ON step_logs (tenant, day) WHERE streak_length IS NOT NULL;

-- Every report that was taken, in the order of their commits.
CREATE TABLE step_reports (
    tenant              text NOT NULL,
    day                 text NOT NULL,
    number              integer NOT NULL,
    step_count          integer NOT NULL,
    source              text NOT NULL,
    source_bundle_id    text NOT NULL,
    tz                  text NOT NULL,
    span_start          timestamptz NOT NULL,
    span_end            timestamptz NOT NULL,
    client_submitted_at timestamptz NOT NULL,
    token_id            text NOT NULL,
    request_id          text NOT NULL,
    received_at         timestamptz NOT NULL,
    PRIMARY KEY (tenant, day, number)
);

-- One row per call of /step/ingest that was looked at, and one per day put into quarantine. Kept for
-- 30 days. The summary is JSON; no token is in it.
CREATE TABLE attestation_logs (
    tenant       text NOT NULL,
    id           text NOT NULL,
    verdict      text NOT NULL
                 CHECK (verdict IN ('ACCEPTED', 'REJECTED', 'QUARANTINED', 'UNVERIFIED')),
    code         text,
    anti_cheat   integer NOT NULL CHECK (anti_cheat IN (0, 1)),
    token_id     text NOT NULL,
    day          text NOT NULL,
    payload_hash text NOT NULL,
    summary      text NOT NULL,
    request_id   text NOT NULL,
    created_at   timestamptz NOT NULL,
    PRIMARY KEY (tenant, id)
);

CREATE INDEX idx_attestation_logs_anti_cheat ON attestation_logs (tenant, created_at)
    WHERE anti_cheat = 1;

-- For the clean-up alone, which looks at all walkers.
CREATE INDEX idx_attestation_logs_age ON attestation_logs (created_at);

-- One row per walker: the streak as it was settled last, and where the walker was last heard of.
CREATE TABLE streak_states (
    tenant               text NOT NULL PRIMARY KEY,
    current_length_days  integer NOT NULL DEFAULT 0,
    last_attested_date   text,
    bonus_tier           integer NOT NULL DEFAULT 0,
    decay_at             timestamptz,
    -- When a day last came out attested.
    attested_at          timestamptz,
    total_lifetime_steps bigint NOT NULL DEFAULT 0,
    tz                   text NOT NULL,
    utc_offset_seconds   integer NOT NULL,
    synced_at            timestamptz NOT NULL
);

-- What a person has to look at: a day in quarantine, or a walker whose reports were rejected too
-- often. The day is empty for the latter. Reasons are JSON.
CREATE TABLE walk_reviews (
    tenant      text NOT NULL,
    id          text NOT NULL,
    kind        text NOT NULL CHECK (kind IN ('quarantined_day', 'anti_cheat')),
    day         text NOT NULL,
    reasons     text NOT NULL,
    status      text NOT NULL CHECK (status IN ('open', 'resolved')),
    opened_at   timestamptz NOT NULL,
    resolved_at timestamptz,
    resolved_by text,
    decision    text CHECK (decision IN ('accept', 'reject')),
    note        text,
    PRIMARY KEY (tenant, id)
);

-- One open review about one thing, however many find out at once.
CREATE UNIQUE INDEX idx_walk_reviews_open ON walk_reviews (tenant, kind, day)
    WHERE status = 'open';

-- Admins look across all walkers: the two indexes that do not begin with the tenant.
CREATE UNIQUE INDEX idx_walk_reviews_id ON walk_reviews (id);
CREATE INDEX idx_walk_reviews_status ON walk_reviews (status, id);
