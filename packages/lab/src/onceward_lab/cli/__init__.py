"""Commands that this package adds to ``onceward``: demo, simulate, chaos, conform, bench."""
