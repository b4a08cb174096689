"""Records through the SQLAlchemy engine an app already has: its session is the transaction."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import StaticPool
from sqlalchemy import exc as sa_errors
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker

from holdfast.core.decision import HELD, Held
from holdfast.core.fingerprint import lock_number
from holdfast.core.idempotency_record import AuditEvent, Record, RecordId, RequestFingerprint
from holdfast.errors import (
    CommitUnknownError,
    ConfigurationError,
    StoreUnavailableError,
    SupersededError,
)
from holdfast.ports import Claimed, Found, Params, RecordQuery, Row
from holdfast.stores.migrations import (
    MIGRATION_LOCK,
    Migration,
    MigrationTable,
    apply_migrations,
    load_migrations,
    run_steps_async,
)
from holdfast.stores.notifier import LocalNotifier
from holdfast.stores.sql_loader import load_queries
from holdfast.stores.sqlalchemy_unit_of_work import (
    SUPERSEDED,
    SqlAlchemyUnit,
    fetch,
    telling_outages,
    undoing,
)
from holdfast.stores.sqlite.rows import from_text, record_values, to_text

__all__ = ["SqlAlchemyStore", "SqlAlchemyUnit"]

T = TypeVar("T")

_log = logging.getLogger("holdfast.stores")

_DRIVERS: Final = {("sqlite", "aiosqlite"): "sqlite", ("postgresql", "asyncpg"): "postgres"}
_SYNCHRONOUS_FULL: Final = 2

# Ours, and what PostgreSQL says in its place where the app's engine is REPEATABLE READ.
_SUPERSEDED_STATES: Final = frozenset({"HF002", "40001"})

# The parameters of SQLite's list_records, in the order PostgreSQL's are numbered.
_LIST_NAMES: Final = (
    *("tenant", "endpoint", "key"),
    *("after_at", "after_tenant", "after_endpoint", "after_key", "limit"),
)

_encode_headers = msgspec.json.Encoder().encode
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class SqlAlchemyStore:
    """The store for an app that has its own SQLAlchemy 2 engine, on asyncpg or aiosqlite.

    ::

        engine = create_async_engine("postgresql+asyncpg://…")
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        holdfast = Holdfast(SqlAlchemyStore(sessions))

    A guarded handler gets an ``AsyncSession`` of that maker. It may add, flush, query, use
    savepoints and even roll back; it must not commit, as the record commits with its rows, and
    an attempt raises ``UsageError``. The engine stays the app's: nothing is changed on it and
    ``close`` does not dispose of it.

    On SQLite a session begins with ``BEGIN IMMEDIATE``, at its first statement. A deferred
    transaction that reads first and writes later fails at once when another has written in
    between, and the driver's own way of beginning lets a savepoint commit by itself. Writers of
    this process line up before that statement, without a connection; those of other processes
    wait as long as the engine's ``connect_args={"timeout": …}`` says (5 seconds by default).
    """

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession],
        *,
        migrations: Sequence[Migration] = (),
    ) -> None:
        """Take the app's session maker; nothing is connected before ``open``."""
        bind = sessions().get_bind()
        self.name: str = bind.dialect.name
        database = _DRIVERS.get((bind.dialect.name, bind.dialect.driver))
        if database is None:
            raise ConfigurationError(
                f"{bind.dialect.name}+{bind.dialect.driver} is not supported: use "
                "postgresql+asyncpg or sqlite+aiosqlite"
            )
        if isinstance(bind.engine.pool, StaticPool):
            raise ConfigurationError(
                "this engine shares one connection, and so one transaction, between all requests: "
                "use a SQLite file"
            )
        self._sessions = sessions
        self._sql = load_queries(f"holdfast.stores.{database}")
        self._migrations = [
            *load_migrations("core", f"holdfast.stores.{database}.migrations"),
            *migrations,
        ]
        self._turn = asyncio.Lock()
        self._endings: set[asyncio.Task[None]] = set()
        self._is_open = False

    @property
    def is_sqlite(self) -> bool:
        """True on SQLite, where the primary key alone judges and writers take turns."""
        return self.name == "sqlite"

    @property
    def max_connections(self) -> int | None:
        """How many transactions the engine's pool has room for; None where it has no limit."""
        pool: Any = self._sessions().get_bind().engine.pool
        overflow: int = getattr(pool, "_max_overflow", -1)
        return None if overflow < 0 else pool.size() + overflow

    async def open(self) -> None:
        """Bring the schema up to date, in one transaction of the app's own engine."""
        if self._is_open:
            return
        self._turn = asyncio.Lock()  # anew: a lock stays with the event loop it was used in
        self._is_open = True
        try:
            await self._transact(self._apply_migrations)
        except BaseException:
            self._is_open = False
            raise
        if self.is_sqlite and (await self._fetch("PRAGMA synchronous"))[0][0] < _SYNCHRONOUS_FULL:
            _log.warning(
                "SQLite runs with PRAGMA synchronous below FULL: a power cut may lose what was "
                "acknowledged, and with it the memory that it happened"
            )

    async def close(self) -> None:
        """Finish what is ending. The engine is the app's to dispose of."""
        self._is_open = False
        if self._endings:
            await asyncio.wait(self._endings)

    async def ping(self) -> None:
        """Ask for one row."""
        await self._fetch("SELECT 1")

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        rows = await self._fetch(self._sql["find_record"], (*record_id, self.instant(now)))
        return _record(record_id, rows[0]) if rows else None

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Take the key: on PostgreSQL by an advisory lock, on SQLite by being first to commit."""
        if self.is_sqlite:
            record = await self.find(record_id, now)
            if record is not None:
                return Found(record)
            return Claimed(self._unit(record_id, self.instant(now)))
        unit = self._unit(record_id, now)
        async with undoing(unit):
            connection = await unit.transaction.connection()
            # The lock and the look-up are two statements: in one, the snapshot would be older
            # than the lock, and a record committed in between would be missed.
            locked = await connection.exec_driver_sql(
                "SELECT pg_try_advisory_xact_lock($1)", (lock_number(*record_id),)
            )
            if not locked.scalar_one():
                await unit.rollback()
                return HELD
            await _refuse_autocommit(connection)
            found = await connection.exec_driver_sql(self._sql["find_record"], (*record_id, now))
            row = found.first()
            if row is not None:
                await unit.rollback()
                return Found(_record(record_id, row))
        return Claimed(unit)

    async def begin(self, *, idle_seconds: float | None = None) -> SqlAlchemyUnit:  # noqa: ARG002
        """Open a transaction without a key.

        None is ended for being left alone: a session takes one statement at a time and is the
        app's, so nobody could keep a living one awake.
        """
        unit = self._unit(None, None)
        if not self.is_sqlite:
            async with undoing(unit):
                connection = await unit.transaction.connection()
                await connection.exec_driver_sql("SELECT 1")
                await _refuse_autocommit(connection)
        return unit

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Query outside any guarded request."""
        async with self._reading() as connection:
            return await fetch(connection, sql, params, is_sqlite=self.is_sqlite)

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in a transaction of its own."""

        async def run(connection: AsyncConnection) -> Sequence[Row]:
            return await fetch(connection, sql, params, is_sqlite=self.is_sqlite)

        return await self._transact(run)

    def notifier(self) -> LocalNotifier:
        """Return a bell for this process; workers of others look once a second."""
        return LocalNotifier()

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one small batch."""
        values = (self.instant(now), limit)

        async def delete(connection: AsyncConnection) -> int:
            return (await connection.exec_driver_sql(self._sql["sweep_records"], values)).rowcount

        return await self._transact(delete)

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        after = query.after or (None, None, None, None)
        at = None if after[0] is None else self.instant(after[0])
        values: Any = (query.tenant, query.endpoint, query.key, at, *after[1:], query.limit)
        if self.is_sqlite:
            values = dict(zip(_LIST_NAMES, values, strict=True))
        rows = await self._fetch(self._sql["list_records"], values)
        return [_record(RecordId(row[0], row[1], row[2]), row[3:]) for row in rows]

    async def secret(self) -> bytes:
        """Return the database's own secret."""
        return bytes((await self._fetch(self._sql["read_secret"]))[0][0])

    # -- for the unit ---------------------------------------------------------------------

    def instant(self, at: datetime) -> Any:
        """Write an instant as this database keeps it."""
        return to_text(at) if self.is_sqlite else at

    async def take_turn(self) -> None:
        """Wait for the one write turn this process has on a SQLite file."""
        await self._turn.acquire()

    def pass_turn_on(self) -> None:
        """Let the next one write."""
        self._turn.release()

    def begin_immediate(self, connection: Any, record_id: RecordId | None, claimed_at: Any) -> bool:
        """Begin on SQLite; returns whether another's record stands by now. In a greenlet."""
        if connection.connection.driver_connection.in_transaction:
            # The app's own "begin" listener was here; nothing was read or written yet.
            connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        # SQLite rolls back by itself when the disk is full, and the driver would begin anew at
        # the next INSERT. This mark is gone then, and the commit finds out.
        connection.exec_driver_sql("SAVEPOINT holdfast")
        if record_id is None:
            return False
        found = connection.exec_driver_sql(self._sql["find_record"], (*record_id, claimed_at))
        return found.first() is not None

    async def save(
        self, connection: AsyncConnection, record: Record | None, audit: AuditEvent | None
    ) -> None:
        """Write record and audit event beside the business rows."""
        if self.is_sqlite:
            if record is not None:
                saved = await connection.exec_driver_sql(
                    self._sql["save_record"], record_values(record)
                )
                if saved.rowcount == 0:
                    raise SupersededError(SUPERSEDED)
            if audit is not None:
                await self._save_audit(connection, audit)
            await connection.exec_driver_sql("RELEASE holdfast")
        elif record is not None:
            about = (audit.id, audit.actor, audit.resource, audit.version) if audit else (None,) * 4
            times = (record.created_at, record.expires_at)
            values = (*_record_values(record), *times, *about)
            try:
                await connection.exec_driver_sql(self._sql["finish"], values)
            except sa_errors.DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) in _SUPERSEDED_STATES:
                    raise SupersededError(SUPERSEDED) from error
                raise
        elif audit is not None:
            await self._save_audit(connection, audit)
        else:
            # Without a statement of ours, COMMIT would end a spoilt transaction in silence.
            await connection.exec_driver_sql("SELECT 1")

    async def end(self, ending: Coroutine[Any, Any, None]) -> None:
        """Run an ending to its end, even if whoever waits for it is cancelled."""
        task = asyncio.ensure_future(ending)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
        await asyncio.shield(task)

    # -- inside ---------------------------------------------------------------------------

    def _unit(self, record_id: RecordId | None, claimed_at: Any) -> SqlAlchemyUnit:
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        return SqlAlchemyUnit(self, self._sessions(), record_id, claimed_at)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        # Autocommit: one query needs no BEGIN and no ROLLBACK around it.
        options: Any = {} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT"}
        session = self._sessions()
        try:
            with telling_outages():
                yield await session.connection(execution_options=options)
        finally:
            await self.end(session.close())

    async def _fetch(self, sql: str, params: Any = ()) -> Sequence[Any]:
        async with self._reading() as connection:
            return (await connection.exec_driver_sql(sql, params)).all()

    async def _save_audit(self, connection: AsyncConnection, event: AuditEvent) -> None:
        subject = (event.tenant, event.id, event.actor, event.endpoint, event.payload_hash)
        outcome = (event.status, event.resource, event.version)
        origin = (event.request_id, event.correlation_id, self.instant(event.created_at))
        await connection.exec_driver_sql(
            self._sql["save_audit_event"], (*subject, *outcome, *origin)
        )

    async def _transact(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Do something of ours in a transaction of its own."""
        unit = self._unit(None, None)
        async with undoing(unit):
            result = await work(await unit.transaction.connection())
        try:
            await unit.commit(None, None)
        except CommitUnknownError as error:  # whatever it was, it may be done again
            raise StoreUnavailableError(str(error)) from error
        return result

    async def _apply_migrations(self, connection: AsyncConnection) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        if not self.is_sqlite:
            await connection.exec_driver_sql("SELECT pg_advisory_xact_lock($1)", (MIGRATION_LOCK,))
            await _refuse_autocommit(connection)
        driver: Any = (await connection.get_raw_connection()).driver_connection

        async def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
            if not self.is_sqlite and not values and not sql.startswith("SELECT"):
                await driver.execute(sql)  # SQLAlchemy refuses scripts of many statements
                return ()
            result = await connection.exec_driver_sql(sql, values)
            return result.all() if result.returns_rows else ()

        await run_steps_async(
            apply_migrations(self._migrations, MigrationTable(is_sqlite=self.is_sqlite)), execute
        )


async def _refuse_autocommit(connection: AsyncConnection) -> None:
    """Make sure that a statement has begun a transaction: an autocommit engine never does."""
    driver: Any = (await connection.get_raw_connection()).driver_connection
    if not driver.is_in_transaction():
        raise ConfigurationError(
            "this engine commits every statement by itself (AUTOCOMMIT), so nothing can commit "
            "together: give Holdfast an engine with transactions"
        )


def _record(record_id: RecordId, row: Sequence[Any]) -> Record:
    read: Callable[[Any], datetime] = from_text if isinstance(row[8], str) else _as_is
    return Record(
        id=record_id,
        fingerprint=RequestFingerprint(row[0], row[1]),
        status=row[2],
        body=bytes(row[3]),
        # SQLAlchemy 2.1 reads jsonb by itself, 2.0 leaves it as text.
        headers=row[4] if isinstance(row[4], dict) else _decode_headers(row[4]),
        request_id=row[5],
        correlation_id=row[6],
        audit_id=row[7],
        created_at=read(row[8]),
        expires_at=read(row[9]),
    )


def _record_values(record: Record) -> tuple[Any, ...]:
    headers = _encode_headers(record.headers).decode()
    answer = (record.status, record.body, headers)
    return (*record.id, *record.fingerprint, *answer, record.request_id, record.correlation_id)


def _as_is(value: Any) -> datetime:
    at: datetime = value
    return at
