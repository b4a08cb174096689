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

-- A trigger, so that no way to change a key can forget it. Its body stands on one line: a step is cut
-- where a line ends with a semicolon.
CREATE TRIGGER keep_former_key AFTER UPDATE OF idempotency_key ON offline_sync_queue
WHEN old.idempotency_key <> new.idempotency_key
BEGIN INSERT OR IGNORE INTO former_keys VALUES (old.idempotency_key, old.id, old.user_id, old.operation, old.endpoint, old.payload); END;
