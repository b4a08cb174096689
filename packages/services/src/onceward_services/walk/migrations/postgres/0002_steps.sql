-- One row per walker and day: the reported count, the accepted count and the status. The day is a
-- calendar day of the walker (YYYY-MM-DD), stored as text as on SQLite: SQL only compares and sorts it.
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
    -- The energy booked for this day, and how often the day was settled.
    credited_energy  bigint NOT NULL DEFAULT 0,
    settlements      integer NOT NULL DEFAULT 0,
    -- An admin's decision, the number of reports it covers, and the accepted steps.
    ruling           text CHECK (ruling IN ('accept', 'reject')),
    ruled_reports    integer,
    ruled_count      integer,
    reported_at      timestamptz NOT NULL,
    reconciled_at    timestamptz,
    PRIMARY KEY (tenant, day)
);

-- Days that are pending, quarantined or rejected: usually none, or today. By status and not by day,
-- because SQLite would otherwise use the primary key and read all days.
CREATE INDEX idx_step_logs_doubtful ON step_logs (tenant, status) WHERE status <> 'ACCEPTED';

-- Attested days, to find the one before a day.
CREATE INDEX idx_step_logs_attested ON step_logs (tenant, day) WHERE streak_length IS NOT NULL;

-- Every accepted report, in commit order.
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

-- One row per request of /step/ingest and one per quarantined or rejected day. Kept for 30 days. The
-- summary is JSON without the token.
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

-- For the clean-up, which reads the rows of all walkers.
CREATE INDEX idx_attestation_logs_age ON attestation_logs (created_at);

-- One row per walker: the streak as last settled, and the time zone of the last report.
CREATE TABLE streak_states (
    tenant               text NOT NULL PRIMARY KEY,
    current_length_days  integer NOT NULL DEFAULT 0,
    last_attested_date   text,
    bonus_tier           integer NOT NULL DEFAULT 0,
    decay_at             timestamptz,
    -- When a day was last settled as attested.
    attested_at          timestamptz,
    total_lifetime_steps bigint NOT NULL DEFAULT 0,
    tz                   text NOT NULL,
    utc_offset_seconds   integer NOT NULL,
    synced_at            timestamptz NOT NULL
);

-- Reviews by admins: of a quarantined day, or of a walker whose reports were rejected too often, for
-- whom the day is empty. Reasons are JSON.
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

-- At most one open review per subject, also under concurrency.
CREATE UNIQUE INDEX idx_walk_reviews_open ON walk_reviews (tenant, kind, day)
    WHERE status = 'open';

-- Admins see all walkers, so these two indexes do not begin with the tenant.
CREATE UNIQUE INDEX idx_walk_reviews_id ON walk_reviews (id);
CREATE INDEX idx_walk_reviews_status ON walk_reviews (status, id);
