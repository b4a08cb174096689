-- One counter per user. Every change takes the next number, so numbers follow the order of commits,
-- and a device that fetches changes by number misses nothing.
CREATE TABLE field_counters (
    tenant     TEXT    NOT NULL PRIMARY KEY,
    seq        INTEGER NOT NULL,
    changed_at TEXT    NOT NULL
) WITHOUT ROWID;

-- Documents of all three kinds, with their version and the number of their last change. A deleted
-- document stays as a tombstone for other devices.
CREATE TABLE field_items (
    tenant     TEXT    NOT NULL,
    kind       TEXT    NOT NULL CHECK (kind IN ('activities', 'contacts', 'expenses')),
    id         TEXT    NOT NULL,
    version    INTEGER NOT NULL,
    document   TEXT    NOT NULL,
    seq        INTEGER NOT NULL,
    created_at TEXT    NOT NULL,
    updated_at TEXT    NOT NULL,
    deleted_at TEXT,
    PRIMARY KEY (tenant, kind, id)
);
CREATE UNIQUE INDEX idx_field_items_seq ON field_items (tenant, kind, seq);
