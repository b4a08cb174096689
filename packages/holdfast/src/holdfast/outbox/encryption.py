"""Changing the passphrase: a crash at any instant leaves the old one or the new one valid.

SQLite3 Multiple Ciphers can change a key in place, but a process killed in the middle of that
leaves a file that neither key opens, with a rollback journal as well as with a WAL: tried with
``kill -9``, one to two times in forty. So a copy is encrypted with the new key, and replaces the
file when it is complete and on the disk.
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
    """Encrypt the file under another passphrase. Needs free disk space of the file's size."""
    if database.driver != "apsw":
        raise UsageError('open the outbox with driver="apsw" to encrypt it')
    new_key = key_text(new)
    path = database.path
    copy = path.with_name(f"{path.name}-rekey")
    _lock_exclusively(database)
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
        # A process that has just opened the old file waits for our lock on it. When it gets the
        # lock the file has been replaced, which SQLite notices before it writes.
        copy.replace(path)
        _sync(path.parent)
    except BaseException:
        _remove(copy)
        with suppress(OutboxFileError):
            _unlock(database)
        raise
    fresh = connect(path, "apsw", None, _BUSY_SECONDS)
    give_key(fresh, new_key)
    database.take_over(fresh)
    database.configure()
    database.switch_to_wal(_BUSY_SECONDS)


def _lock_exclusively(database: Database) -> None:
    """Move the log into the file and lock it; impossible while another process has it open."""
    try:
        alone = database.rows("PRAGMA journal_mode = DELETE")[0][0] == "delete"
        if alone:
            database.rows("PRAGMA locking_mode = EXCLUSIVE")
            database.rows("BEGIN EXCLUSIVE")
            database.rows("COMMIT")
    except FileBusyError:
        alone = False
    if not alone:
        _unlock(database)
        raise FileBusyError(f"{database.path} is open elsewhere: close it there, then try again")


def _unlock(database: Database) -> None:
    database.rows("PRAGMA locking_mode = NORMAL")
    database.rows("SELECT count(*) FROM sqlite_schema")
    database.switch_to_wal(_BUSY_SECONDS)


def _remove(copy: Path) -> None:
    for name in (copy.name, f"{copy.name}-journal"):
        copy.with_name(name).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    # Closing a descriptor drops this process's locks on that file. The copy is not open
    # elsewhere, and a directory has none.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
