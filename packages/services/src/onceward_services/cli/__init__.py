"""The commands that this package adds to ``onceward``: serve, worker, token."""
