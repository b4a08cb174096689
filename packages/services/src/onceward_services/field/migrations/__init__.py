"""The schema of field, numbered, one folder per database."""
