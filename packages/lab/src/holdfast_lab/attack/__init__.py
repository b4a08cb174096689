"""Hostile clients, for tests of one's own server."""
