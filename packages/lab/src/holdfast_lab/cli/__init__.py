"""Commands that this package adds to ``holdfast``: demo, simulate, chaos, conform, bench."""
