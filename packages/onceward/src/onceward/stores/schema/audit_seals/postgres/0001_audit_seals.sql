-- A chain of seals for each tenant, written in the background. The hash of a seal covers all columns
-- above it, and so the seal before.
CREATE TABLE onceward_audit_seals (
    tenant     text        COLLATE "C" NOT NULL,
    number     bigint      NOT NULL,
    -- The hash of the seal before; 64 zeros in the first one.
    previous   text        NOT NULL,
    -- The events as JSON: pairs of the id and the SHA-256 of the event.
    events     text        NOT NULL,
    -- The time of the newest event, which says when retention deletes them.
    newest_at  timestamptz,
    -- What retention had deleted when this seal was made: seals below first_kept, with this many events.
    first_kept bigint      NOT NULL,
    swept      bigint      NOT NULL,
    sealed_at  timestamptz NOT NULL,
    hash       text        NOT NULL,
    -- An HMAC of the hash, by a key that is not in the database.
    key_id     text,
    mac        text,
    PRIMARY KEY (tenant, number)
);

-- For the sealer: the events that no seal covers yet, whatever the order of their commits.
CREATE INDEX idx_onceward_audit_events_unsealed ON onceward_audit_events (tenant, id)
 WHERE seal IS NULL;
