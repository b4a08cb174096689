"""Idempotency: claim → run → record → reply. Orders the steps; the rules are in ``core``."""
