"""The embedded default: one SQLite file, WAL, ``synchronous=FULL``."""

from holdfast.stores.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
