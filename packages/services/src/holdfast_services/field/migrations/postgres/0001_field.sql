-- One counter per user: every change takes the next number while it holds this row, so numbers are
-- given in the order of the commits, and a device that pulls by number can miss nothing.
CREATE TABLE field_counters (
    tenant     text        COLLATE "C" NOT NULL PRIMARY KEY,
    seq        bigint      NOT NULL,
    changed_at timestamptz NOT NULL
);

-- What the app keeps, of all three kinds: a document, a version, and where it stands in the order of
-- changes. A deleted one stays as a mark, so that other devices hear of it. Documents are JSON kept
-- as text, as on SQLite: jsonb would refuse a U+0000 that the body may lawfully hold.
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
