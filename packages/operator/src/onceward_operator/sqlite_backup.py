"""Copy a SQLite database to a backup while it is used, and make a database from a backup.

Both write to a temporary file, check it, flush it to the disk and rename it, so the result is
complete or absent.
"""

import os
import secrets
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onceward.errors import ConfigurationError, StoreError
from onceward.stores.parts import Schema
from onceward.stores.sql_loader import load_queries
from onceward.stores.sqlite.store import open_exclusively
from onceward.stores.table_names import DEFAULT_PREFIX, TableNames
from onceward_protocol.storage.migrations import MOVED, pending_migrations, run_steps

__all__ = ["Backup", "back_up", "restore"]

# Pages that are copied between two calls of the progress function.
_STEP_PAGES: Final = 2_000
_OWNER_ONLY: Final = 0o600
# Files that SQLite keeps beside a database. Those of another database would damage it.
_BESIDE: Final = ("-wal", "-shm", "-journal")

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Backup:
    """A file that was written, and its size."""

    path: str
    size_bytes: int


def back_up(
    database: str,
    file: Path,
    *,
    force: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Backup:
    """Copy the database as of now to ``file``. Writers are neither blocked nor waited for.

    Raises ``ConfigurationError`` if the file exists and ``force`` is False, or for a bad path.
    """
    if not Path(database).is_file():
        raise ConfigurationError(f"{database} does not exist: check --database")
    if file.exists() and file.samefile(database):
        raise ConfigurationError("the backup would overwrite the database: choose another file")
    _refuse_existing(file, force=force)
    with _partial(file) as partial:
        try:
            with closing(sqlite3.connect(database)) as source:
                # In one read transaction: the copy is of this instant, and it does not begin
                # again when others write.
                source.execute("BEGIN")
                source.execute("SELECT count(*) FROM sqlite_master").fetchone()
                _copy(source, partial, on_progress)
            _check(partial, "quick_check")
        except sqlite3.Error as error:
            raise StoreError(f"cannot back up {database}: {error}") from error
        _publish(partial, file, force=force)
    return Backup(str(file), file.stat().st_size)


def restore(
    file: Path,
    database: str,
    *,
    force: bool = False,
    table_prefix: str = DEFAULT_PREFIX,
    on_progress: OnProgress = lambda _done, _total: None,
) -> Backup:
    """Make ``database`` from a backup, with a new cache epoch.

    Raises ``ConfigurationError`` if the backup is damaged or not Onceward's, if the database
    exists and ``force`` is False, or if it is in use.
    """
    if not file.is_file():
        raise ConfigurationError(f"{file} does not exist: give a file of onceward backup")
    target = Path(database)
    if target.exists() and target.samefile(file):
        raise ConfigurationError("the backup and the database are the same file")
    _refuse_existing(target, force=force)
    with _partial(target) as partial:
        try:
            with closing(sqlite3.connect(f"file:{_quoted(file)}?mode=ro", uri=True)) as source:
                _copy(source, partial, on_progress)
            _check(partial, "integrity_check")
            with closing(sqlite3.connect(partial, isolation_level=None)) as restored:
                names = TableNames(table_prefix)
                _check_version(restored, names, str(file))
                _begin_new_life(restored, names)
        except sqlite3.Error as error:
            raise ConfigurationError(f"{file} is not a usable backup: {error}") from error
        if target.exists():
            partial.chmod(stat.S_IMODE(target.stat().st_mode))
        with _unused(target):
            _publish(partial, target, force=force)
    return Backup(database, target.stat().st_size)


def _begin_new_life(restored: sqlite3.Connection, names: TableNames) -> None:
    """Separate a restored database from what was learnt of it before it was restored.

    Requests after the backup were acknowledged and are lost now. Their records may still be in
    Redis; with a new epoch they are not replayed.
    """
    sql = load_queries("onceward.stores", "records.sql", names=names)
    restored.execute(sql["renew_cache_epoch"], {"epoch": secrets.token_hex(16)})


def _check_version(db: sqlite3.Connection, names: TableNames, file: str) -> None:
    """Raise ``ConfigurationError`` for what is not a backup of this version or an older one."""
    if not db.execute(
        "SELECT 1 FROM sqlite_schema WHERE name = ?", (names.table("migrations"),)
    ).fetchone():
        raise ConfigurationError(
            f"{file} is not a backup of Onceward, or its tables have another prefix"
        )
    ledger = Schema(names, is_sqlite=True).migration()
    applied = run_steps(ledger.read(), lambda sql, values: db.execute(sql, values).fetchall())
    try:
        pending_migrations(applied - {MOVED}, ledger.known(applied))
    except ConfigurationError as error:
        raise ConfigurationError(f"{file}: {error}") from error


def _copy(source: sqlite3.Connection, partial: Path, on_progress: OnProgress) -> None:
    with closing(sqlite3.connect(partial)) as copy:
        source.backup(
            copy,
            pages=_STEP_PAGES,
            progress=lambda _status, left, total: on_progress(total - left, total),
        )
        # One file that any reader can open, without a -wal file beside it.
        copy.execute("PRAGMA journal_mode=DELETE")


def _check(path: Path, pragma: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        (result,) = db.execute(f"PRAGMA {pragma}(1)").fetchone()
    if result != "ok":
        raise sqlite3.DatabaseError(f"it is damaged ({result})")


def _refuse_existing(path: Path, *, force: bool) -> None:
    if not path.parent.is_dir():
        raise ConfigurationError(f"the directory {path.parent} does not exist")
    if path.exists() and not force:
        raise ConfigurationError(f"{path} exists: choose another file, or give --force")


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield a new file in the same directory that only its owner can read; remove it at the end."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, _OWNER_ONLY))
    except OSError as error:
        raise ConfigurationError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        yield partial
    finally:
        for suffix in ("", *_BESIDE):
            partial.with_name(partial.name + suffix).unlink(missing_ok=True)


def _publish(partial: Path, path: Path, *, force: bool) -> None:
    """Flush the file to the disk and give it its name."""
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    if force:
        partial.replace(path)
    else:
        try:
            os.link(partial, path)  # fails if the name was taken meanwhile
        except FileExistsError:
            raise ConfigurationError(
                f"{path} exists: choose another file, or give --force"
            ) from None
        except OSError:  # a file system without links
            partial.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _unused(database: Path) -> Iterator[None]:
    """Lock a database that is to be replaced, and remove the files that SQLite keeps beside it."""
    locked = None
    if database.exists():
        with suppress(sqlite3.DatabaseError):  # a damaged one may be replaced
            locked = open_exclusively(str(database), purpose="or they would use the old file")
            locked.execute("PRAGMA journal_mode=DELETE")
    try:
        for suffix in _BESIDE:
            database.with_name(database.name + suffix).unlink(missing_ok=True)
        yield
    finally:
        if locked is not None:
            locked.close()


def _quoted(file: Path) -> str:
    return str(file.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
