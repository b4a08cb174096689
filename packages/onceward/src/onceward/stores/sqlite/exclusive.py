"""Open a SQLite file so that no other process can use it."""

import sqlite3
from typing import Final

from onceward.errors import ConfigurationError
from onceward.stores.sqlite.rows import is_busy

__all__ = ["open_exclusively"]

# Another process may have the file open for an instant, such as a command that ends.
_LOCK_SECONDS: Final = 0.5


def open_exclusively(path: str, *, purpose: str) -> sqlite3.Connection:
    """Return a connection that keeps the lock of the file until it is closed.

    Raises ``ConfigurationError`` if any other connection is open, even an idle one, and SQLite's
    error if the file is damaged. ``purpose`` completes the sentence "stop the server and its
    workers first, …".
    """
    db = sqlite3.connect(path, timeout=_LOCK_SECONDS, isolation_level=None)
    try:
        # With this mode SQLite takes the lock before its first transaction and keeps it.
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        db.execute("ROLLBACK")
    except sqlite3.Error as error:
        db.close()
        if is_busy(error):
            raise ConfigurationError(
                f"{path} is open in another process: stop the server and its workers first, "
                f"{purpose}"
            ) from error
        raise
    return db
