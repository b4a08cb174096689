"""Route submissions (seed 004): a walk is asked for, accepted at once, and made later."""
