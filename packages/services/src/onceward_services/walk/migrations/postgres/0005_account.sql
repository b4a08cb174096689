-- Set when a walker has requested the deletion of everything: no write is accepted any more, and a
-- job deletes the rows. The walker's row is deleted last.
ALTER TABLE walkers ADD COLUMN deleting_at timestamptz;
