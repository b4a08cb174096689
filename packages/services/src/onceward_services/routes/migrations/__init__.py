"""The schema of routes, numbered, one folder per database."""
