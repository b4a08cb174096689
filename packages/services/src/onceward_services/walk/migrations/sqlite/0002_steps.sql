-- One row per walker and day: the reported count, the accepted count and the status. The day is a
-- calendar day of the walker (YYYY-MM-DD).
CREATE TABLE step_logs (
    tenant           TEXT NOT NULL,
    day              TEXT NOT NULL,
    status           TEXT NOT NULL
                     CHECK (status IN ('PENDING', 'ACCEPTED', 'QUARANTINED', 'REJECTED')),
    reported_count   INTEGER NOT NULL CHECK (reported_count >= 0),
    accepted_count   INTEGER NOT NULL DEFAULT 0 CHECK (accepted_count >= 0),
    source           TEXT NOT NULL,
    source_bundle_id TEXT NOT NULL,
    tz               TEXT NOT NULL,
    span_start       TEXT NOT NULL,
    span_end         TEXT NOT NULL,
    reports          INTEGER NOT NULL,
    -- The streak at the end of this day; NULL unless the day reached the goal.
    streak_length    INTEGER,
    streak_tier      INTEGER,
    -- The energy booked for this day, and how often the day was settled.
    credited_energy  INTEGER NOT NULL DEFAULT 0,
    settlements      INTEGER NOT NULL DEFAULT 0,
    -- An admin's decision, the number of reports it covers, and the accepted steps.
    ruling           TEXT CHECK (ruling IN ('accept', 'reject')),
    ruled_reports    INTEGER,
    ruled_count      INTEGER,
    reported_at      TEXT NOT NULL,
    reconciled_at    TEXT,
    PRIMARY KEY (tenant, day)
) WITHOUT ROWID;

-- Days that are pending, quarantined or rejected: usually none, or today. By status and not by day,
-- because SQLite would otherwise use the primary key and read all days.
CREATE INDEX idx_step_logs_doubtful ON step_logs (tenant, status) WHERE status <> 'ACCEPTED';

-- Attested days, to find the one before a day.
CREATE INDEX idx_step_logs_attested ON step_logs (tenant, day) WHERE streak_length IS NOT NULL;

-- Every accepted report, in commit order.
CREATE TABLE step_reports (
    tenant              TEXT NOT NULL,
    day                 TEXT NOT NULL,
    number              INTEGER NOT NULL,
    step_count          INTEGER NOT NULL,
    source              TEXT NOT NULL,
    source_bundle_id    TEXT NOT NULL,
    tz                  TEXT NOT NULL,
    span_start          TEXT NOT NULL,
    span_end            TEXT NOT NULL,
    client_submitted_at TEXT NOT NULL,
    token_id            TEXT NOT NULL,
    request_id          TEXT NOT NULL,
    received_at         TEXT NOT NULL,
    PRIMARY KEY (tenant, day, number)
) WITHOUT ROWID;

-- One row per request of /step/ingest and one per quarantined or rejected day. Kept for 30 days. The
-- summary is JSON without the token.
CREATE TABLE attestation_logs (
    tenant       TEXT NOT NULL,
    id           TEXT NOT NULL,
    verdict      TEXT NOT NULL
                 CHECK (verdict IN ('ACCEPTED', 'REJECTED', 'QUARANTINED', 'UNVERIFIED')),
    code         TEXT,
    anti_cheat   INTEGER NOT NULL CHECK (anti_cheat IN (0, 1)),
    token_id     TEXT NOT NULL,
    day          TEXT NOT NULL,
    payload_hash TEXT NOT NULL,
    summary      TEXT NOT NULL,
    request_id   TEXT NOT NULL,
    created_at   TEXT NOT NULL,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;

CREATE INDEX idx_attestation_logs_anti_cheat ON attestation_logs (tenant, created_at)
    WHERE anti_cheat = 1;

-- For the clean-up, which reads the rows of all walkers.
CREATE INDEX idx_attestation_logs_age ON attestation_logs (created_at);

-- One row per walker: the streak as last settled, and the time zone of the last report.
CREATE TABLE streak_states (
    tenant               TEXT NOT NULL PRIMARY KEY,
    current_length_days  INTEGER NOT NULL DEFAULT 0,
    last_attested_date   TEXT,
    bonus_tier           INTEGER NOT NULL DEFAULT 0,
    decay_at             TEXT,
    -- When a day was last settled as attested.
    attested_at          TEXT,
    total_lifetime_steps INTEGER NOT NULL DEFAULT 0,
    tz                   TEXT NOT NULL,
    utc_offset_seconds   INTEGER NOT NULL,
    synced_at            TEXT NOT NULL
) WITHOUT ROWID;

-- Reviews by admins: of a quarantined day, or of a walker whose reports were rejected too often, for
-- whom the day is empty. Reasons are JSON.
CREATE TABLE walk_reviews (
    tenant      TEXT NOT NULL,
    id          TEXT NOT NULL,
    kind        TEXT NOT NULL CHECK (kind IN ('quarantined_day', 'anti_cheat')),
    day         TEXT NOT NULL,
    reasons     TEXT NOT NULL,
    status      TEXT NOT NULL CHECK (status IN ('open', 'resolved')),
    opened_at   TEXT NOT NULL,
    resolved_at TEXT,
    resolved_by TEXT,
    decision    TEXT CHECK (decision IN ('accept', 'reject')),
    note        TEXT,
    PRIMARY KEY (tenant, id)
) WITHOUT ROWID;

-- At most one open review per subject, also under concurrency.
CREATE UNIQUE INDEX idx_walk_reviews_open ON walk_reviews (tenant, kind, day)
    WHERE status = 'open';

-- Admins see all walkers, so these two indexes do not begin with the tenant.
CREATE UNIQUE INDEX idx_walk_reviews_id ON walk_reviews (id);
CREATE INDEX idx_walk_reviews_status ON walk_reviews (status, id);
