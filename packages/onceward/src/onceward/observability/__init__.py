"""Logs, metrics and traces. They contain names, hashes and times, never raw keys or bodies."""
