"""Route submissions: a walk is asked for, accepted at once, and made later."""
