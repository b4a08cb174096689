-- The queue of a device, and what belongs to it.
--
-- Columns that end in _at are UTC on the device's clock, as text, for people and for the server.
-- Columns that end in _ms are milliseconds of the outbox's own time (outbox_clock), which nobody can
-- set: every decision about an entry uses these.

CREATE TABLE users (
    id             TEXT PRIMARY KEY NOT NULL,
    -- The highest sequence number among the entries that were removed: numbers are not used twice.
    sequence_floor INTEGER NOT NULL DEFAULT 0,
    added_at       TEXT NOT NULL
) WITHOUT ROWID;

CREATE TABLE offline_sync_queue (
    id                  TEXT PRIMARY KEY NOT NULL,
    user_id             TEXT NOT NULL REFERENCES users (id),
    operation           TEXT NOT NULL CHECK (
                            operation = 'create' OR operation = 'update' OR operation = 'patch'
                            OR operation = 'delete'),
    entity_type         TEXT NOT NULL,
    local_id            TEXT,
    -- Without a type: a server's number stays a number.
    server_id,
    endpoint            TEXT NOT NULL,
    payload             TEXT,
    headers             TEXT,
    idempotency_key     TEXT NOT NULL,
    -- Not written as IN (...): for each row SQLite would build a table of the values.
    status              TEXT NOT NULL DEFAULT 'pending' CHECK (
                            status = 'pending' OR status = 'in_flight' OR status = 'succeeded'
                            OR status = 'failed' OR status = 'conflict' OR status = 'expired'
                            OR status = 'discarded'),
    attempt_count       INTEGER NOT NULL DEFAULT 0,
    max_attempts        INTEGER NOT NULL,
    next_retry_at       TEXT,
    last_error          TEXT,
    last_error_code     INTEGER,
    sequence_number     INTEGER NOT NULL,
    dependency_ids      TEXT,
    created_at          TEXT NOT NULL,
    synced_at           TEXT,
    conflict_resolution TEXT CHECK (
                            conflict_resolution = 'manual' OR conflict_resolution = 'merge'
                            OR conflict_resolution = 'server_wins'
                            OR conflict_resolution = 'client_wins'),
    priority            INTEGER NOT NULL,

    client_generated_at TEXT NOT NULL,
    profile             TEXT NOT NULL,
    reason              TEXT,
    -- The local ids in it that are replaced by server ids, as a JSON array.
    local_refs          TEXT,
    payload_version     INTEGER NOT NULL DEFAULT 0,
    base                TEXT,
    base_version        TEXT,
    theirs              TEXT,
    theirs_version      TEXT,
    forced              INTEGER NOT NULL DEFAULT 0,
    outcome_unknown     INTEGER NOT NULL DEFAULT 0,

    -- Order. Entries of a lane are sent one after the other: one has the turn, the others wait.
    lane                TEXT,
    turn                INTEGER NOT NULL,
    -- How many rows of entry_waits are not met.
    waiting_for         INTEGER NOT NULL DEFAULT 0,
    -- Set while it waits for its next try, and taken away when that time has come.
    due_ms              INTEGER,

    -- The claim. The number is never used twice, so a late word of a lost claim is known as such.
    claim_number        INTEGER NOT NULL DEFAULT 0,
    claimed_by          TEXT,
    claimed_at          TEXT,
    lease_ms            INTEGER,

    enqueued_ms         INTEGER NOT NULL,
    settled_ms          INTEGER
);

CREATE INDEX idx_offline_sync_queue_user_status
    ON offline_sync_queue (user_id, status);
CREATE INDEX idx_offline_sync_queue_user_sequence
    ON offline_sync_queue (user_id, sequence_number);
CREATE UNIQUE INDEX idx_offline_sync_queue_idempotency_key
    ON offline_sync_queue (idempotency_key);
CREATE INDEX idx_offline_sync_queue_entity_type
    ON offline_sync_queue (entity_type, status);
-- Partial, as are those below: what is not in an index costs no page at each enqueue.
CREATE INDEX idx_offline_sync_queue_status_next_retry
    ON offline_sync_queue (status, next_retry_at) WHERE next_retry_at IS NOT NULL;
CREATE INDEX idx_offline_sync_queue_local_id
    ON offline_sync_queue (local_id) WHERE local_id IS NOT NULL;

-- What can be claimed now, in the order in which it is.
CREATE INDEX idx_offline_sync_queue_ready
    ON offline_sync_queue (user_id, priority DESC, sequence_number)
 WHERE status = 'pending' AND turn = 1 AND waiting_for = 0 AND due_ms IS NULL;
-- What waits for its next try.
CREATE INDEX idx_offline_sync_queue_due
    ON offline_sync_queue (user_id, due_ms) WHERE due_ms IS NOT NULL;
-- What is claimed, and until when.
CREATE INDEX idx_offline_sync_queue_lease
    ON offline_sync_queue (lease_ms) WHERE lease_ms IS NOT NULL;
-- Who is next in a lane.
CREATE INDEX idx_offline_sync_queue_lane
    ON offline_sync_queue (user_id, lane, sequence_number)
 WHERE lane IS NOT NULL
   AND status <> 'succeeded' AND status <> 'discarded' AND status <> 'expired';

-- What an entry waits for: another entry, by its id, or the mapping of a local id, written as
-- local/USER/UUID, so that one user's ids never answer for another's.
CREATE TABLE entry_waits (
    awaited  TEXT NOT NULL,
    entry_id TEXT NOT NULL REFERENCES offline_sync_queue (id) ON DELETE CASCADE,
    met      INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (awaited, entry_id)
) WITHOUT ROWID;
CREATE INDEX idx_entry_waits_entry ON entry_waits (entry_id);

-- The server's ids of what was created offline. Written once, together with the success that told
-- it, and never changed: a second send has the same body as the first.
CREATE TABLE id_mappings (
    user_id     TEXT NOT NULL REFERENCES users (id),
    local_id    TEXT NOT NULL,
    server_id   NOT NULL,
    entity_type TEXT NOT NULL,
    entry_id    TEXT,
    created_at  TEXT NOT NULL,
    PRIMARY KEY (user_id, local_id)
) WITHOUT ROWID;
CREATE INDEX idx_id_mappings_server_id ON id_mappings (user_id, server_id);

-- Every send and what came of it.
CREATE TABLE attempts (
    entry_id   TEXT NOT NULL REFERENCES offline_sync_queue (id) ON DELETE CASCADE,
    -- The number of its claim.
    number     INTEGER NOT NULL,
    started_at TEXT NOT NULL,
    ended_at   TEXT NOT NULL,
    outcome    TEXT NOT NULL,
    status     INTEGER,
    code       TEXT,
    request_id TEXT,
    error      TEXT,
    PRIMARY KEY (entry_id, number)
) WITHOUT ROWID;

-- The outbox's own time; see clock.py.
CREATE TABLE outbox_clock (
    one              INTEGER PRIMARY KEY CHECK (one = 1),
    boot_id          TEXT NOT NULL,
    boot_ms          INTEGER NOT NULL,
    elapsed_ms       INTEGER NOT NULL,
    gap_ms           INTEGER,
    server_ms        INTEGER,
    server_at_ms     INTEGER,
    server_offset_ms INTEGER
);
