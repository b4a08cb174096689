"""Migrations of the core, for SQLite."""
