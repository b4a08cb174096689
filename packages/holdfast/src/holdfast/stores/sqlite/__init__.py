"""The SQLite store: one file, WAL, ``synchronous=FULL``."""

from holdfast.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
