-- The error code of a response that operators look up. Found by its key, too, in all tenants.
ALTER TABLE holdfast_request_log ADD COLUMN code TEXT;
CREATE INDEX idx_holdfast_request_log_key ON holdfast_request_log (key_hash);
