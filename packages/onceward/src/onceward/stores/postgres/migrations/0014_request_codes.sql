-- The error code of a response that operators look up. Found by its key, too, in all tenants.
ALTER TABLE onceward_request_log ADD COLUMN code text;
CREATE INDEX idx_onceward_request_log_key ON onceward_request_log (key_hash);
