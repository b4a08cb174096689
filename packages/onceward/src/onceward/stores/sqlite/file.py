"""The file of a SQLite database: which one a path leads to, its epoch, and its lock."""

import os
import sqlite3
from typing import Final

from onceward.errors import ConfigurationError
from onceward.ports import EpochReading
from onceward.stores.errors import is_sqlite_busy

__all__ = ["FileIdentity", "file_identity", "open_exclusively", "reading_of"]

# The device and the inode of a file.
FileIdentity = tuple[int, int]


def file_identity(path: str | None) -> FileIdentity | None:
    """Return which file is at a path; None if there is none, or without a path."""
    if path is None:
        return None
    try:
        found = os.stat(path)  # noqa: PTH116 - for each request, and pathlib takes twice as long
    except OSError:
        return None
    return found.st_dev, found.st_ino


def reading_of(path: str | None, cache_epoch: str) -> EpochReading:
    """Return the epoch of a file: another file at the same path is another database."""
    device, inode = file_identity(path) or (0, 0)
    return EpochReading(f"{device}/{inode}", cache_epoch)


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
        if is_sqlite_busy(error):
            raise ConfigurationError(
                f"{path} is open in another process: stop the server and its workers first, "
                f"{purpose}"
            ) from error
        raise
    return db
