"""The schema of planning, numbered, one folder per database."""
