-- One counter per user: every change takes the next number, so numbers are given in the order of the
-- commits, and a device that pulls by number can miss nothing.
CREATE TABLE field_counters (
    tenant     TEXT    NOT NULL PRIMARY KEY,
    seq        INTEGER NOT NULL,
    changed_at TEXT    NOT NULL
) WITHOUT ROWID;

-- What the app keeps, of all three kinds: a document, a version, and where it stands in the order of
-- changes. A deleted one stays as a mark, so that other devices hear of it.
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
