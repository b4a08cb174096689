"""The outbox's file: opening it, encrypted or plain, its schema and its passphrase.

Plain files use the standard library's ``sqlite3``, encrypted ones ``apsw`` (the build with SQLite3
Multiple Ciphers, in SQLCipher's format). Only this module knows the two drivers; the others use
``Database``.
"""

import importlib
import logging
import os
import re
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, Protocol
from urllib.parse import quote

from onceward_outbox.errors import (
    ConfigurationError,
    DiskFullError,
    FileBusyError,
    FileDamagedError,
    FileReadOnlyError,
    NewerFileError,
    OutboxFileError,
    UsageError,
    WrongPassphraseError,
)
from onceward_protocol.storage.busy_retry import until_free
from onceward_protocol.storage.migrations import (
    Applied,
    Migration,
    Statement,
    Steps,
    apply_migrations,
    load_migrations,
    run_steps,
)
from onceward_protocol.storage.private_files import create_private_file

# The SQLite driver; ``auto`` is apsw with a passphrase and sqlite3 without.
Driver = Literal["auto", "sqlite3", "apsw"]

_RAW_KEY_BYTES: Final = 32
_MIN_PASSPHRASE: Final = 12
# SQLCipher takes such a text as the key itself, without stretching it.
_RAW_KEY: Final = re.compile(r"x'.*'\Z|raw:", re.IGNORECASE | re.DOTALL)
# For RETURNING, and recursive queries with several recursive parts.
_MIN_SQLITE: Final = (3, 35, 0)
_FULL: Final = 2
# The smallest page. SQLite treats a shorter file as empty, and overwrites it.
_MIN_FILE_BYTES: Final = 512
_NOT_A_DATABASE: Final = 26
_REKEY_BUSY_SECONDS: Final = 10.0

_NAMESPACE: Final = "outbox"
_TABLES: Final = ("users", "offline_sync_queue", "entry_waits", "id_mappings", "attempts")
_CREATE_META: Final = (
    "CREATE TABLE IF NOT EXISTS outbox_meta (name TEXT PRIMARY KEY NOT NULL, value) WITHOUT ROWID"
)
_READ_VERSION: Final = "SELECT value FROM outbox_meta WHERE name = 'schema'"
_SAVE_VERSION: Final = (
    "INSERT INTO outbox_meta (name, value) VALUES ('schema', ?)"
    " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
)

_PRAGMAS: Final = (
    # With NORMAL a power cut loses acknowledged entries.
    "PRAGMA synchronous = FULL",
    # Sorting and sub-queries must not write payloads into files in /tmp.
    "PRAGMA temp_store = MEMORY",
    # Deleted data is overwritten, also in free pages.
    "PRAGMA secure_delete = ON",
    "PRAGMA foreign_keys = ON",
    # 8 MB: the inner pages of every index stay in memory with a million entries.
    "PRAGMA cache_size = -8192",
)

_log = logging.getLogger(__name__)


class AppConnection(Protocol):
    """A connection of ``sqlite3`` or ``apsw``: the part that the outbox uses."""

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""

    def execute(self, sql: str, params: Any = ..., /) -> Any:
        """Run one statement."""

    def executemany(self, sql: str, params: Any, /) -> Any:
        """Run one statement for each row of parameters."""

    def close(self) -> None:
        """Close the file."""


class Database:
    """One connection, with SQLite's errors translated."""

    def __init__(self, path: Path, connection: AppConnection, errors: type[Exception]) -> None:
        """Take over a connection; ``errors`` is the base of its driver's exceptions."""
        self.path = path
        self.connection = connection
        self._errors = errors
        self._execute = connection.execute

    @property
    def driver(self) -> str:
        """``sqlite3`` or ``apsw``."""
        return "sqlite3" if self._errors is sqlite3.Error else "apsw"

    def rows(self, sql: str, params: Any = ()) -> list[Any]:
        """Run one statement to its end and return its rows."""
        try:
            return self._execute(sql, params).fetchall()  # type: ignore[no-any-return]
        except self._errors as error:
            raise translated(error, self.path) from error

    def many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Run one statement for each row of parameters."""
        try:
            self.connection.executemany(sql, rows).fetchall()
        except self._errors as error:
            raise translated(error, self.path) from error

    def file_bytes(self) -> int:
        """Return the size of the file and its log."""
        files = (self.path, self.path.with_name(f"{self.path.name}-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    def rollback(self) -> None:
        """Roll back the open transaction, if any: some errors end it themselves."""
        if self.connection.in_transaction:
            with suppress(self._errors):
                self._execute("ROLLBACK", ()).fetchall()

    def close(self) -> None:
        """Close the file. Idempotent."""
        with suppress(self._errors):
            self.connection.close()

    def configure(self) -> None:
        """Set the pragmas. Writes nothing."""
        for pragma in _PRAGMAS:
            self.rows(pragma)

    def switch_to_wal(self, busy_seconds: float) -> bool:
        """Switch to WAL mode, waiting for other processes; False if it is not possible."""
        mode: list[Any] = until_free(
            lambda: self.rows("PRAGMA journal_mode = WAL"),
            is_busy=lambda error: isinstance(error, FileBusyError),
            seconds=busy_seconds,
        )
        return bool(mode[0][0] == "wal")

    def guest(self, connection: AppConnection) -> "Database":
        """Return the app's own connection as a database.

        Raises ``UsageError`` for one that would not make an enqueue durable.
        """
        if type(connection).__module__.partition(".")[0] != self.driver:
            raise UsageError(
                f"the queue uses {self.driver}, so the connection must be one of {self.driver}: "
                "two copies of SQLite in one process do not see each other's locks on a file"
            )
        if not connection.in_transaction:
            raise UsageError("begin a transaction on the connection before enqueueing in it")
        guest = Database(self.path, connection, self._errors)
        for _, name, file in guest.rows("PRAGMA database_list"):
            if name == "main" and not (file and self.path.exists() and self.path.samefile(file)):
                raise UsageError(f"the connection's main database should be {self.path}")
        if guest.rows("PRAGMA synchronous")[0][0] < _FULL:
            raise UsageError("the connection must have PRAGMA synchronous=FULL, set before BEGIN")
        return guest

    def take_over(self, other: "Database") -> None:
        """Replace the connection by another one to the same path."""
        self.close()
        self.connection = other.connection
        self._execute = other.connection.execute


def open_database(
    path: Path,
    *,
    passphrase: str | bytes | None,
    driver: Driver,
    vfs: str | None,
    busy_seconds: float,
    create: bool,
    allow_weak_passphrase: bool,
) -> Database:
    """Open or create the file, and bring its schema up to date; see ``OutboxQueue.open``."""
    is_new = not path.exists() or path.stat().st_size == 0
    if is_new and not create:
        raise OutboxFileError(f"there is no outbox in {path}")
    if is_new and passphrase is not None:
        check_new_passphrase(passphrase, allow_weak=allow_weak_passphrase)
    opened = partial(_open, path, passphrase, driver, vfs, busy_seconds, create=create)
    try:
        database = opened()
    except (WrongPassphraseError, FileDamagedError):
        if not is_new or passphrase is None:
            raise
        # Another process has created the file meanwhile, with another salt. The key that was
        # derived with ours does not fit it.
        return opened()
    if not is_new and passphrase is not None and not allow_weak_passphrase:
        reason = _weakness(passphrase)
        if reason is not None:  # refusing it would lock its owner out
            _log.warning("the passphrase of %s %s: change it with change_passphrase", path, reason)
    return database


def _open(
    path: Path,
    passphrase: str | bytes | None,
    driver: Driver,
    vfs: str | None,
    busy_seconds: float,
    *,
    create: bool,
) -> Database:
    chosen = driver
    if chosen == "auto":
        chosen = "sqlite3" if passphrase is None else "apsw"
    if chosen == "sqlite3" and (passphrase is not None or vfs is not None):
        raise ConfigurationError('passphrases and vfs need driver="apsw"')
    key = None if passphrase is None else key_text(passphrase)
    if not path.parent.is_dir():
        raise OutboxFileError(f"there is no directory {path.parent} to keep the outbox in")
    if vfs is None:
        _make_private(path)
        _check_usable(path)
    if key is None and vfs is None:
        _check_plain(path, chosen)
    database = connect(path, chosen, vfs, busy_seconds)
    try:
        if key is not None:
            give_key(database, key)
        _check_readable(database, key)
        _prepare_schema(database, busy_seconds=busy_seconds, create=create)
    except BaseException:
        database.close()
        raise
    return database


def give_key(database: Database, key: str, *, change: bool = False) -> None:
    """Unlock an encrypted file, or encrypt it under this key, in the format of SQLCipher 4."""
    database.rows("PRAGMA cipher = 'sqlcipher'")
    database.rows("PRAGMA legacy = 4")
    # A PRAGMA takes no parameters.
    quoted = key.replace("'", "''")
    database.rows(f"PRAGMA {'rekey' if change else 'key'} = '{quoted}'")


def _check_plain(path: Path, driver: str) -> None:
    """Raise ``WrongPassphraseError`` for an encrypted file, reading only its first page.

    A connection that opens an encrypted file as a plain one would move its log into it when it is
    closed; an immutable one ignores the log.
    """
    location = f"file:{quote(os.fspath(path.absolute()))}?mode=ro&immutable=1"
    peek = connect(location, driver, None, 1.0)
    try:
        peek.rows("PRAGMA schema_version")
    except OutboxFileError as error:
        # Other errors may come from pages that the log completes.
        if _code_of(error.__cause__) == _NOT_A_DATABASE:
            raise WrongPassphraseError(
                f"{path} is encrypted or not a database: if it is encrypted, open it with its "
                "passphrase (passphrase=…, --passphrase-env)"
            ) from error
    finally:
        peek.close()


def _check_readable(database: Database, key: str | None) -> None:
    """Raise ``WrongPassphraseError`` for a wrong passphrase, or one for a plain file."""
    path = database.path
    try:
        database.rows("SELECT count(*) FROM sqlite_schema")
    except FileDamagedError as error:
        if key is None:
            raise
        try:
            _check_plain(path, database.driver)
        except OutboxFileError:
            raise WrongPassphraseError(
                f"the passphrase does not open {path} (or the beginning of the file is damaged)"
            ) from error
        raise WrongPassphraseError(
            f"{path} is not encrypted: open it without a passphrase"
        ) from error


def connect(location: Path | str, driver: str, vfs: str | None, busy_seconds: float) -> Database:
    """Open a path or a URI with one of the drivers."""
    path, is_uri = Path(location), isinstance(location, str)
    if driver == "sqlite3":
        if sqlite3.sqlite_version_info < _MIN_SQLITE:
            raise ConfigurationError("the outbox needs SQLite 3.35 or newer")
        try:
            plain = sqlite3.connect(
                location,
                uri=is_uri,
                timeout=busy_seconds,
                isolation_level=None,
                check_same_thread=False,
                cached_statements=256,
            )
        except sqlite3.Error as error:
            raise translated(error, path) from error
        return Database(path, plain, sqlite3.Error)
    try:
        apsw: Any = importlib.import_module("apsw")
    except ImportError:
        raise ConfigurationError(
            "an encrypted outbox needs the package apsw-sqlite3mc: pip install apsw-sqlite3mc"
        ) from None
    try:
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(
            os.fspath(location),
            flags=flags if is_uri else flags & ~apsw.SQLITE_OPEN_URI,
            vfs=vfs,
            statementcachesize=256,
        )
        connection.set_busy_timeout(int(busy_seconds * 1000))
        # Otherwise a statement with a bound LIMIT is compiled at each run. No plan of the outbox
        # depends on a parameter.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    except apsw.Error as error:
        raise translated(error, path) from error
    return Database(path, connection, apsw.Error)


def _code_of(error: BaseException | None) -> int:
    """Return the primary SQLite code of an error of either driver."""
    code = getattr(error, "sqlite_errorcode", None) or getattr(error, "result", None)
    return int(code or 0) & 0xFF


def translated(error: Exception, path: Path) -> OutboxFileError:
    """Return an SQLite error as an ``OutboxFileError``."""
    match _code_of(error):
        case 5 | 6:  # BUSY, LOCKED
            return FileBusyError(f"{path} stayed locked by another process: {error}")
        case 8:  # READONLY
            return FileReadOnlyError(f"{path} cannot be written: {error}")
        case 11 | 26:  # CORRUPT, NOTADB
            return FileDamagedError(f"{path} is damaged, or not an outbox: {error}")
        case 13:  # FULL
            return DiskFullError(f"the disk is full, {path} cannot grow: {error}")
        case _:
            return OutboxFileError(f"{path}: {error}")


def _make_private(path: Path) -> None:
    """Create the file, readable by its owner only; SQLite gives its log the same mode."""
    try:
        create_private_file(path)
    except OSError as error:
        raise FileReadOnlyError(f"{path} cannot be created: {error.strerror}") from error


def _check_usable(path: Path) -> None:
    """Raise for problems that SQLite finds later or never."""
    if 0 < path.stat().st_size < _MIN_FILE_BYTES:
        raise FileDamagedError(f"{path} is too short to be a database")
    for what in (path, path.parent):
        if not os.access(what, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            raise FileReadOnlyError(f"{what} cannot be written, which the outbox needs")


def key_text(passphrase: str | bytes) -> str:
    """Return a passphrase, or a key of 32 bytes, in SQLCipher's syntax."""
    if isinstance(passphrase, bytes):
        if len(passphrase) != _RAW_KEY_BYTES:
            raise ConfigurationError("a key of type bytes must have 32 bytes; a passphrase is text")
        return f"x'{passphrase.hex()}'"
    if not passphrase or "\0" in passphrase:
        raise ConfigurationError("a passphrase needs at least one character, and no NUL")
    return passphrase


def check_new_passphrase(passphrase: str | bytes, *, allow_weak: bool) -> None:
    """Raise ``ConfigurationError`` for a weak one. Keys of type bytes are not passphrases."""
    reason = _weakness(passphrase)
    if reason is not None and not allow_weak:
        raise ConfigurationError(
            f"the passphrase {reason}: use a longer one, or a key of 32 random bytes "
            "(allow_weak_passphrase=True, or --allow-weak-passphrase, accepts it)"
        )


def _weakness(passphrase: str | bytes) -> str | None:
    if isinstance(passphrase, bytes):
        return None
    if _RAW_KEY.match(passphrase):
        return "has the form of a raw key (x'…' or raw:…), which is not stretched"
    if len(passphrase) < _MIN_PASSPHRASE:
        return f"has fewer than {_MIN_PASSPHRASE} characters"
    return None


# -- the schema ------------------------------------------------------------------------------------


def _prepare_schema(database: Database, *, busy_seconds: float, create: bool) -> None:
    """Create the tables or bring them up to date; safe if several processes open the file.

    With ``create``, a file without an outbox gets one. Raises ``NewerFileError`` for a file of a
    newer version and ``OutboxFileError`` for one that cannot hold an outbox.
    """
    database.configure()
    migrations = load_migrations(_NAMESPACE, files("onceward_outbox.migrations"))
    _check_file(database, migrations, create=create)
    if not database.switch_to_wal(busy_seconds):
        raise FileReadOnlyError(
            f"the log of {database.path} cannot be written: the outbox keeps it next to the file"
        )
    database.rows("BEGIN IMMEDIATE")
    try:
        if _checked_version(database, migrations) == 0:
            _check_tables_absent(database)
        run_steps(apply_migrations(_SchemaVersion(migrations)), database.rows)
        # Of a process that was killed while it encrypted the file. One that does so now would
        # have the lock that this transaction holds.
        _remove(_copy_of(database.path))
        database.rows("COMMIT")
    except BaseException:
        database.rollback()
        raise


class _SchemaVersion:
    """The ledger of an outbox: the number of the newest migration, in ``outbox_meta``."""

    def __init__(self, known: Sequence[Migration]) -> None:
        self._known = known

    def read(self) -> Steps[Applied]:
        yield _CREATE_META, ()
        rows = yield _READ_VERSION, ()
        version = int(rows[0][0]) if rows else 0
        return {migration.id for migration in self._known if migration.number <= version}

    def known(self, _applied: Applied, /) -> Sequence[Migration]:
        return self._known

    def check(self, _applied: Applied, _known: Sequence[Migration], /) -> Steps[None]:
        yield from ()  # a new file is checked before the migration starts

    def render(self, script: str) -> str:
        return script

    def record(self, migration: Migration) -> Statement:
        return _SAVE_VERSION, (migration.number,)

    def finish(self, _new: Sequence[Migration]) -> Steps[None]:
        yield from ()


def _check_file(database: Database, known: Sequence[Migration], *, create: bool) -> None:
    """Raise for a file that cannot be used, before anything is written."""
    if _checked_version(database, known) == 0:
        if not create:
            raise OutboxFileError(f"there is no outbox in {database.path}")
        _check_tables_absent(database)
    if database.rows("PRAGMA query_only")[0][0]:
        raise FileReadOnlyError(f"{database.path} cannot be written")


def _checked_version(database: Database, known: Sequence[Migration]) -> int:
    """Return the number of the newest migration applied; 0 if there is no outbox yet."""
    if not database.rows("SELECT 1 FROM sqlite_schema WHERE name = 'outbox_meta'"):
        return 0
    found = database.rows(_READ_VERSION)
    version = int(found[0][0]) if found else 0
    baseline, newest = known[0].number, known[-1].number
    if 0 < version < baseline:
        raise OutboxFileError(
            f"{database.path} is an outbox of version 0.1, which 0.2 does not read: send its "
            "entries with 0.1, then use another file"
        )
    if version > newest:
        raise NewerFileError(
            f"{database.path} was written by a newer version (schema {version}, this one knows "
            f"{newest}): upgrade Onceward to open it"
        )
    return version


def _check_tables_absent(database: Database) -> None:
    """Raise if the file, which may be the app's database, has tables that the outbox needs."""
    # One statement, because another process may be creating the outbox at the same time.
    names = ", ".join(f"'{table}'" for table in _TABLES)
    found = database.rows(
        f"SELECT name FROM sqlite_schema WHERE name IN ({names})"  # noqa: S608 - constants
        " AND NOT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'outbox_meta')"
    )
    if found:
        raise OutboxFileError(
            f"{database.path} already has a table {found[0][0]!r}: give the outbox another file"
        )


# -- changing the passphrase ----------------------------------------------------------------------


def rekey(database: Database, old: str | bytes | None, new: str | bytes) -> None:
    """Encrypt the file under another passphrase. Needs free disk space of the file's size.

    A crash at any instant leaves the old passphrase or the new one valid.
    """
    # SQLite3 Multiple Ciphers can change a key in place, but a process killed in the middle of that
    # leaves a file that neither key opens, with a rollback journal as well as with a WAL: tried
    # with ``kill -9``, one to two times in forty. So a copy is encrypted with the new key, and
    # replaces the file when it is complete and on the disk.
    if database.driver != "apsw":
        raise UsageError('open the outbox with driver="apsw" to encrypt it')
    new_key = key_text(new)
    path = database.path
    copy = _copy_of(path)
    _lock_exclusively(database)
    try:
        _remove(copy)
        # The copy of a plain file is plain until it is encrypted, and so is its journal.
        create_private_file(copy)
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
    fresh = connect(path, "apsw", None, _REKEY_BUSY_SECONDS)
    give_key(fresh, new_key)
    database.take_over(fresh)
    database.configure()
    database.switch_to_wal(_REKEY_BUSY_SECONDS)


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
    database.switch_to_wal(_REKEY_BUSY_SECONDS)


def _copy_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-rekey")


def _remove(copy: Path) -> None:
    """Remove an unfinished copy. Raises ``FileReadOnlyError``."""
    for name in (copy.name, f"{copy.name}-journal", f"{copy.name}-wal", f"{copy.name}-shm"):
        try:
            copy.with_name(name).unlink(missing_ok=True)
        except OSError as error:
            raise FileReadOnlyError(
                f"{copy.with_name(name)} is left from an unfinished encryption and cannot be "
                f"removed: {error.strerror}"
            ) from error


def _sync(path: Path) -> None:
    # Closing a descriptor drops this process's locks on that file. The copy is not open
    # elsewhere, and a directory has none.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
