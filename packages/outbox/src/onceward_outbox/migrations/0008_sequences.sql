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
