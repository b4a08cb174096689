"""The store for an app that has its own SQLAlchemy engine: a session is the transaction."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Final, TypeVar

from onceward_protocol.extras import needs_extra

with needs_extra("sqlalchemy"):
    from sqlalchemy import Connection, Engine, event
    from sqlalchemy import exc as sa_errors
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

from onceward.core.decision import HELD, Held
from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.core.storable_text import check_storable
from onceward.core.table_names import TableNames
from onceward.errors import CommitUnknownError, ConfigurationError, StoreUnavailableError
from onceward.ports import (
    Claimed,
    DurabilityMetrics,
    EpochReading,
    Found,
    Params,
    RecordQuery,
    Row,
    StoreMetrics,
)
from onceward.stores.asyncpg_messages import confirm_read, notices_of
from onceward.stores.connection_gate import ConnectionGate, current_visit
from onceward.stores.migrations import MIGRATION_LOCK, MigrationTable
from onceward.stores.notifier import LocalNotifier
from onceward.stores.parts import Schema
from onceward.stores.postgres.abandoned import STILL_RUNNING
from onceward.stores.postgres.epoch import EpochReader, backend_of
from onceward.stores.rows import listed_record, record_of
from onceward.stores.session_limits import REPLACED, SessionLimits
from onceward.stores.sql_loader import load_queries
from onceward.stores.sqlalchemy_errors import (
    driver_error,
    refuse_connection,
    translating_outages,
    translating_refusals,
)
from onceward.stores.sqlalchemy_file import ReplacedFile
from onceward.stores.sqlalchemy_sessions import (
    CLAIMED_ROWS,
    HELD_ROWS,
    begin_immediate,
    database_of,
    has_idle_connection,
    listen_for_control,
    listen_for_control_statements,
    max_connections,
    record_list_values,
    save,
    warn_unless_synchronous,
)
from onceward.stores.sqlalchemy_unit import (
    OUTAGE,
    SqlAlchemyUnit,
    end_transaction,
    fetch_rows,
    guarded_class,
    refuse_autocommit,
    rolling_back,
)
from onceward.stores.sqlite.epoch import reading_of
from onceward.stores.sqlite.rows import to_text
from onceward_protocol.storage.migrations import Migration, run_steps_async
from onceward_protocol.storage.private_files import create_database_file

__all__ = ["SqlAlchemyStore", "SqlAlchemyUnit"]

T = TypeVar("T")

_DRIVERS: Final = {("sqlite", "aiosqlite"): "sqlite", ("postgresql", "asyncpg"): "postgres"}


class SqlAlchemyStore:
    """The store for an app that has its own SQLAlchemy 2 engine, on asyncpg or aiosqlite.

    ::

        engine = create_async_engine("postgresql+asyncpg://…")
        sessions = async_sessionmaker(engine, expire_on_commit=False)
        onceward = Onceward(SqlAlchemyStore(sessions), principal=…)

    A guarded handler gets an ``AsyncSession`` of that maker. It may add, flush, query, use
    savepoints and roll back. It must not commit, because the record commits with its rows: that
    raises ``UsageError``. The store does not change or dispose of the engine.

    On SQLite a session begins with ``BEGIN IMMEDIATE``, at its first statement. A deferred
    transaction that reads first and writes later fails if another has written in between, and the
    driver's default lets a savepoint commit by itself. Writers of this process wait for each other
    before that statement, without a connection; for other processes they wait as long as the
    engine's ``connect_args={"timeout": …}`` allows (5 seconds by default).
    """

    def __init__(
        self,
        sessions: async_sessionmaker[AsyncSession] | AsyncEngine,
        *,
        table_prefix: str | None = None,
        schema: str | None = None,
        migrations: Sequence[Migration] = (),
        **limits: float,
    ) -> None:
        """``sessions`` is the app's session maker, or its engine. ``open`` connects.

        On SQLite, names of Onceward's tables begin with ``table_prefix`` (``onceward_``). On
        PostgreSQL they are in ``schema`` (``onceward``), with a prefix only if it is given or the
        schema is ``public``. ``limits`` are those of ``SessionLimits``, for PostgreSQL.
        """
        # For PostgreSQL.
        self.limits = SessionLimits(**limits)
        sessions = _session_maker(sessions)
        bind = sessions().get_bind()
        refuse_connection(bind)
        # The name in logs and in ``/readyz``.
        self.name: str = bind.dialect.name
        database = database_of(bind.engine, _DRIVERS, "postgresql+asyncpg or sqlite+aiosqlite")
        self._sessions = sessions
        self._session_class = guarded_class(type(sessions().sync_session), database == "sqlite")
        self._pool_events: Any = bind.engine
        self._replaced_file = ReplacedFile(bind.engine, self.sqlite_path)
        # Limits how many guarded requests use the pool at once.
        self.gate = self._new_gate()
        self._package = f"onceward.stores.{database}"
        names = TableNames.chosen(table_prefix, schema, is_sqlite=self.is_sqlite)
        # The parts of the schema that are wanted, and those that the database has.
        self.schema = Schema(names, is_sqlite=self.is_sqlite, migrations=migrations)
        self._use_names(names)
        self.limits.abandoned.limit_to_half_of(self.max_connections)
        self._turn = asyncio.Lock()
        self._metrics: StoreMetrics | None = None
        self._epochs = EpochReader()
        self._ending_tasks: set[asyncio.Task[Any]] = set()
        self._is_open = False
        # The event loop and the engine's pool when it was last opened.
        self._opened_with: tuple[asyncio.AbstractEventLoop, Any] | None = None

    @property
    def sqlite_path(self) -> str | None:
        """The file of the engine; None on PostgreSQL, or if its URL is an SQLite URI."""
        url = self._pool_events.url
        return url.database if self.is_sqlite and "uri" not in url.query else None

    @property
    def is_sqlite(self) -> bool:
        """True on SQLite, where writers take turns and the primary key decides."""
        return self.name == "sqlite"

    @property
    def max_connections(self) -> int | None:
        """How many connections the engine's pool allows; None if there is no limit."""
        return max_connections(self._sessions().get_bind().engine.pool)

    def report_to(self, metrics: StoreMetrics) -> None:
        """Report waits for a connection of the engine's pool to ``metrics``."""
        self._metrics = metrics
        if isinstance(metrics, DurabilityMetrics):
            self.limits.abandoned.report = metrics.commits_abandoned

    async def open(self) -> None:
        """Migrate the schema, in one transaction of the app's engine. Idempotent."""
        if self._is_open:
            if not self.schema.is_complete:
                await self._migrate()
            return
        self._refuse_pool_of_another_loop()
        self._turn = asyncio.Lock()  # a lock belongs to one event loop
        self.gate = self._new_gate()
        self._is_open = True
        create_database_file(self.sqlite_path, of_app=True)
        if self.is_sqlite:
            listen_for_control(self._pool_events)
        else:  # commits and rollbacks are reported by the connection, or its transaction
            listen_for_control_statements(self._pool_events)
        try:
            await self._migrate()
        except BaseException:
            self._is_open = False
            raise
        for name, listener in self._pool_listeners():
            event.listen(self._pool_events, name, listener)
        self._replaced_file.listen()
        if self.is_sqlite:
            warn_unless_synchronous((await self._fetch("PRAGMA synchronous"))[0][0])

    async def close(self) -> None:
        """Wait for transactions that are ending. The app disposes of the engine."""
        if self._is_open:
            self._is_open = False
            self._replaced_file.stop()
            for name, listener in self._pool_listeners():
                if event.contains(self._pool_events, name, listener):
                    event.remove(self._pool_events, name, listener)
        if self._ending_tasks:
            await asyncio.wait(self._ending_tasks)

    async def ping(self) -> None:
        """Run a query."""
        await self._fetch("SELECT 1")

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        check_storable(*record_id)
        values = (*record_id, self.instant(now))
        async with self._reading() as connection:
            row = (await connection.exec_driver_sql(self._sql["find_record"], values)).first()
            if row is not None and not self.is_sqlite:
                await confirm_read(_pooled(connection), self.limits)
        return record_of(record_id, row) if row is not None else None

    async def claim(
        self,
        record_id: RecordId,
        now: datetime,
        *,
        session: AsyncSession | None = None,
    ) -> Claimed | Found | Held:
        """Claim the key: with an advisory lock on PostgreSQL, by the first commit on SQLite.

        ``session`` is one of ``new_session``; its transaction must have been ended by
        ``release_session``.
        """
        check_storable(*record_id)
        if self.limits.abandoned.is_full:
            await self.limits.abandoned.check_by(self._still_running)
        if self.is_sqlite:
            record = await self.find(record_id, now)
            if record is not None:
                return Found(record)
        unit = self._unit(record_id, now, session)
        await unit.enter()
        if self.is_sqlite:
            unit.guard()
            return Claimed(unit)
        async with rolling_back(unit):
            rows = await self._begin_and_claim(unit)
            if rows in CLAIMED_ROWS:
                unit.guard()
                return Claimed(unit, after_expiry=CLAIMED_ROWS[rows])
            row = None
            if rows != HELD_ROWS:
                connection = await unit.transaction.connection()
                values = (*record_id, now)
                row = (await connection.exec_driver_sql(self._sql["find_record"], values)).first()
                if row is not None:
                    await unit.confirm()
            await unit.rollback()
        visit = current_visit()
        if visit is not None:
            visit.leave_without_connection()
        # No row although there was one: it expired and was swept in between.
        return Found(record_of(record_id, row)) if row is not None else HELD

    async def _begin_and_claim(self, unit: SqlAlchemyUnit) -> int:
        """Return the number of rows of ``onceward_claim``."""
        session = unit.transaction
        if has_idle_connection(self._pool_events.pool):
            return await session.run_sync(unit.begin_and_claim)
        async with asyncio.timeout(self.limits.claim_seconds) as connecting:
            if self._metrics is not None:
                await self._connect(session)
            return await session.run_sync(unit.begin_and_claim, connecting)

    async def begin(
        self,
        *,
        idle_seconds: float | None = None,  # noqa: ARG002
        session: AsyncSession | None = None,
    ) -> SqlAlchemyUnit:
        """Open a transaction without a key.

        ``idle_seconds`` is ignored: a session runs one statement at a time and belongs to the
        app, so it could not be kept alive.
        """
        if self.limits.abandoned.is_full:
            await self.limits.abandoned.check_by(self._still_running)
        unit = self._unit(None, None, session)
        unit.guard()
        if not self.is_sqlite:
            async with rolling_back(unit):
                async with asyncio.timeout(self.limits.claim_seconds):
                    connection = await self._connect(unit.transaction)
                await connection.exec_driver_sql("SELECT 1")
                await refuse_autocommit(connection)
        return unit

    # -- sessions outside a guarded handler -------------------------------------------------

    def new_session(self) -> AsyncSession:
        """Return a session for a request. It can be given to ``claim`` or ``begin`` later."""
        return self._sessions(sync_session_class=self._session_class)

    async def release_session(self, session: AsyncSession) -> bool:
        """End the session's transaction and return its connection, before the claim.

        What it has loaded stays loaded and what it has not flushed stays pending, to be flushed in
        the guarded transaction. Returns False if it had written something, which is rolled back.
        """
        if not session.in_transaction():
            return True
        return await self.run_to_end(session.run_sync(end_transaction))

    async def close_session(self, session: AsyncSession) -> None:
        """Roll back what was not committed and return the connection. Never raises."""
        session.sync_session.info.pop(OUTAGE, None)
        with suppress(Exception):
            if session.in_transaction():
                await self.run_to_end(session.close())
            else:  # it holds no connection
                session.sync_session.close()

    def outage_of(self, session: AsyncSession, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a method of the session raised ``error`` in an outage."""
        if session.sync_session.info.get(OUTAGE) is not error:
            return None
        outage = StoreUnavailableError(f"the database is unavailable: {driver_error(error)}")
        outage.__cause__ = driver_error(error)
        return outage

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""
        async with self._reading() as connection:
            return await fetch_rows(connection, sql, params, is_sqlite=self.is_sqlite)

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in its own transaction."""

        async def run(connection: AsyncConnection) -> Sequence[Row]:
            return await fetch_rows(connection, sql, params, is_sqlite=self.is_sqlite)

        return await self._transact(run)

    def notifier(self) -> LocalNotifier:
        """Return a notifier for this process; workers of others poll once a second."""
        return LocalNotifier()

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one batch of expired records."""
        values = (self.instant(now), limit)

        async def delete(connection: AsyncConnection) -> int:
            result = await connection.exec_driver_sql(self._sql["sweep_records"], values)
            return int(result.scalar_one()) if result.returns_rows else result.rowcount

        return await self._transact(delete)

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        values = record_list_values(query, self.instant, is_sqlite=self.is_sqlite)
        rows = await self._fetch(self._sql["list_records"], values)
        return [listed_record(row) for row in rows]

    async def secret(self) -> bytes:
        """Return the secret of this database."""
        return bytes((await self._fetch(self._sql["read_secret"]))[0][0])

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Report the epoch of each new connection of the engine."""
        self._epochs.report_to(report)

    async def read_epoch(self) -> EpochReading:
        """Read the epoch on a connection of the engine."""
        if self.is_sqlite:
            sql = load_queries("onceward.stores", "records.sql", names=self.table_names)
            rows = await self._fetch(sql["read_cache_epoch"])
            return reading_of(self.sqlite_path, str(rows[0][0]))
        async with self._reading() as connection:

            async def fetch_row(sql: str) -> Any:
                with translating_outages():
                    return (await connection.exec_driver_sql(sql)).first()

            return await self._epochs.read(self.table_names, fetch_row, (sa_errors.DBAPIError,))

    # -- for the unit ---------------------------------------------------------------------

    def instant(self, at: datetime) -> Any:
        """Convert an instant to what this database stores."""
        return to_text(at) if self.is_sqlite else at

    async def take_turn(self) -> None:
        """Wait until no other session of this process writes to the SQLite file."""
        await self._turn.acquire()

    def pass_turn_on(self) -> None:
        """Let the next session write."""
        self._turn.release()

    def begin_immediate(
        self, connection: Any, record_id: RecordId | None, claimed_at: datetime | None
    ) -> bool:
        """Begin on SQLite; return whether the key has a record by now. Runs in a greenlet."""
        return begin_immediate(connection, self._sql["find_record"], record_id, claimed_at)

    async def save(
        self, connection: AsyncConnection, record: Record | None, audit: AuditEvent | None
    ) -> None:
        """Write record and audit event in the session's transaction."""

        def run(sync: Connection) -> None:
            save(sync.exec_driver_sql, self._sql, record, audit, is_sqlite=self.is_sqlite)

        await connection.run_sync(run)

    async def run_to_end(self, ending: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, even if the caller is cancelled."""
        task = asyncio.ensure_future(ending)
        self._ending_tasks.add(task)
        task.add_done_callback(self._ending_tasks.discard)
        return await asyncio.shield(task)

    # -- connections ----------------------------------------------------------------------

    def _new_gate(self) -> ConnectionGate:
        pool: Any = self._sessions().get_bind().engine.pool
        timeout = getattr(pool, "timeout", None)
        seconds = timeout() if timeout is not None else 30.0
        return ConnectionGate(self.max_connections, seconds, self._pool_waited)

    def _pool_waited(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.pool_waited(seconds)

    def _pool_listeners(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        listeners: list[tuple[str, Callable[..., None]]] = [
            ("checkout", self.gate.on_checkout),
            ("checkin", self.gate.on_checkin),
        ]
        if not self.is_sqlite:
            listeners.append(("connect", self._on_connect))
        return tuple(listeners)

    def _on_connect(self, adapted: Any, pooled: Any) -> None:
        """Read the epoch on a new connection of the engine. Runs in SQLAlchemy's greenlet."""

        def fetch_row(sql: str) -> Any:
            row = adapted.run_async(lambda driver: driver.fetchrow(sql))
            if row is not None:
                notices_of(pooled).backend = backend_of(row)
            return row

        reading = self._epochs.read_blocking(self.table_names, fetch_row, (Exception,))
        if reading.is_replaced:
            adapted.driver_connection.terminate()
            raise ConnectionError(REPLACED)

    def _refuse_pool_of_another_loop(self) -> None:
        """Raise ``ConfigurationError`` for asyncpg's connections of a loop that has ended."""
        loop, pool = asyncio.get_running_loop(), self._sessions().get_bind().engine.pool
        before, self._opened_with = self._opened_with, (loop, pool)
        if self.is_sqlite or before is None or before[0] is loop or before[1] is not pool:
            return
        idle: Callable[[], int] | None = getattr(pool, "checkedin", None)
        if idle is not None and idle() > 0:
            self._opened_with = before
            raise ConfigurationError(
                "the engine's connections belong to another event loop: in tests, use "
                "`with TestClient(app)` and dispose of the engine in the lifespan, or create the "
                "engine with poolclass=NullPool"
            )

    async def _connect(self, session: AsyncSession) -> AsyncConnection:
        """Return the session's connection; report the wait if none was free."""
        limit = self.max_connections
        pool: Any = session.get_bind().engine.pool
        if limit is None or pool.checkedout() < limit:
            return await session.connection()
        started = time.monotonic()
        try:
            return await session.connection()
        finally:
            self._pool_waited(time.monotonic() - started)

    def _unit(
        self,
        record_id: RecordId | None,
        claimed_at: datetime | None,
        session: AsyncSession | None = None,
    ) -> SqlAlchemyUnit:
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        return SqlAlchemyUnit(self, session, record_id, claimed_at)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[AsyncConnection]:
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")
        # Autocommit: one query needs no BEGIN and no ROLLBACK around it.
        options: Any = {"isolation_level": "AUTOCOMMIT"}
        session = self._sessions()
        timer: asyncio.TimerHandle | None = None
        try:
            with translating_outages():
                if self.is_sqlite:
                    yield await session.connection()
                    return
                async with asyncio.timeout(self.limits.claim_seconds):
                    connection = await session.connection(execution_options=options)
                driver = _pooled(connection).driver_connection
                timer = asyncio.get_running_loop().call_later(
                    self.limits.statement_seconds, driver.terminate
                )
                yield connection
        finally:
            if timer is not None:
                timer.cancel()
            await self.run_to_end(session.close())

    async def _still_running(self, backends: list[int]) -> Sequence[Any]:
        return await self._fetch(STILL_RUNNING, (backends,))

    async def _fetch(self, sql: str, params: Any = ()) -> Sequence[Any]:
        async with self._reading() as connection:
            return (await connection.exec_driver_sql(sql, params)).all()

    async def _transact(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        """Run a function in its own transaction."""
        unit = self._unit(None, None)
        unit.guard()
        async with rolling_back(unit):
            async with asyncio.timeout(self.limits.claim_seconds):
                connection = await unit.transaction.connection()
            result = await work(connection)
        try:
            await unit.commit(None, None)
        except CommitUnknownError as error:  # the caller may try again
            raise StoreUnavailableError(str(error)) from error
        return result

    async def _migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        with translating_refusals():
            migration = await self._transact(self._apply_migrations)
        self.schema.committed(migration)
        self._use_names(migration.names)

    async def _apply_migrations(self, connection: AsyncConnection) -> MigrationTable:
        if not self.is_sqlite:
            await connection.exec_driver_sql("SELECT pg_advisory_xact_lock($1)", (MIGRATION_LOCK,))
            await refuse_autocommit(connection)
        driver: Any = (await connection.get_raw_connection()).driver_connection

        async def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
            if not self.is_sqlite and not values and not sql.startswith("SELECT"):
                await driver.execute(sql)
                return ()
            result = await connection.exec_driver_sql(sql, values)
            return result.all() if result.returns_rows else ()

        migration = self.schema.migration()
        await run_steps_async(migration.apply(), execute)
        return migration

    def _use_names(self, names: TableNames) -> None:
        self.table_names = names
        self.claim_function = names.table("claim")
        self.finish_function = names.table("save_record")
        self._sql = load_queries(self._package, names=names)


def _pooled(connection: AsyncConnection) -> Any:
    """Return the pool's object for a connection."""
    assert connection.sync_connection is not None  # noqa: S101 - it is open
    return connection.sync_connection.connection


def _session_maker(given: Any) -> async_sessionmaker[AsyncSession]:
    """Return the session maker of an engine. Raises ``ConfigurationError`` for anything else."""
    if isinstance(given, async_sessionmaker):
        return given
    if isinstance(given, AsyncEngine):
        return async_sessionmaker(given, expire_on_commit=False)
    if isinstance(given, str):
        raise ConfigurationError(
            "SqlAlchemyStore takes an engine, not a URL: write create_async_engine(url), or use "
            "open_store(url)"
        )
    if isinstance(given, Engine | Session | sessionmaker | scoped_session):
        raise ConfigurationError(
            f"SqlAlchemyStore takes an asynchronous engine, not a synchronous {_kind(given)}: "
            "write create_async_engine(…), or use onceward.stores.sqlalchemy_sync"
        )
    raise ConfigurationError(
        f"SqlAlchemyStore takes an async_sessionmaker or an AsyncEngine, not a {_kind(given)}"
    )


def _kind(value: object) -> str:
    return type(value).__name__
