-- Entries queued without a profile used to be stored under a name that only some installations know.
-- Whether it is known is not for SQL to say: the first opening after this step checks, and removes
-- the row. See adopt_default_profile.
INSERT OR REPLACE INTO outbox_meta (name, value) VALUES ('former_default_profile', 'unchecked');
