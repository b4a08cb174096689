-- When the user acted, by the device's clock, if the request said so.
ALTER TABLE onceward_idempotency_records ADD COLUMN client_generated_at TEXT;
