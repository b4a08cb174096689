-- One counter per user. A change locks the row and takes the next number, so numbers follow the order
-- of commits, and a device that fetches changes by number misses nothing.
CREATE TABLE field_counters (
    tenant     text        COLLATE "C" NOT NULL PRIMARY KEY,
    seq        bigint      NOT NULL,
    changed_at timestamptz NOT NULL
);

-- Documents of all three kinds, with their version and the number of their last change. A deleted
-- document stays as a tombstone for other devices. Documents are JSON stored as text, as on SQLite:
-- jsonb rejects U+0000, which is valid in a body.
CREATE TABLE field_items (
    tenant     text        COLLATE "C" NOT NULL,
    kind       text        COLLATE "C" NOT NULL
               CHECK (kind IN ('activities', 'contacts', 'expenses')),
    id         text        COLLATE "C" NOT NULL,
    version    bigint      NOT NULL,
    document   text        NOT NULL,
    seq        bigint      NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    deleted_at timestamptz,
    PRIMARY KEY (tenant, kind, id)
);
CREATE UNIQUE INDEX idx_field_items_seq ON field_items (tenant, kind, seq);
