"""Migrations of the core, for PostgreSQL."""
