"""Records on SQLite: one writer, one reader, and a fair turn for everyone who wants to write."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from holdfast.core.decision import Held
from holdfast.core.record import AuditEvent, Record, RecordId, RequestMark
from holdfast.errors import (
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
)
from holdfast.ports import Claimed, Found, Params, RecordQuery, Row
from holdfast.stores.migrations import Migration, check_known, load_migrations
from holdfast.stores.queries import load_queries
from holdfast.stores.sqlite.thread import ConnectionThread

__all__ = ["SqliteStore", "SqliteTransaction"]

_SQL = load_queries("holdfast.stores.sqlite")
_FIND: Final = _SQL["find_record"]
_SAVE: Final = _SQL["save_record"]
_AUDIT: Final = _SQL["save_audit_event"]

_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class SqliteStore:
    """The store for one machine.

    SQLite has one writer at a time. In this process the turn is passed on by a fair lock, taken
    at the handler's first statement rather than before the handler: a handler that thinks for
    ten seconds before it writes holds nobody up. Between processes SQLite's own lock decides.
    """

    name = "sqlite"

    def __init__(
        self,
        path: str | Path,
        *,
        migrations: Sequence[Migration] = (),
        busy_seconds: float = 60.0,
    ) -> None:
        """Take the file; ``:memory:`` is refused, since two connections share it."""
        if not str(path) or ":memory:" in str(path):
            raise ConfigurationError("SQLite needs a file: sqlite:///holdfast.db")
        self._path = str(path)
        self._busy_seconds = busy_seconds
        self._migrations = [
            *load_migrations("core", "holdfast.stores.sqlite.migrations"),
            *migrations,
        ]
        self._writer = ConnectionThread("holdfast-sqlite-writer", self._connect)
        self._reader = ConnectionThread("holdfast-sqlite-reader", self._connect)
        self._turn = asyncio.Lock()
        self._is_open = False

    async def open(self) -> None:
        """Open the file, switch on WAL and FULL, bring the schema up to date."""
        if self._is_open:
            return
        try:
            await self._writer.start()
            await self._writer.run(self._migrate)
            await self._reader.start()
        except sqlite3.Error as error:
            await self.close()
            raise StoreUnavailableError(f"cannot open {self._path}: {error}") from error
        except ConfigurationError:
            await self.close()
            raise
        self._is_open = True

    async def close(self) -> None:
        """Finish what is running and close both connections."""
        await self._reader.stop()
        await self._writer.stop()
        self._is_open = False

    async def ping(self) -> None:
        """Ask the reader for one row."""
        await self._read(lambda db: db.execute("SELECT 1").fetchone())

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up on the reader's connection."""
        instant = to_text(now)
        return await self._read(lambda db: _find(db, record_id, instant))

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Look the key up; what is not there is ours, until the primary key says otherwise.

        Duplicates within this process never get here twice at once. Those of another process
        are found out when the write turn is taken, before the handler's first statement runs.
        """
        record = await self.find(record_id, now)
        if record is not None:
            return Found(record)
        return Claimed(SqliteUnit(self, record_id, to_text(now)))

    async def begin(self) -> "SqliteUnit":
        """Open a transaction without a key."""
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        return SqliteUnit(self, None, "")

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Query on the reader's connection."""
        values = to_values(params)
        return await self._read(lambda db: _rows(db.execute(sql, values)))

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one small batch, in a turn of its own."""
        instant = to_text(now)

        def delete(db: sqlite3.Connection) -> int:
            db.execute("BEGIN IMMEDIATE")
            try:
                gone = db.execute(_SQL["sweep_records"], (instant, limit)).rowcount
                db.execute("COMMIT")
            except BaseException:
                _rollback(db)
                raise
            return gone

        async with self._turn:
            return await self._write(delete)

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        after = query.after
        values = {
            "tenant": query.tenant,
            "endpoint": query.endpoint,
            "key": query.key,
            "limit": query.limit,
            "after_at": to_text(after[0]) if after else None,
            "after_tenant": after[1] if after else None,
            "after_endpoint": after[2] if after else None,
            "after_key": after[3] if after else None,
        }
        rows = await self._read(lambda db: db.execute(_SQL["list_records"], values).fetchall())
        return [_record(RecordId(row[0], row[1], row[2]), row[3:]) for row in rows]

    async def secret(self) -> bytes:
        """Return the database's own secret."""
        row = await self._read(lambda db: db.execute(_SQL["read_secret"]).fetchone())
        return bytes(row[0])

    async def pending_migrations(self) -> list[Migration]:
        """Return what ``open`` has not applied: nothing, after it."""
        applied = await self._read(_applied)
        return [m for m in self._migrations if (m.room, m.number) not in applied]

    # -- the two threads ------------------------------------------------------------------

    async def _read(self, work: Any) -> Any:
        try:
            return await self._reader.run(work)
        except (sqlite3.OperationalError, AssertionError) as error:
            raise StoreUnavailableError(f"SQLite: {error}") from error

    async def _write(self, work: Any) -> Any:
        try:
            return await self._writer.run(work)
        except sqlite3.OperationalError as error:
            if is_outage(error):
                raise StoreUnavailableError(f"SQLite: {error}") from error
            raise

    def _connect(self) -> sqlite3.Connection:
        # isolation_level=None: BEGIN and COMMIT are ours alone.
        db = sqlite3.connect(self._path, timeout=self._busy_seconds, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        # NORMAL would lose acknowledged commits at a power cut.
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA foreign_keys=ON")
        return db

    def _migrate(self, db: sqlite3.Connection) -> None:
        """Apply what is missing. The write lock makes several starters take turns."""
        db.execute("BEGIN IMMEDIATE")
        try:
            db.execute(
                "CREATE TABLE IF NOT EXISTS holdfast_migrations (room TEXT NOT NULL,"
                " number INTEGER NOT NULL, name TEXT NOT NULL, applied_at TEXT NOT NULL,"
                " PRIMARY KEY (room, number))"
            )
            applied = _applied(db)
            check_known(applied, self._migrations)
            for migration in self._migrations:
                if (migration.room, migration.number) in applied:
                    continue
                for statement in _statements(migration.sql):
                    db.execute(statement)
                db.execute(
                    "INSERT INTO holdfast_migrations VALUES (?, ?, ?, ?)",
                    (migration.room, migration.number, migration.name, to_text(datetime.now(UTC))),
                )
            db.execute("COMMIT")
        except BaseException:
            _rollback(db)
            raise


class SqliteTransaction:
    """What a handler writes in on SQLite."""

    def __init__(self, unit: "SqliteUnit") -> None:
        """Belong to a unit, which knows when to begin."""
        self._unit = unit

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        values = to_values(params)
        changed: int = await self._unit.run(lambda db: db.execute(sql, values).rowcount)
        return max(changed, 0)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        values = to_values(params)
        rows: list[Row] = await self._unit.run(lambda db: _rows(db.execute(sql, values)))
        return rows

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


class SqliteUnit:
    """One guarded request's transaction. Begins at the first statement, or at the commit."""

    def __init__(self, store: SqliteStore, record_id: RecordId | None, claimed_at: str) -> None:
        """Hold nothing yet."""
        self._store = store
        self._record_id = record_id
        self._claimed_at = claimed_at
        self._has_turn = False
        self._ended = False
        self.superseded = False
        self.transaction = SqliteTransaction(self)

    async def run(self, work: Any) -> Any:
        """Run one piece of work inside the transaction, beginning it if need be."""
        if self._ended:
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        if self._has_turn:
            return await self._store._write(_inside(work))  # noqa: SLF001 - one room
        await self._take_turn()
        return await self._store._write(self._beginning_with(work))  # noqa: SLF001

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event and commit, in one hop."""

        def finish(db: sqlite3.Connection) -> None:
            if record is not None and db.execute(_SAVE, _record_values(record)).rowcount == 0:
                self.superseded = True
                raise SupersededError("another request with this key was committed first")
            if audit is not None:
                db.execute(_AUDIT, _audit_values(audit))
            db.execute("COMMIT")

        try:
            await self.run(finish)
        except sqlite3.Error as error:
            await self.rollback()
            raise StoreUnavailableError(f"SQLite could not commit: {error}") from error
        except BaseException:
            await self.rollback()
            raise
        self._end()

    async def rollback(self) -> None:
        """Undo everything and pass the turn on."""
        if self._ended:
            return
        if self._has_turn:
            # Shielded: the turn is passed on only when the file is free again.
            undo = asyncio.ensure_future(self._store._writer.run(_rollback))  # noqa: SLF001
            undo.add_done_callback(lambda done: self._end() or done.exception())
            with suppress(Exception):
                await asyncio.shield(undo)
        else:
            self._ended = True

    async def _take_turn(self) -> None:
        await self._store._turn.acquire()  # noqa: SLF001
        self._has_turn = True

    def _beginning_with(self, work: Any) -> Any:
        def begin_and_work(db: sqlite3.Connection) -> Any:
            db.execute("BEGIN IMMEDIATE")
            # The one look-up that counts: nobody can write between it and our commit.
            if self._record_id is not None and _exists(db, self._record_id, self._claimed_at):
                self.superseded = True
                raise SupersededError("another request with this key was committed first")
            return work(db)

        return begin_and_work

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._store._turn.release()  # noqa: SLF001


# -- values ---------------------------------------------------------------------------------


def to_text(instant: datetime) -> str:
    """Write an instant so that text order is time order: fixed width, UTC."""
    return instant.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def from_text(text: str) -> datetime:
    """Read an instant back."""
    return datetime.fromisoformat(text)


def to_values(params: Params) -> dict[str, Any]:
    """Adapt parameters to what SQLite can hold."""
    if not params:
        return {}
    return {
        name: to_text(value) if isinstance(value, datetime) else value
        for name, value in params.items()
    }


def is_outage(error: sqlite3.OperationalError) -> bool:
    """Tell the file's troubles from the handler's bad SQL."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return (code & 0xFF) not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)


def _rows(cursor: sqlite3.Cursor) -> list[Row]:
    if cursor.description is None:
        return []
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _find(db: sqlite3.Connection, record_id: RecordId, instant: str) -> Record | None:
    row = db.execute(_FIND, (*record_id, instant)).fetchone()
    return None if row is None else _record(record_id, row)


def _exists(db: sqlite3.Connection, record_id: RecordId, instant: str) -> bool:
    return db.execute(_FIND, (*record_id, instant)).fetchone() is not None


def _record(record_id: RecordId, row: Sequence[Any]) -> Record:
    return Record(
        id=record_id,
        mark=RequestMark(row[0], row[1]),
        status=row[2],
        body=bytes(row[3]),
        headers=_decode_headers(row[4]),
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=from_text(row[8]),
        expires_at=from_text(row[9]),
    )


def _record_values(record: Record) -> tuple[Any, ...]:
    return (
        *record.id,
        *record.mark,
        record.status,
        record.body,
        _encode_headers(record.headers).decode(),
        record.request_id,
        record.correlation_id,
        record.audit_id,
        to_text(record.created_at),
        to_text(record.expires_at),
    )


def _audit_values(event: AuditEvent) -> tuple[Any, ...]:
    return (
        event.tenant,
        event.id,
        event.actor,
        event.endpoint,
        event.payload_hash,
        event.status,
        event.resource,
        event.version,
        event.request_id,
        event.correlation_id,
        to_text(event.created_at),
    )


def _applied(db: sqlite3.Connection) -> set[tuple[str, int]]:
    return set(db.execute("SELECT room, number FROM holdfast_migrations").fetchall())


def _statements(script: str) -> list[str]:
    """Split a script; ``executescript`` would commit the transaction we are in."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    if pending.strip():
        statements.append(pending)
    return statements


def _inside(work: Any) -> Any:
    """Run only inside the transaction: SQLite ends it by itself when the disk is full."""

    def work_inside(db: sqlite3.Connection) -> Any:
        if not db.in_transaction:
            raise StoreUnavailableError("SQLite: the transaction was rolled back")
        return work(db)

    return work_inside


def _rollback(db: sqlite3.Connection) -> None:
    if db.in_transaction:
        db.execute("ROLLBACK")
