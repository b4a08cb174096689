"""The commands that this package adds to ``holdfast``: serve, worker, token."""
