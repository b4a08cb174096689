"""The store for an app with sync SQLAlchemy: its ``Session`` is the transaction."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib import import_module
from typing import Any, Final, TypeVar

from onceward_protocol.extras import needs_extra

with needs_extra("sqlalchemy"):
    from sqlalchemy import Connection, Engine, event
    from sqlalchemy import exc as sa_errors
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

from onceward.core.decision import HELD, Held
from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.core.storable_text import check_storable
from onceward.core.table_names import TableNames
from onceward.errors import ConfigurationError, StoreUnavailableError, UsageError
from onceward.ports import (
    Claimed,
    DurabilityMetrics,
    EpochReading,
    Found,
    Notifier,
    Params,
    RecordQuery,
    Row,
    StoreMetrics,
)
from onceward.stores.connection_gate import ConnectionGate, ThreadGate, Visit, current_visit
from onceward.stores.migrations import MIGRATION_LOCK, MigrationTable
from onceward.stores.notifier import LocalNotifier
from onceward.stores.parts import Schema
from onceward.stores.postgres.abandoned import STILL_RUNNING
from onceward.stores.postgres.epoch import EpochReader, backend_of
from onceward.stores.postgres.params import positional
from onceward.stores.psycopg_message import begin_statement
from onceward.stores.pyformat import to_pyformat
from onceward.stores.replication import unconfirmed
from onceward.stores.rows import listed_record, record_of
from onceward.stores.session_limits import REPLACED, SessionLimits
from onceward.stores.sql_loader import load_queries
from onceward.stores.sqlalchemy_errors import (
    refuse_connection,
    translating_outages,
    translating_refusals,
)
from onceward.stores.sqlalchemy_file import ReplacedFile
from onceward.stores.sqlalchemy_sessions import (
    CLAIMED_ROWS,
    HELD_ROWS,
    autocommit_refusal,
    begin_immediate,
    database_of,
    has_unflushed_changes,
    max_connections,
    record_list_values,
    save,
    warn_unless_synchronous,
)
from onceward.stores.sqlalchemy_sync_unit import (
    SqlAlchemySyncUnit,
    guard_sessions,
    listen_to_driver_calls,
)
from onceward.stores.sqlite.epoch import reading_of
from onceward.stores.sqlite.rows import to_text, to_values
from onceward.stores.threads import StoreThreads, request_thread
from onceward_protocol.storage.migrations import Migration, run_steps
from onceward_protocol.storage.private_files import create_database_file

__all__ = ["SqlAlchemySyncStore", "SqlAlchemySyncUnit"]

T = TypeVar("T")

_DRIVERS: Final = {("sqlite", "pysqlite"): "sqlite", ("postgresql", "psycopg"): "postgres"}
# If the engine's pool has no limit.
_MOST_CONNECTIONS: Final = 32
_TURN_SECONDS: Final = 30.0
_CLOSE_SECONDS: Final = 10.0


class SqlAlchemySyncStore:
    """The store for an app that has its own sync SQLAlchemy 2 engine, on psycopg 3 or SQLite.

    ::

        onceward = Onceward(SqlAlchemySyncStore(engine), principal=…)  # or a sessionmaker
        onceward = Onceward(SqlAlchemySyncStore(db.session))    # Flask-SQLAlchemy

    A guarded handler gets a ``Session`` of that engine or maker. If a ``scoped_session`` is given,
    it is the session that this has in the request's thread. The handler may add, flush, query, use
    savepoints and roll back. It must not commit, because the record commits with its rows: that
    raises ``UsageError``. The store does not change or dispose of the engine.

    A session is used in the thread of its request. In frameworks that are asynchronous (FastAPI),
    claim and commit run in a thread of the store, before and after the handler.

    On SQLite a session begins with ``BEGIN IMMEDIATE``, at its first statement: see
    ``SqlAlchemyStore``. Writers of this process wait for each other without a connection.
    """

    # Sync frameworks need no event loop for this store.
    runs_in_request_thread = True

    def __init__(
        self,
        sessions: Engine | sessionmaker[Any] | scoped_session[Any],
        *,
        table_prefix: str | None = None,
        schema: str | None = None,
        migrations: Sequence[Migration] = (),
        **limits: float,
    ) -> None:
        """Take the app's engine, session maker or scoped session. ``open`` connects.

        On SQLite, names of Onceward's tables begin with ``table_prefix`` (``onceward_``). On
        PostgreSQL they are in ``schema`` (``onceward``), with a prefix only if it is given or the
        schema is ``public``. ``limits`` are those of ``SessionLimits``, for PostgreSQL.
        """
        self._limits = SessionLimits(**limits)
        self._scoped = sessions if isinstance(sessions, scoped_session) else None
        self._engine = _engine_of(sessions)
        self._sessions = (
            sessions if isinstance(sessions, sessionmaker) else sessionmaker(self._engine)
        )
        guard_sessions(self._sessions)
        if self._scoped is not None:
            guard_sessions(self._scoped.session_factory)
        # The name in logs and in ``/readyz``.
        self.name: str = self._engine.dialect.name
        # True on SQLite, where writers take turns and the primary key decides.
        self.is_sqlite = self.name == "sqlite"
        database = database_of(
            self._engine,
            _DRIVERS,
            "postgresql+psycopg or sqlite, or SqlAlchemyStore for an async engine",
        )
        self._package = f"onceward.stores.{database}"
        names = TableNames.chosen(table_prefix, schema, is_sqlite=self.is_sqlite)
        # The parts of the schema that are wanted, and those that the database has.
        self.schema = Schema(names, is_sqlite=self.is_sqlite, migrations=migrations)
        self._use_names(names)
        # psycopg is not needed for SQLite.
        self._messages: Any = (
            None if self.is_sqlite else import_module("onceward.stores.sqlalchemy_messages")
        )
        self._turn = threading.Lock()
        self._metrics: StoreMetrics | None = None
        self._epochs = EpochReader()
        self._replaced_file = ReplacedFile(self._engine, self.sqlite_path)
        self._app_begins = False
        self._limits.abandoned.limit_to_half_of(self.max_connections)
        self._wait_seconds: float = getattr(self._engine.pool, "_timeout", 30.0)
        self._threads = StoreThreads(
            self.max_connections or _MOST_CONNECTIONS,
            wait_seconds=self._wait_seconds,
            on_wait=self._pool_waited,
        )
        # Limits how many guarded requests of a sync framework use the pool at once.
        self.thread_gate = ThreadGate(self.max_connections, self._wait_seconds, self._pool_waited)
        self._gate = self._new_gate()
        # Now: hooks of the request that opens the store hold connections already.
        self._listen_to_pool()
        self._is_open = False

    @property
    def sqlite_path(self) -> str | None:
        """The file of the engine; None on PostgreSQL, or if its URL is an SQLite URI."""
        url = self._engine.url
        return url.database if self.is_sqlite and "uri" not in url.query else None

    @property
    def max_connections(self) -> int | None:
        """How many connections the engine's pool allows; None if there is no limit."""
        return max_connections(self._engine.pool)

    @property
    def gate(self) -> ConnectionGate | None:
        """Limits how many guarded requests of an async framework use the pool at once."""
        return self._gate if request_thread.get(None) is None else None

    def report_to(self, metrics: StoreMetrics) -> None:
        """Report waits for a connection of the engine's pool to ``metrics``."""
        self._metrics = metrics
        if isinstance(metrics, DurabilityMetrics):
            self._limits.abandoned.report = metrics.commits_abandoned

    async def open(self) -> None:
        """Migrate the schema, in one transaction of the app's engine. Idempotent."""
        if self._is_open:
            if not self.schema.is_complete:
                await self._migrate()
            return
        self._threads.open()
        self._gate = self._new_gate()  # a semaphore belongs to one event loop
        self._is_open = True
        create_database_file(self.sqlite_path, of_app=True)
        listen_to_driver_calls(self._engine)
        try:
            await self._migrate()
            if self.is_sqlite:
                await self._read(self._look_at_sqlite)
                self._replaced_file.listen()
            else:
                event.listen(self._engine, "connect", self._on_connect)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Wait for running transactions. The app disposes of the engine."""
        if self._is_open:
            self._is_open = False
            await self._threads.close(_CLOSE_SECONDS)
            self._replaced_file.stop()
            if event.contains(self._engine, "connect", self._on_connect):
                event.remove(self._engine, "connect", self._on_connect)

    async def ping(self) -> None:
        """Run a query."""
        await self._read(lambda connection: self.run(connection, "SELECT 1"))

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        check_storable(*record_id)

        def find(connection: Connection) -> Record | None:
            record = self.find_on(connection, record_id, now)
            if record is not None and not self.is_sqlite:
                self._messages.confirm(connection.connection.dbapi_connection, self._limits)
            return record

        return await self._read(find)

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Claim the key: with an advisory lock on PostgreSQL, by the first commit on SQLite."""
        check_storable(*record_id)
        self._refuse_scoped_session_elsewhere()
        self._refuse_closed()
        visit = current_visit()
        has_slot = False
        if request_thread.get(None) is None:
            if visit is not None:
                self._gate.before_claim(visit)
                await self._gate.admit(visit)
            has_slot = await self._threads.take_slot()
        unit = SqlAlchemySyncUnit(self, self._threads, record_id, now, has_slot=has_slot)
        try:
            claim = await unit.run(lambda: self._claim_in_time(unit, visit, record_id, now))
        except BaseException:
            await unit.rollback()
            raise
        if not isinstance(claim, Claimed):
            await unit.rollback()
            if visit is not None:
                visit.leave_without_connection()
        return claim

    async def begin(self, *, idle_seconds: float | None = None) -> SqlAlchemySyncUnit:  # noqa: ARG002
        """Open a transaction without a key.

        ``idle_seconds`` is ignored: a session runs one statement at a time and belongs to the
        app, so it could not be kept alive.
        """
        self._refuse_closed()
        has_slot = await self._threads.take_slot()
        unit = SqlAlchemySyncUnit(self, self._threads, None, None, has_slot=has_slot)
        try:
            await unit.run(lambda: self._begin(unit))
        except BaseException:
            await unit.rollback()
            raise
        return unit

    async def release_connection(self) -> None:
        """Return the connection with which the scoped session of this request has only read."""
        if self._scoped is not None and request_thread.get(None) is not None:
            await self._threads.run(self._release_connection)

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""
        return await self._read(lambda connection: self.fetch(connection, sql, params))

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in its own transaction."""
        return await self._transact(lambda connection: self.fetch(connection, sql, params))

    def notifier(self) -> Notifier:
        """Return a notifier: on SQLite for this process only; workers of others poll."""
        if self.is_sqlite:
            return LocalNotifier()
        from onceward.stores.sync_notifier import (  # noqa: PLC0415 - psycopg is optional
            SyncPostgresNotifier,
        )

        return SyncPostgresNotifier(self._detached, channel=self.table_names.channel)

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one batch of expired records."""
        values = (self.instant(now), limit)

        def delete(connection: Connection) -> int:
            result = self.run(connection, self._sql["sweep_records"], values)
            return int(result.scalar_one()) if result.returns_rows else result.rowcount

        return await self._transact(delete)

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records for operators."""
        values = record_list_values(query, self.instant, is_sqlite=self.is_sqlite)
        rows = await self._read(
            lambda connection: self.run(connection, self._sql["list_records"], values).all()
        )
        return [listed_record(row) for row in rows]

    async def secret(self) -> bytes:
        """Return the secret of this database."""
        rows = await self.read(self._sql["read_secret"])
        return bytes(rows[0]["secret"])

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Report the epoch of each new connection of the engine."""
        self._epochs.report_to(report)

    async def read_epoch(self) -> EpochReading:
        """Read the epoch on a connection of the engine."""
        if self.is_sqlite:
            sql = load_queries("onceward.stores", "records.sql", names=self.table_names)
            rows = await self.read(sql["read_cache_epoch"])
            return reading_of(self.sqlite_path, str(rows[0]["cache_epoch"]))
        return await self._read(
            lambda connection: self._epochs.read_blocking(
                self.table_names,
                lambda sql: self.run(connection, sql).first(),
                (sa_errors.ProgrammingError, sa_errors.NotSupportedError),
            )
        )

    # -- blocking, in a thread ------------------------------------------------------------------

    def instant(self, at: datetime) -> Any:
        """Convert an instant to what this database stores."""
        return to_text(at) if self.is_sqlite else at

    def run(self, connection: Connection, sql: str, values: Any = ()) -> Any:
        """Run one of Onceward's statements, with ``?`` or ``$1`` for its values."""
        if self.is_sqlite:
            return connection.exec_driver_sql(sql, values)
        return connection.exec_driver_sql(*to_pyformat(sql, values))

    def run_named(self, connection: Connection, sql: str, params: Params) -> Any:
        """Run a statement with named parameters (``:name``)."""
        if self.is_sqlite:
            return connection.exec_driver_sql(sql, to_values(params))
        return self.run(connection, *positional(sql, params))

    def fetch(self, connection: Connection, sql: str, params: Params) -> list[Row]:
        """Run a statement with named parameters and return its rows, if it has any."""
        result = self.run_named(connection, sql, params)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def find_on(self, connection: Connection, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up."""
        values = (*record_id, self.instant(now))
        row = self.run(connection, self._sql["find_record"], values).first()
        return None if row is None else record_of(record_id, row)

    def owns(self, connection: Connection) -> bool:
        """Return whether a connection is one of the engine, or of a copy with other options."""
        return connection.dialect is self._engine.dialect

    def session_for(self, *, is_in_request_thread: bool) -> tuple[Session, bool]:
        """Return a session, and whether it is the app's, which goes on using it."""
        if self._scoped is not None and is_in_request_thread:
            session: Session = self._scoped()
            refuse_connection(session.get_bind())  # a test may have bound it to one since
            self._end_earlier_transaction(session)
            return session, True
        own: Session = self._sessions()
        refuse_connection(own.bind)
        return own, False

    def take_turn(self) -> None:
        """Wait until no other session of this process writes to the SQLite file."""
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            raise StoreUnavailableError(
                f"another request has been writing to the SQLite file for {_TURN_SECONDS:g} seconds"
            )

    def pass_turn_on(self) -> None:
        """Let the next session write."""
        self._turn.release()

    def begin_immediate(
        self, connection: Connection, record_id: RecordId | None, claimed_at: datetime | None
    ) -> bool:
        """Begin on SQLite; return whether the key has a record by now."""
        return begin_immediate(connection, self._sql["find_record"], record_id, claimed_at)

    def save(self, connection: Connection, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event in the session's transaction."""

        def run(sql: str, values: Any = (), /) -> Any:
            return self.run(connection, sql, values)

        save(run, self._sql, record, audit, is_sqlite=self.is_sqlite)

    def save_and_commit(
        self, connection: Connection, record: Record, audit: AuditEvent | None
    ) -> None:
        """Write record and audit event and commit, in one round trip, on PostgreSQL."""
        raw = connection.connection.dbapi_connection
        self._messages.finish_and_commit(raw, self._finish_function, record, audit, self._limits)

    def limit(self, raw: Any) -> None:
        """Limit what each statement may take on a connection, until the pool has it back."""
        limits = self._messages.limits_of(raw)
        limits.seconds = self._limits.statement_seconds

    def commit_driver(self, raw: Any) -> None:
        """Commit on a connection of psycopg. Raises ``CommitUnknownError`` after a warning."""
        self._messages.commit(raw, self._limits)

    def _claim_in_time(
        self, unit: SqlAlchemySyncUnit, visit: Visit | None, record_id: RecordId, now: datetime
    ) -> Claimed | Found | Held:
        if self.is_sqlite:
            return self._claim(unit, visit, record_id, now)
        with self._messages.thread_limit(self._limits.claim_seconds):
            if self._limits.abandoned.is_full:
                self._limits.abandoned.check_blocking(self._still_running)
            return self._claim(unit, visit, record_id, now)

    def _still_running(self, backends: list[int]) -> Sequence[Any]:
        with self._connection() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            rows: Sequence[Any] = self.run(connection, STILL_RUNNING, (backends,)).all()
            return rows

    def _claim(
        self, unit: SqlAlchemySyncUnit, visit: Visit | None, record_id: RecordId, now: datetime
    ) -> Claimed | Found | Held:
        session = unit.start()
        # Without a slot, the transaction of the request's session has ended by now.
        if visit is not None and not unit.has_slot:
            self.thread_gate.before_claim(visit)
            self.thread_gate.admit(visit)
        if self.is_sqlite:
            with self._engine.connect() as connection:
                record = self.find_on(connection, record_id, now)
            return Claimed(unit) if record is None else Found(record)
        connection = unit.connection = self._connect(session)
        found = self._claim_on(connection, record_id, now)
        if found in CLAIMED_ROWS:
            return Claimed(unit, after_expiry=CLAIMED_ROWS[found])
        record = None if found == HELD_ROWS else self.find_on(connection, record_id, now)
        if record is not None:
            self._messages.confirm(connection.connection.dbapi_connection, self._limits)
        # No record although there was one: it expired and was swept in between.
        return HELD if record is None else Found(record)

    def _claim_on(self, connection: Connection, record_id: RecordId, now: datetime) -> int:
        """Lock and look up, in two statements of a function; return the number of its rows."""
        raw: Any = connection.connection.dbapi_connection
        if raw.autocommit:
            raise autocommit_refusal()
        limits = self._messages.limits_of(raw)
        limits.seconds = self._limits.claim_seconds
        try:
            return self._send_claim(connection, raw, record_id, now)
        finally:
            limits.seconds = self._limits.statement_seconds

    def _send_claim(
        self, connection: Connection, raw: Any, record_id: RecordId, now: datetime
    ) -> int:
        lock = self.table_names.lock_number(*record_id)
        begin = begin_statement(raw)
        if begin is None:
            values = (lock, *record_id, now)
            sql = f"SELECT {self._claim_function}($1,$2,$3,$4,$5)"
            return len(self.run(connection, sql, values).all())
        function = self._claim_function
        try:
            rows: int = self._messages.begin_and_claim(raw, begin, function, lock, record_id, now)
        except ConnectionError:
            if raw.closed:  # let SQLAlchemy find out: it discards the connections of the same age
                connection.exec_driver_sql("SELECT 1")
            raise
        return rows

    def _begin(self, unit: SqlAlchemySyncUnit) -> None:
        if self._limits.abandoned.is_full:
            self._limits.abandoned.check_blocking(self._still_running)
        session = unit.start()
        if not self.is_sqlite:
            with self._messages.thread_limit(self._limits.claim_seconds):
                connection = self._connect(session)
            _refuse_autocommit(connection.connection.driver_connection)
            self.run(connection, "SELECT 1")

    def _end_earlier_transaction(self, session: Session) -> None:
        """End what ran in the app's session before the guarded handler, if that only read.

        The guarded transaction begins with the claim.
        """
        if has_unflushed_changes(session) or (
            session.in_transaction() and self._has_written(session)
        ):
            raise UsageError(
                "the session has uncommitted changes from before the guarded handler, which would "
                "be lost if this request is a replay: commit them there, or make them in the "
                "handler"
            )
        session.rollback()

    def _release_connection(self) -> None:
        assert self._scoped is not None  # noqa: S101 - the caller has checked
        if not self._scoped.registry.has():
            return
        session: Session = self._scoped()
        refuse_connection(session.get_bind())
        if not session.in_transaction() or has_unflushed_changes(session):
            return
        # A session in a state that refuses statements is refused by the claim.
        with suppress(sa_errors.InvalidRequestError):
            if not self._has_written(session):
                session.rollback()

    def _has_written(self, session: Session) -> bool:
        connection = session.connection()
        if self.is_sqlite:
            driver: Any = connection.connection.driver_connection
            return bool(driver.in_transaction) and not self._app_begins
        try:
            return self.run(connection, "SELECT txid_current_if_assigned()").scalar() is not None
        except sa_errors.DBAPIError:  # aborted, so nothing of it would be committed
            return False

    # -- connections ----------------------------------------------------------------------------

    def _refuse_scoped_session_elsewhere(self) -> None:
        if self._scoped is not None and request_thread.get(None) is None:
            raise ConfigurationError(
                "a scoped_session belongs to the thread of a request, and an async framework has "
                "none: give SqlAlchemySyncStore the engine or a sessionmaker, and write in "
                "onceward.transaction"
            )

    def _connect(self, session: Session) -> Connection:
        """Return the session's connection; report the wait if none was free."""
        if self._metrics is None:
            return session.connection()
        limit = self.max_connections
        pool: Any = self._engine.pool
        if limit is None or pool.checkedout() < limit:
            return session.connection()
        started = time.monotonic()
        try:
            return session.connection()
        finally:
            self._pool_waited(time.monotonic() - started)

    def _new_gate(self) -> ConnectionGate:
        return ConnectionGate(self.max_connections, self._wait_seconds, self._pool_waited)

    def _listen_to_pool(self) -> None:
        """Count the connections that requests hold. Not undone: see ``listen_to_driver_calls``."""
        listeners: list[tuple[str, Callable[..., None]]] = [
            ("checkout", ConnectionGate.on_checkout),
            ("checkin", ConnectionGate.on_checkin),
        ]
        if not self.is_sqlite:
            listeners.append(("checkin", self._messages.on_checkin))
            listeners.append(("do_connect", self._messages.on_connect))
        for name, listener in listeners:
            if not event.contains(self._engine, name, listener):
                event.listen(self._engine, name, listener)

    def _pool_waited(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.pool_waited(seconds)

    def _detached(self) -> Any:
        """Open a connection that the engine's pool does not count."""
        pooled = self._engine.raw_connection()
        driver: Any = pooled.driver_connection
        pooled.detach()
        driver.autocommit = True
        return driver

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise StoreUnavailableError("the store is not open")

    async def _read(self, work: Callable[[Connection], T]) -> T:
        """Run a function that only reads, in a thread of the store."""
        self._refuse_closed()

        def read() -> T:
            with translating_outages(), self._connection() as connection:
                # Autocommit: one query needs no BEGIN and no ROLLBACK around it.
                if not self.is_sqlite:
                    connection.execution_options(isolation_level="AUTOCOMMIT")
                return work(connection)

        return await self._threads.run_with_slot(read)

    def _connection(self) -> Connection:
        """Return a connection of the engine for statements of Onceward."""
        if self.is_sqlite:
            return self._engine.connect()
        with self._messages.thread_limit(self._limits.claim_seconds):
            connection = self._engine.connect()
        self.limit(connection.connection.dbapi_connection)
        return connection

    async def _transact(self, work: Callable[[Connection], T]) -> T:
        """Run a function in its own transaction, in a thread of the store."""
        self._refuse_closed()

        def transact() -> T:
            with translating_outages(), self._writing() as connection:
                return work(connection)

        return await self._threads.run_with_slot(transact)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        if not self.is_sqlite:
            with self._connection() as connection:
                limits = self._messages.limits_of(connection.connection.dbapi_connection)
                try:
                    with connection.begin():
                        yield connection
                        self.run(connection, "SELECT 1")
                        limits.begin_commit(self._limits.commit_seconds)
                except sa_errors.DBAPIError:
                    limits.note_cut(self._limits.abandoned)
                    raise
                if limits.notices.has_warned:
                    raise unconfirmed("COMMIT did not wait for the standby")
            return
        self.take_turn()
        try:
            with self._engine.begin() as connection:
                self.begin_immediate(connection, None, None)
                yield connection
                self.run(connection, "RELEASE onceward")
        finally:
            self.pass_turn_on()

    async def _migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        with translating_refusals():
            migration = await self._transact(self._apply_migrations)
        self.schema.committed(migration)
        self._use_names(migration.names)

    def _apply_migrations(self, connection: Connection) -> MigrationTable:
        if not self.is_sqlite:
            _refuse_autocommit(connection.connection.driver_connection)
            self.run(connection, "SELECT pg_advisory_xact_lock($1)", (MIGRATION_LOCK,))
        driver: Any = connection.connection.driver_connection

        def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
            if not self.is_sqlite and not values:
                # A script, as it is: "%" and "$1" in it are no parameters.
                cursor = driver.execute(sql, prepare=False)
                return () if cursor.description is None else list(cursor)
            result = self.run(connection, sql, values)
            return result.all() if result.returns_rows else ()

        migration = self.schema.migration()
        run_steps(migration.apply(), execute)
        return migration

    def _use_names(self, names: TableNames) -> None:
        self.table_names = names
        self._sql = load_queries(self._package, names=names)
        self._claim_function = names.table("claim")
        self._finish_function = names.table("save_record")

    def _on_connect(self, driver: Any, _pooled: Any) -> None:
        """Read the epoch on a new connection of the engine."""
        before, driver.autocommit = driver.autocommit, True

        def fetch_row(sql: str) -> Any:
            row = driver.execute(sql, prepare=False).fetchone()
            if row is not None:
                self._messages.limits_of(driver).backend = backend_of(row)
            return row

        try:
            reading = self._epochs.read_blocking(self.table_names, fetch_row, (Exception,))
            if reading.is_replaced:
                driver.close()
                raise ConnectionError(REPLACED)
        finally:
            if not driver.closed:
                driver.autocommit = before

    def _look_at_sqlite(self, connection: Connection) -> None:
        warn_unless_synchronous(self.run(connection, "PRAGMA synchronous").scalar_one())
        driver: Any = connection.connection.driver_connection
        self._app_begins = bool(driver.in_transaction)


def _engine_of(sessions: Engine | sessionmaker[Any] | scoped_session[Any]) -> Engine:
    if isinstance(sessions, Engine):
        return sessions
    if not isinstance(sessions, sessionmaker | scoped_session):
        if isinstance(getattr(sessions, "session", None), scoped_session):
            raise ConfigurationError(
                "SqlAlchemySyncStore needs the session of Flask-SQLAlchemy: pass db.session"
            )
        raise ConfigurationError(
            "SqlAlchemySyncStore needs an Engine, a sessionmaker or a scoped_session, not "
            f"{type(sessions).__name__}; for an async engine use SqlAlchemyStore"
        )
    maker = sessions.session_factory if isinstance(sessions, scoped_session) else sessions
    try:
        bind = maker().get_bind()
    except RuntimeError as error:  # Flask-SQLAlchemy: working outside of application context
        raise ConfigurationError(
            "db.session has no engine here: create the store inside `with app.app_context():`"
        ) from error
    except sa_errors.UnboundExecutionError as error:
        raise ConfigurationError(
            "the sessions have no engine: create the sessionmaker with bind=engine"
        ) from error
    refuse_connection(bind)
    engine: Engine = bind.engine
    return engine


def _refuse_autocommit(raw: Any) -> None:
    """Raise if statements do not begin a transaction, as with an autocommit engine."""
    if raw.autocommit:
        raise autocommit_refusal()
