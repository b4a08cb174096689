-- The queue of a device, and what belongs to it. The numbers 1 to 8 are those of version 0.1, whose files
-- are refused.
--
-- Columns that end in _at are UTC on the device's clock, as text, for people and for the server.
-- Columns that end in _ms are milliseconds of the outbox's own time (outbox_clock), which nobody can
-- set: every decision about an entry uses these.

CREATE TABLE users (
    id             TEXT PRIMARY KEY NOT NULL,
    -- The highest sequence number among the entries that were removed: numbers are not used twice.
    sequence_floor INTEGER NOT NULL DEFAULT 0,
    -- When the user was last warned of entries that will pass the cap.
    warned_ms      INTEGER,
    -- Since when nothing can be sent without a new sign-in. NULL: signed in.
    signed_out_ms  INTEGER,
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
    -- The server's code of the last error, as last_error_code is its HTTP status.
    last_code           TEXT,
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
    -- The W3C trace context of the user action.
    traceparent         TEXT,
    -- A user has one entry with this name that is unsettled or succeeded; refused ones do not count.
    once                TEXT,
    reason              TEXT,
    -- The local ids in it that are replaced by server ids, as a JSON array.
    local_refs          TEXT,
    payload_version     INTEGER NOT NULL DEFAULT 0,
    base                TEXT,
    base_version        TEXT,
    theirs              TEXT,
    theirs_version      TEXT,
    -- What both sides of a conflict have changed, as JSON Pointers.
    conflict_fields     TEXT,
    -- The entity whose version the entry checks: as in its lane, whichever of its ids the entry uses.
    -- NULL for creations, which check none.
    entity              TEXT,
    -- What If-Match was in the last send whose outcome was recorded: the next send has the same. NULL:
    -- not sent yet. Empty: sent without.
    sent_version        TEXT,
    forced              INTEGER NOT NULL DEFAULT 0,
    outcome_unknown     INTEGER NOT NULL DEFAULT 0,
    -- Since when it may have happened: the time of its first claim whose outcome is not known. A server
    -- remembers a key for so long and no longer, and after that the same key would do it again. The
    -- second column is the same on the device's clock, for the one case in which nothing else tells.
    maybe_since_ms      INTEGER,
    maybe_since_at      TEXT,

    -- Order. Entries of a lane are sent one after the other: one has the turn, the others wait.
    lane                TEXT,
    -- A refused entry leaves its lane, and the entries behind it go on. A retry brings it back.
    left_lane           TEXT,
    -- Entries of one chain make no sense without each other: a refusal parks the later ones. NULL: none.
    chain               TEXT,
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
    -- Since when its age counts; NULL: since it was enqueued. Moved by a person's decision, and by the
    -- time that it waited for one.
    aged_from_ms        INTEGER,
    settled_ms          INTEGER,
    -- Since when it is failed or in conflict, as the maintenance has found it, and when its removal was
    -- announced. Both are cleared when it is pending again.
    stuck_ms            INTEGER,
    notice_ms           INTEGER
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

CREATE INDEX idx_offline_sync_queue_chain
    ON offline_sync_queue (user_id, chain, sequence_number) WHERE chain IS NOT NULL;
CREATE UNIQUE INDEX idx_offline_sync_queue_once ON offline_sync_queue (user_id, once)
 WHERE once IS NOT NULL AND status <> 'discarded' AND status <> 'expired'
   AND NOT (status = 'failed' AND outcome_unknown = 0 AND (reason IS 'answer' OR reason IS 'rebuild'));
CREATE INDEX idx_offline_sync_queue_unknown
    ON offline_sync_queue (maybe_since_ms) WHERE outcome_unknown = 1;

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
    -- When the last entry that refers to it was removed, and when its own removal was announced.
    used_ms     INTEGER,
    notice_ms   INTEGER,
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

-- A key that the app gave stays known when an edit or a resolved conflict gives the entry another:
-- an app that enqueues once more after a crash, with its own key, finds its entry and makes no second.
CREATE TABLE former_keys (
    idempotency_key TEXT PRIMARY KEY NOT NULL,
    entry_id        TEXT NOT NULL REFERENCES offline_sync_queue (id) ON DELETE CASCADE,
    user_id         TEXT NOT NULL,
    operation       TEXT NOT NULL,
    endpoint        TEXT NOT NULL,
    payload         TEXT
) WITHOUT ROWID;
CREATE INDEX idx_former_keys_entry ON former_keys (entry_id);

-- A trigger, so that no way to change a key can forget it.
CREATE TRIGGER keep_former_key AFTER UPDATE OF idempotency_key ON offline_sync_queue
WHEN old.idempotency_key <> new.idempotency_key
BEGIN
    INSERT OR IGNORE INTO former_keys
    VALUES (old.idempotency_key, old.id, old.user_id, old.operation, old.endpoint, old.payload);
END;

-- Versions travel with edits. An edit is sent with the version it was made on, followed along the
-- successes of this device.
CREATE TABLE entity_versions (
    user_id TEXT NOT NULL REFERENCES users (id),
    entity  TEXT NOT NULL,
    -- The version that the device's last success produced; empty if the response did not say.
    version TEXT NOT NULL,
    -- JSON array of the versions that the device's successes led from, each to the next, up to
    -- `version`. An edit based on one of them is sent with `version`.
    own     TEXT NOT NULL,
    -- The entity as of `version`, a JSON text: the base for merges. NULL if it is not known.
    body    TEXT,
    -- The version seen last, also in a conflict: the base of new edits.
    seen    TEXT,
    seen_ms INTEGER NOT NULL,
    PRIMARY KEY (user_id, entity)
) WITHOUT ROWID;

-- Strict sequences: the requests of a stream are numbered, for servers that refuse gaps.
CREATE TABLE sequence_streams (
    user_id      TEXT NOT NULL REFERENCES users (id) ON DELETE CASCADE,
    stream       TEXT NOT NULL,
    -- Names the stream for the server. It never changes.
    client_id    TEXT NOT NULL,
    -- The number of the next entry that has none.
    next_number  INTEGER NOT NULL,
    -- The highest number that the server has acknowledged.
    acknowledged INTEGER NOT NULL,
    PRIMARY KEY (user_id, stream)
) WITHOUT ROWID;

-- The numbers of entries, from the claim before their first send on.
CREATE TABLE sequence_numbers (
    entry_id TEXT PRIMARY KEY REFERENCES offline_sync_queue (id) ON DELETE CASCADE,
    user_id  TEXT NOT NULL,
    stream   TEXT NOT NULL,
    number   INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX idx_sequence_numbers_stream ON sequence_numbers (user_id, stream, number);
