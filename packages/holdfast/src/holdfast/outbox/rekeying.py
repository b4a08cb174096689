"""Changing the passphrase, so that a crash at any instant leaves the old one or the new one.

SQLite3 Multiple Ciphers can change a key in place, but a process killed in the middle of that
leaves a file that neither key opens, with a rollback journal as well as with a WAL: tried with
``kill -9``, one to two times in forty. So a copy gets the new key, and takes the file's place when
it is complete and on the disk.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.errors import FileBusyError, OutboxFileError, UsageError
from holdfast.outbox.database import Database, connect, give_key, key_text

__all__ = ["rekey"]

_BUSY_SECONDS: Final = 10.0


def rekey(database: Database, old: str | bytes | None, new: str | bytes) -> None:
    """Encrypt the file under another passphrase. Needs as much room again while it works."""
    if database.driver != "apsw":
        raise UsageError('open the outbox with driver="apsw" to encrypt it')
    new_key = key_text(new)
    path = database.path
    copy = path.with_name(f"{path.name}-rekey")
    _lock_out_others(database)
    try:
        _remove(copy)
        database.rows("VACUUM INTO ?", (os.fspath(copy),))
        copied = connect(copy, "apsw", None, 1.0)
        try:
            if old is not None:
                give_key(copied, key_text(old))
            give_key(copied, new_key, change=True)
        finally:
            copied.close()
        copy.chmod(path.stat().st_mode & 0o777)
        _sync(copy)
        # Whoever opened the old file a moment ago waits for our lock on it. It is no longer where
        # it was when they get it, which SQLite notices before it writes.
        copy.replace(path)
        _sync(path.parent)
    except BaseException:
        _remove(copy)
        with suppress(OutboxFileError):
            _let_others_in(database)
        raise
    fresh = connect(path, "apsw", None, _BUSY_SECONDS)
    give_key(fresh, new_key)
    database.take_over(fresh)
    database.configure()
    database.switch_to_wal(_BUSY_SECONDS)


def _lock_out_others(database: Database) -> None:
    """Move the log into the file and lock it; impossible while anyone else has it open."""
    try:
        alone = database.rows("PRAGMA journal_mode = DELETE")[0][0] == "delete"
        if alone:
            database.rows("PRAGMA locking_mode = EXCLUSIVE")
            database.rows("BEGIN EXCLUSIVE")
            database.rows("COMMIT")
    except FileBusyError:
        alone = False
    if not alone:
        _let_others_in(database)
        raise FileBusyError(f"{database.path} is open elsewhere: close it there, then try again")


def _let_others_in(database: Database) -> None:
    database.rows("PRAGMA locking_mode = NORMAL")
    database.rows("SELECT count(*) FROM sqlite_schema")
    database.switch_to_wal(_BUSY_SECONDS)


def _remove(copy: Path) -> None:
    for name in (copy.name, f"{copy.name}-journal"):
        copy.with_name(name).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    # Of a copy nobody else has open, or of a directory: closing it lets go of no one's locks.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
