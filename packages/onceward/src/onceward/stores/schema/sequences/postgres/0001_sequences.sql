-- Strict sequences: how far each client's stream has come. A number is used in the transaction that
-- writes the record of its request.
CREATE TABLE onceward_sequences (
    tenant      text        COLLATE "C" NOT NULL,
    client_id   text        COLLATE "C" NOT NULL,
    last_number bigint      NOT NULL,
    updated_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant, client_id)
);

-- Which key each of a client's last numbers was used for.
CREATE TABLE onceward_sequence_numbers (
    tenant    text   COLLATE "C" NOT NULL,
    client_id text   COLLATE "C" NOT NULL,
    number    bigint NOT NULL,
    -- The first half of the SHA-256 of the key, in hex.
    key_hash  text   NOT NULL,
    PRIMARY KEY (tenant, client_id, number)
);
