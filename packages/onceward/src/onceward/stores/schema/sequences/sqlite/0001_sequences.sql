-- Strict sequences: how far each client's stream has come. A number is used in the transaction that
-- writes the record of its request.
CREATE TABLE onceward_sequences (
    tenant      TEXT NOT NULL,
    client_id   TEXT NOT NULL,
    last_number INTEGER NOT NULL,
    updated_at  TEXT NOT NULL,
    PRIMARY KEY (tenant, client_id)
) WITHOUT ROWID;

-- Which key each of a client's last numbers was used for.
CREATE TABLE onceward_sequence_numbers (
    tenant    TEXT NOT NULL,
    client_id TEXT NOT NULL,
    number    INTEGER NOT NULL,
    -- The first half of the SHA-256 of the key, in hex.
    key_hash  TEXT NOT NULL,
    PRIMARY KEY (tenant, client_id, number)
) WITHOUT ROWID;
