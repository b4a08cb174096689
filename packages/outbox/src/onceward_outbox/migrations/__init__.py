"""The schema of the outbox, in numbered steps. Each one keeps what is queued."""
