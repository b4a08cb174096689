"""The rules. No I/O, no clock, no randomness, no async: time and ids are arguments."""
