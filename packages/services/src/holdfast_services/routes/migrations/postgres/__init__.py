"""For PostgreSQL."""
