"""The store on SQLite: one connection that writes, one that reads."""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.ports import Claimed, EpochReading, Found, Held, Params, Row
from onceward.records import Record, RecordId
from onceward.stores.base import BaseStore
from onceward.stores.errors import is_sqlite_busy, is_sqlite_outage
from onceward.stores.rows import check_storable, rows_of, to_text, to_values
from onceward.stores.sqlite.group_commit import ConnectionThread, Writer
from onceward.stores.sqlite.notifier import SocketNotifier
from onceward.stores.sqlite.unit_of_work import (
    SqliteChunk,
    SqliteTransaction,
    SqliteUnit,
    find_any,
)
from onceward.stores.table_names import TableNames
from onceward_protocol.storage.busy_retry import until_free
from onceward_protocol.storage.migrations import Migration, run_steps
from onceward_protocol.storage.private_files import create_database_file

T = TypeVar("T")

_log = logging.getLogger("onceward.stores")

# The device and the inode of a file.
FileIdentity = tuple[int, int]
# Another process may have the file open for an instant, such as a command that ends.
_LOCK_SECONDS: Final = 0.5


class SqliteStore(BaseStore[SqliteTransaction]):
    """The store for one machine.

    SQLite has one writer at a time. Requests of this process write in the order in which they
    arrive (see ``group_commit``). A handler joins the queue with its first statement, so one that
    computes for ten seconds before it writes blocks no other. Between processes SQLite's lock
    decides.
    """

    is_one_writer = True
    # Not a property: every request asks for it.
    gate = None
    # Other requests wait for the write turn meanwhile.
    chunk_items = 16

    def __init__(
        self,
        path: str | Path,
        *,
        table_prefix: str | None = None,
        migrations: Sequence[Migration] = (),
        busy_seconds: float = 20.0,
    ) -> None:
        """``:memory:`` is refused, because two connections share the database.

        Names of Onceward's tables begin with ``table_prefix`` (default: ``onceward_``).
        """
        if not str(path) or ":memory:" in str(path):
            raise ConfigurationError("SQLite needs a file: sqlite:///onceward.db")
        if "://" in str(path):
            raise ConfigurationError(
                "SqliteStore takes the path of a file: give a URL to open_store instead"
            )
        # The file, as it was given.
        self.sqlite_path = str(path)
        self._busy_seconds = busy_seconds
        names = TableNames.chosen(table_prefix, None, is_sqlite=True)
        super().__init__("sqlite", names, migrations)
        self._lookup: sqlite3.Connection | None = None
        self._file: FileIdentity | None = None
        self._reports: list[Callable[[EpochReading], None]] = []
        self._is_open = False
        self._make_threads()

    async def open(self) -> None:
        """Open the file with WAL and ``synchronous=FULL``, and migrate it. Idempotent."""
        if self._is_open:
            if not self.schema.is_complete:
                await self._migrate()
            return
        # New ones: a thread starts only once, and a lock belongs to one event loop.
        self._make_threads()
        create_database_file(self.sqlite_path)
        self._reopening = asyncio.Lock()
        try:
            await self._writing.start()
            await self._migrate()
            await self._reader.start()
            await self._reader.run(self._connect_lookup)
        except sqlite3.Error as error:
            await self.close()
            raise StoreUnavailableError(f"cannot open {self.sqlite_path}: {error}") from error
        except ConfigurationError:
            await self.close()
            raise
        self._file = file_identity(self.sqlite_path)
        self._is_open = True

    async def close(self) -> None:
        """Finish running statements and close all connections."""
        await self._reader.stop()
        await self._writing.stop()
        if self._lookup is not None:
            self._lookup.close()
            self._lookup = None
        self._is_open = False

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up on the event loop: that costs less than a switch to a thread."""
        record = await self._probe(record_id)
        return None if record is None or record.expires_at <= now else record

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Claim the key if it has no record; the primary key decides at the commit.

        Duplicates within this process are serialized before this call. One in another process is
        detected when the write lock is taken, before the handler's first statement runs.
        """
        await self._follow_file()
        record = await self._probe(record_id)
        if record is not None and record.expires_at > now:
            return Found(record)
        unit = SqliteUnit(self._writer, self.sql, record_id, to_text(now))
        return Claimed(unit, after_expiry=record is not None)

    async def begin(self, *, idle_seconds: float | None = None) -> SqliteUnit:  # noqa: ARG002
        """Open a transaction without a key. SQLite cannot end an idle one."""
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        await self._follow_file()
        return SqliteUnit(self._writer, self.sql, None, "")

    @property
    def max_chunks(self) -> int:
        """More than one: it has its turn while the others read."""
        return 4

    async def begin_chunk(self, *, has_savepoints: bool = True) -> SqliteChunk:  # noqa: ARG002
        """Return a transaction for several requests. It begins with the first key to claim.

        It always has savepoints: they cost no message.
        """
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        await self._follow_file()
        unit = SqliteUnit(self._writer, self.sql, None, "", is_chunk=True)
        return SqliteChunk(unit, self.sql, self._probe)

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query on the reading connection."""
        values = to_values(params)
        return await self._read(lambda db: rows_of(db.execute(sql, values)))

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in its own transaction."""
        values = to_values(params)
        return await self._in_transaction(lambda db: rows_of(db.execute(sql, values)))

    async def write_unless_busy(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in its own transaction, after the requests that already wait.

        Raises ``StoreUnavailableError`` at once if another process writes.
        """
        values = to_values(params)
        return await self._in_transaction(lambda db: rows_of(db.execute(sql, values)), waits=False)

    def notifier(self) -> SocketNotifier:
        """Return a notifier for the processes that use this file."""
        return SocketNotifier(self.sqlite_path, channel=self.table_names.channel)

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one batch of expired records, in its own transaction."""
        values = (to_text(now), limit)
        return await self._in_transaction(
            lambda db: db.execute(self.sql["sweep_records"], values).rowcount
        )

    async def _list(self, sql: str, values: Any) -> Sequence[Any]:
        return await self._read(lambda db: db.execute(sql, values).fetchall())

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Report the epoch of each file that is opened."""
        self._reports.append(report)

    async def read_epoch(self) -> EpochReading:
        """Read the epoch of the file that is at the path now."""
        await self._follow_file()
        reading = reading_of(
            self.sqlite_path, await self._cache_epoch(), await self._newest_record()
        )
        for report in self._reports:
            report(reading)
        return reading

    async def _follow_file(self) -> None:
        """Open the file again if it was replaced by another one, which a restore does.

        The connections would go on using the old file, of which nothing is left in the end. Units
        that have begun on it fail.
        """
        if not self._is_open or file_identity(self.sqlite_path) == self._file:
            return
        async with self._reopening:
            found = file_identity(self.sqlite_path)
            if found is None:
                raise StoreUnavailableError(f"{self.sqlite_path} does not exist any more")
            if found == self._file or not self._is_open:
                return
            _log.warning("%s was replaced by another file: it is opened again", self.sqlite_path)
            await self.close()
            await self.open()
            await self.read_epoch()

    def _make_threads(self) -> None:
        self._writing = ConnectionThread("onceward-sqlite-writer", self._connect_writer)
        self._reader = ConnectionThread("onceward-sqlite-reader", self._connect)
        self._writer = Writer(self._writing, busy_seconds=self._busy_seconds)

    async def _in_transaction(
        self, work: Callable[[sqlite3.Connection], T], *, waits: bool = True
    ) -> T:
        unit = SqliteUnit(self._writer, self.sql, None, "", waits=waits)
        try:
            result: T = await unit.run(work)
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)
        return result

    async def _migrate(self) -> None:
        """Apply missing migrations. Processes that open the file at once wait for the lock."""
        migration = self.schema.migration()

        def apply(db: sqlite3.Connection) -> None:
            run_steps(migration.apply(), lambda sql, values: db.execute(sql, values).fetchall())

        def apply_first(db: sqlite3.Connection) -> None:
            db.execute(f"PRAGMA busy_timeout={int(self._busy_seconds * 1000)}")
            db.execute("BEGIN IMMEDIATE")
            try:
                apply(db)
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise
            finally:
                db.execute("PRAGMA busy_timeout=0")

        if self._is_open:  # requests write, and this waits for its turn
            await self._in_transaction(apply)
        else:
            await self._writing.run(apply_first)
        self.schema.committed(migration)
        self._use_names(migration.names)

    async def _probe(self, record_id: RecordId) -> Record | None:
        check_storable(*record_id)
        if self._lookup is None:
            raise StoreUnavailableError("the store is not open")
        try:
            return find_any(self._lookup, self.sql, record_id)
        except sqlite3.OperationalError:  # SQLite would have to wait, which must not block the loop
            return await self._read(lambda db: find_any(db, self.sql, record_id))

    # -- the two threads ------------------------------------------------------------------

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._reader.run(work)
        except sqlite3.OperationalError as error:
            if is_sqlite_outage(error):
                raise StoreUnavailableError(f"SQLite: {error}") from error
            raise

    def _connect_lookup(self, _reader: sqlite3.Connection) -> None:
        # Opened on a thread, where it may wait; used on the event loop, where it must not.
        db = self._connect()
        db.execute("PRAGMA busy_timeout=0")
        self._lookup = db

    def _connect_writer(self) -> sqlite3.Connection:
        # ``group_commit`` sets the timeout where it waits for other processes.
        db = self._connect()
        db.execute("PRAGMA busy_timeout=0")
        # The statement journal of savepoints. Beyond 64 KiB SQLite would write a temporary file
        # for each group of commits.
        db.execute("PRAGMA temp_store=MEMORY")
        return db

    def _connect(self) -> sqlite3.Connection:
        # isolation_level=None: the module does not begin transactions by itself.
        db = sqlite3.connect(
            self.sqlite_path,
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            until_free(
                lambda: db.execute("PRAGMA journal_mode=WAL"),
                is_busy=is_sqlite_busy,
                seconds=self._busy_seconds,
            )
            # NORMAL would lose acknowledged commits in a power failure.
            db.execute("PRAGMA synchronous=FULL")
            db.execute("PRAGMA foreign_keys=ON")
        except BaseException:
            db.close()
            raise
        return db


def file_identity(path: str | None) -> FileIdentity | None:
    """Return which file is at a path; None if there is none, or without a path."""
    if path is None:
        return None
    try:
        found = os.stat(path)  # noqa: PTH116 - for each request, and pathlib takes twice as long
    except OSError:
        return None
    return found.st_dev, found.st_ino


def reading_of(path: str | None, cache_epoch: str, newest: datetime | None = None) -> EpochReading:
    """Return the epoch of a file: another file at the same path is another database."""
    device, inode = file_identity(path) or (0, 0)
    return EpochReading(f"{device}/{inode}", cache_epoch, newest=newest)


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
