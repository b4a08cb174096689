"""The SQLite store: one file, WAL, ``synchronous=FULL``."""

from onceward.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
