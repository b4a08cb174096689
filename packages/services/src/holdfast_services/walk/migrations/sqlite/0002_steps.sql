-- One row per walker and day: what was reported, what of it counts, and what became of it. The day
-- is the walker's own calendar day (YYYY-MM-DD).
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
    -- What the ledger holds for this day, and how often it was changed.
    credited_energy  INTEGER NOT NULL DEFAULT 0,
    settlements      INTEGER NOT NULL DEFAULT 0,
    -- What a person decided, about the first so many reports, and how many steps they are worth.
    ruling           TEXT CHECK (ruling IN ('accept', 'reject')),
    ruled_reports    INTEGER,
    ruled_count      INTEGER,
    reported_at      TEXT NOT NULL,
    reconciled_at    TEXT,
    PRIMARY KEY (tenant, day)
) WITHOUT ROWID;

-- Days that are not settled, or badly: nearly always none, or today. By status and not by day, as
-- SQLite would else take the primary key and read every day there ever was.
CREATE INDEX idx_step_logs_doubtful ON step_logs (tenant, status) WHERE status <> 'ACCEPTED';

-- Days that carry a streak, so that the one before a day is found at once.
CREATE INDEX idx_step_logs_attested ON step_logs (tenant, day) WHERE streak_length IS NOT NULL;

-- Every report that was taken, in the order of their commits.
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

-- One row per call of /step/ingest that was looked at, and one per day put into quarantine. Kept for
-- 30 days. The summary is JSON; no token is in it.
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

-- For the clean-up alone, which looks at all walkers.
CREATE INDEX idx_attestation_logs_age ON attestation_logs (created_at);

-- One row per walker: the streak as it was settled last, and where the walker was last heard of.
CREATE TABLE streak_states (
    tenant               TEXT NOT NULL PRIMARY KEY,
    current_length_days  INTEGER NOT NULL DEFAULT 0,
    last_attested_date   TEXT,
    bonus_tier           INTEGER NOT NULL DEFAULT 0,
    decay_at             TEXT,
    -- When a day last came out attested.
    attested_at          TEXT,
    total_lifetime_steps INTEGER NOT NULL DEFAULT 0,
    tz                   TEXT NOT NULL,
    utc_offset_seconds   INTEGER NOT NULL,
    synced_at            TEXT NOT NULL
) WITHOUT ROWID;

-- What a person has to look at: a day in quarantine, or a walker whose reports were rejected too
-- often. The day is empty for the latter. Reasons are JSON.
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

-- One open review about one thing, however many find out at once.
CREATE UNIQUE INDEX idx_walk_reviews_open ON walk_reviews (tenant, kind, day)
    WHERE status = 'open';

-- Admins look across all walkers: the two indexes that do not begin with the tenant.
CREATE UNIQUE INDEX idx_walk_reviews_id ON walk_reviews (id);
CREATE INDEX idx_walk_reviews_status ON walk_reviews (status, id);
