"""The base of the stores on async and on sync SQLAlchemy: an engine, statements on it, errors."""

import logging
import sqlite3
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final, NoReturn, TypeVar, Unpack
from weakref import WeakKeyDictionary

from onceward_protocol.extras import needs_extra

with needs_extra("sqlalchemy"):
    from sqlalchemy import Connection, Engine, StaticPool, event
    from sqlalchemy import exc as sa_errors
    from sqlalchemy.orm import Session

from onceward.errors import (
    CommitUnknownError,
    ConfigurationError,
    StoreUnavailableError,
    SupersededError,
)
from onceward.ports import DurabilityMetrics, Params, Row, StoreMetrics, TransactionT_co
from onceward.records import AuditEvent, Record, RecordId
from onceward.stores.errors import (
    REFUSAL_STATES,
    SUPERSEDED,
    SUPERSEDED_STATE,
    aborted,
    is_aborted,
    is_outage_state,
    is_sqlite_outage,
    raise_unstorable,
    state_of,
)
from onceward.stores.postgres.params import positional
from onceward.stores.rows import to_text, to_values
from onceward.stores.sessions.gate import ConnectionGate
from onceward.stores.sessions.messages import Messages
from onceward.stores.sessions.store import Ran, SessionOptions, SessionStore, SessionUnit
from onceward.stores.sqlite.store import file_identity
from onceward.stores.statements import to_pyformat

T = TypeVar("T")

_log = logging.getLogger("onceward.stores")

_TURN_SECONDS: Final = 30.0
_SYNCHRONOUS_FULL: Final = 2
# The key of ``ConnectionPoolEntry.info`` for the SQLite file of the connection.
_FILE: Final = "onceward_file"
# Onceward's SQLSTATE, and the one of PostgreSQL if the engine is REPEATABLE READ.
_SUPERSEDED_STATES: Final = frozenset({SUPERSEDED_STATE, "40001"})
# SQLAlchemy's code for a session that was rolled back because a flush failed.
_FAILED_FLUSH: Final = "7s2a"
# How a handler writes a savepoint.
_SAVEPOINT: Final = "`session.begin_nested()`"


# What listens to each engine. ``event.contains`` knows an engine by its address, which another one
# may get after it was collected.
_listening: "WeakKeyDictionary[Any, set[tuple[str, Callable[..., Any]]]]" = WeakKeyDictionary()


def listen_once(engine: Any, name: str, listener: Callable[..., Any]) -> None:
    """Add a listener to an engine, unless it listens already: two stores may have one engine."""
    known = _listening.setdefault(engine, set())
    if (name, listener) not in known:
        known.add((name, listener))
        event.listen(engine, name, listener)


class _EngineStore(SessionStore[TransactionT_co]):
    """An engine of the app: its pool, its listeners, its connections, and statements on them."""

    # How a handler flushes its session, for messages.
    flush_hint: str
    # How it uses the session without closing it.
    close_hint: str
    # Whether handlers use their session with ``await``.
    is_async: bool
    is_gated = True

    def __init__(
        self, engine: Any, supported: dict[str, str], **options: Unpack[SessionOptions]
    ) -> None:
        """``supported`` are drivers by database; of another engine it says what they are."""
        _refuse_engine(engine, supported)
        # The engine of the app.
        self.engine: Engine = engine
        super().__init__(engine.dialect.name, **options)
        self._metrics: StoreMetrics | None = None
        self.limits.abandoned.limit_to_half_of(self.max_connections)
        # Runs a function where the engine blocks.
        self._run_blocking: Callable[[Callable[[], Any]], Awaitable[Any]]
        # The turn to write to an SQLite file: a lock whose ``acquire`` blocks.
        self._turn: Any
        self._file = self.sqlite_path
        # How long a caller waits for a connection.
        self._wait_seconds: float = getattr(engine.pool, "_timeout", 30.0)
        self._gate = self._new_gate()
        self.messages = Messages() if self.is_sqlite else self._new_messages()
        # Now: hooks of the request that opens the store hold connections already. Not undone:
        # another store may have the same engine.
        listeners: tuple[tuple[str, Callable[..., None]], ...] = (
            ("checkout", ConnectionGate.on_checkout),
            ("checkin", ConnectionGate.on_checkin),
            *self.messages.listeners,
        )
        for name, listener in listeners:
            listen_once(engine, name, listener)

    @abstractmethod
    def _new_messages(self) -> Messages:
        """Return those of the driver of PostgreSQL."""

    @property
    def sqlite_path(self) -> str | None:
        url = self.engine.url
        return url.database if self.is_sqlite and "uri" not in url.query else None

    @property
    def max_connections(self) -> int | None:
        """How many connections the engine's pool allows; None if there is no limit."""
        pool: Any = self.engine.pool
        overflow: int = getattr(pool, "_max_overflow", -1)
        return None if overflow < 0 else pool.size() + overflow

    def report_to(self, metrics: StoreMetrics) -> None:
        self._metrics = metrics
        if isinstance(metrics, DurabilityMetrics):
            self.limits.abandoned.report = metrics.commits_abandoned

    def _new_gate(self) -> ConnectionGate:
        return ConnectionGate(self.max_connections, self._wait_seconds, self._pool_waited)

    def _start(self) -> None:
        self._gate = self._new_gate()  # a semaphore belongs to one event loop

    def _pool_waited(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.pool_waited(seconds)

    # -- listeners of the engine ------------------------------------------------------------

    def _listeners(self) -> tuple[tuple[str, Callable[..., None]], ...]:
        """Return the listeners of an open store."""
        if not self.is_sqlite:
            return (("connect", self._on_connect),)
        if self._file is None:
            return ()
        return (("connect", self._note_file), ("checkout", self._refuse_replaced_file))

    def _note_file(self, _driver: Any, pooled: Any) -> None:
        pooled.info[_FILE] = file_identity(self._file)

    def _refuse_replaced_file(self, _driver: Any, pooled: Any, _proxy: Any) -> None:
        """Notice that the SQLite file was replaced: connections would go on using the old one."""
        found = file_identity(self._file)
        if found is not None and pooled.info.setdefault(_FILE, found) != found:
            # SQLAlchemy closes the connection and opens another one.
            raise sa_errors.DisconnectionError(f"{self._file} was replaced by another file")

    async def _listen(self) -> None:
        for name, listener in self._listeners():
            event.listen(self.engine, name, listener)
        if self.is_sqlite:
            await self._run_apart(self._look_at_sqlite)

    def _stop_listening(self) -> None:
        for name, listener in self._listeners():
            if event.contains(self.engine, name, listener):
                event.remove(self.engine, name, listener)

    @abstractmethod
    def _on_connect(self, driver: Any, pooled: Any) -> None:
        """Read the epoch on a new connection to PostgreSQL."""

    def _look_at_sqlite(self) -> None:
        with self.reading() as connection:
            level = self.run(connection, "PRAGMA synchronous").rows[0][0]
        if level < _SYNCHRONOUS_FULL:
            _log.warning(
                "SQLite runs with PRAGMA synchronous below FULL: a power failure may lose "
                "acknowledged requests together with their records"
            )

    async def run_in_unit(self, work: Callable[[], T], *, is_claim: bool = False) -> T:  # noqa: ARG002
        try:
            found: T = await self._run_blocking(work)
        except Exception as error:
            raise_outage(error)
            raise
        return found

    # -- connections --------------------------------------------------------------------------

    def connect(self, session: Session) -> Connection:
        pool: Any = self.engine.pool
        limit = None if self._metrics is None else self.max_connections
        with self.messages.connecting(pool):
            if limit is None or pool.checkedout() < limit:
                return session.connection()
            started = time.monotonic()
            try:
                return session.connection()
            finally:
                self._pool_waited(time.monotonic() - started)

    def _connection(self) -> Connection:
        """Return a connection for statements of Onceward."""
        self._refuse_closed()
        if self.is_sqlite:
            return self.engine.connect()
        with self.messages.connecting():
            connection = self.engine.connect()
        self.messages.limit(connection)
        return connection

    def reading(self) -> Connection:
        connection = self._connection()
        # Autocommit: one query needs no BEGIN and no ROLLBACK around it.
        if not self.is_sqlite:
            try:
                connection.execution_options(isolation_level="AUTOCOMMIT")
            except BaseException:
                connection.close()
                raise
        return connection

    def _confirm(self, connection: Connection) -> None:
        if self.is_sqlite:
            return
        try:
            self.messages.confirm(connection)
        except BaseException:
            if is_lost(connection, self.messages):
                connection.invalidate()
            raise

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        if self.is_sqlite:
            self._refuse_closed()
            self.take_turn()
            try:
                with self.engine.begin() as connection:
                    self.begin_immediate(connection, None, None)
                    yield connection
                    self.run(connection, "RELEASE onceward")
            finally:
                self.pass_turn_on()
            return
        with self._connection() as connection, connection.begin() as transaction:
            yield connection
            # Without a statement, COMMIT would roll an aborted one back without an error.
            self.run(connection, "SELECT 1")
            try:
                with self.messages.committing(connection):
                    transaction.commit()
            except CommitUnknownError as error:  # the caller may try again
                raise StoreUnavailableError(str(error)) from error

    def run(self, connection: Connection, sql: str, values: Any = ()) -> Ran:
        if not self.is_sqlite and not self.is_async:
            sql, values = to_pyformat(sql, values)
        result = connection.exec_driver_sql(sql, values)
        if result.returns_rows:
            return Ran(result.all(), 0)
        return Ran((), max(result.rowcount, 0))

    def _run_named(self, connection: Connection, sql: str, params: Params) -> Any:
        if self.is_sqlite:
            return connection.exec_driver_sql(sql, to_values(params))
        text, values = positional(sql, params)
        if self.is_async:
            return connection.exec_driver_sql(text, tuple(values))
        return connection.exec_driver_sql(*to_pyformat(text, values))

    def execute(self, connection: Connection, sql: str, params: Params) -> int:
        return max(int(self._run_named(connection, sql, params).rowcount), 0)

    def fetch(self, connection: Connection, sql: str, params: Params) -> list[Row]:
        result = self._run_named(connection, sql, params)
        return [dict(row) for row in result.mappings()] if result.returns_rows else []

    def total_changes(self, connection: Connection) -> int:
        driver: Any = connection.connection.driver_connection
        return int(driver.total_changes)

    def take_turn(self) -> None:
        """Wait until no other session of this process writes to the SQLite file."""
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            raise StoreUnavailableError(
                f"another request has been writing to the SQLite file for {_TURN_SECONDS:g} seconds"
            )

    def pass_turn_on(self) -> None:
        self._turn.release()

    def begin_immediate(
        self, connection: Any, record_id: RecordId | None, claimed_at: datetime | None
    ) -> bool:
        """Begin on SQLite; return whether the key has a record by now."""
        if connection.connection.driver_connection.in_transaction:
            # The app's "begin" listener has begun; nothing was read or written yet.
            connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        # SQLite rolls back when the disk is full, and the driver would begin again at the next
        # INSERT. The savepoint is gone then, so the commit fails.
        connection.exec_driver_sql("SAVEPOINT onceward")
        if record_id is None or claimed_at is None:
            return False
        values = (*record_id, to_text(claimed_at))
        return connection.exec_driver_sql(self.sql["find_record"], values).first() is not None


class SqlAlchemySessions(_EngineStore[TransactionT_co]):
    """The base of the stores on async and on sync engines: what their units do, all blocking."""

    def save(self, connection: Connection, record: Record | None, audit: AuditEvent | None) -> None:
        super().save(connection, record, audit)
        if self.is_sqlite:
            self.run(connection, "RELEASE onceward")

    def raise_record_error(self, connection: Connection, error: Exception) -> None:
        if state_of(error) in _SUPERSEDED_STATES:
            raise SupersededError(SUPERSEDED) from error
        with suppress(sa_errors.SQLAlchemyError):
            _discard_lost(connection, self.messages)

    def raise_commit_error(self, error: Exception, *, is_cut: bool) -> None:
        if state_of(error) in _SUPERSEDED_STATES:
            raise SupersededError(SUPERSEDED) from error
        raise_aborted(error)
        if is_outage(error):
            lost = f"the connection was lost in COMMIT: {driver_error(error)}"
            raise_without_statement(CommitUnknownError(lost, is_cut=is_cut), error)

    def _claim_failed(self, connection: Connection) -> None:
        _discard_lost(connection, self.messages)

    def _begin(self, unit: SessionUnit[Any]) -> None:
        super()._begin(unit)
        if not self.is_sqlite:
            self.run(unit.connection, "SELECT 1")
            self.messages.refuse_autocommit(unit.connection)

    def _find_first(
        self, unit: SessionUnit[Any], record_id: RecordId, now: datetime
    ) -> Record | None:
        unit.start()
        with self.reading() as connection:
            return self.find_on(connection, record_id, now)

    async def _migrate(self) -> None:
        with translating_refusals():
            await super()._migrate()


def _discard_lost(connection: Connection, messages: Messages) -> None:
    """Let SQLAlchemy find a lost connection: it discards the connections of the same age."""
    if is_lost(connection, messages):
        connection.exec_driver_sql("SELECT 1")


def _refuse_engine(engine: Any, supported: dict[str, str]) -> None:
    """Raise ``ConfigurationError`` for another database, another driver or a shared connection."""
    name, driver = engine.dialect.name, engine.dialect.driver
    if supported.get(name) != driver:
        hint = (
            "postgresql+asyncpg or sqlite+aiosqlite"
            if "aiosqlite" in supported.values()
            else "postgresql+psycopg or sqlite, or SqlAlchemyStore for an async engine"
        )
        raise ConfigurationError(f"{name}+{driver} is not supported: use {hint}")
    if isinstance(engine.pool, StaticPool):
        raise ConfigurationError(
            "this engine shares one connection, and so one transaction, between all requests: "
            "use a SQLite file"
        )


def is_lost(connection: Connection, messages: Messages) -> bool:
    """Return whether the driver has closed a connection, and SQLAlchemy does not know it."""
    if connection.closed or connection.invalidated:
        return False
    return messages.is_closed(connection)


# -- errors ---------------------------------------------------------------------------------------


def refuse_connection(bind: Any) -> None:
    """Raise if sessions are bound to a connection, not to an engine."""
    if isinstance(bind, Connection):
        raise ConfigurationError(
            "the sessions are bound to one Connection, and Onceward would commit the transaction "
            "that was begun on it: bind them to the engine. In tests, do not roll back an outer "
            "transaction, but create a database for each test or delete its rows"
        )


def is_outage(error: BaseException) -> bool:
    """Check whether an error is about the database, not about a statement."""
    if isinstance(error, OSError | sa_errors.TimeoutError | sa_errors.PendingRollbackError):
        return not _is_aborted(error)
    cause: BaseException | None = error
    if isinstance(error, sa_errors.DBAPIError):
        if error.connection_invalidated:
            return True
        cause = error.orig
    if isinstance(cause, sqlite3.OperationalError):
        return is_sqlite_outage(cause) or "no such savepoint: onceward" in str(cause)
    if type(cause).__name__ == "InternalClientError":
        # asyncpg's "cannot switch to state": the server died while the connection was idle.
        return True
    state = getattr(cause, "sqlstate", None)
    if state is None:  # psycopg knows no SQLSTATE if it cannot connect
        return isinstance(error, sa_errors.OperationalError)
    return is_outage_state(state)


def driver_error(error: BaseException) -> BaseException:
    """Return the driver's error of an error of SQLAlchemy, or the error itself.

    SQLAlchemy's contains the statement and its parameters, which may be a caller's secret. Messages
    and causes of outages are logged, so they are made of this one.
    """
    return getattr(error, "orig", None) or error


def raise_without_statement(known: BaseException, error: BaseException) -> NoReturn:
    """Raise ``known`` because of the driver's error of ``error``, without a reference to that."""
    try:
        raise known from driver_error(error)
    finally:
        known.__context__ = None  # Python sets it to SQLAlchemy's error


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Return the client's error for an outage."""
    found = StoreUnavailableError(f"the database is unavailable: {driver_error(error)}")
    found.__cause__ = driver_error(error)
    return found


def _is_aborted(error: BaseException) -> bool:
    """Check whether an earlier statement or flush has failed, and its error was ignored."""
    if isinstance(error, sa_errors.PendingRollbackError):
        return error.code == _FAILED_FLUSH
    return is_aborted(error)


def raise_aborted(error: BaseException) -> None:
    """Raise ``AbortedTransactionError`` if an earlier error was ignored."""
    if _is_aborted(error):
        raise aborted(_SAVEPOINT) from error


def raise_outage(error: Exception) -> None:
    """Raise an outage as ``StoreUnavailableError``; return if it is another error."""
    if is_outage(error):
        raise_without_statement(unavailable(error), error)
    raise_aborted(error)
    raise_unstorable(error)


class translating_outages:  # noqa: N801 - used like a function; a generator would cost more
    """Raise outages as ``StoreUnavailableError`` and other errors unchanged."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise_outage(error)


@contextmanager
def translating_refusals() -> Iterator[None]:
    """Raise ``ConfigurationError`` if the server refuses the first connection for good."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if _is_refusal(cause):
                why = str(getattr(cause, "orig", cause)).strip()
                raise ConfigurationError(f"cannot connect to PostgreSQL: {why}") from error
            cause = cause.__cause__
        raise


def _is_refusal(error: BaseException) -> bool:
    error = getattr(error, "orig", None) or error
    if type(error).__module__.partition(".")[0] == "psycopg":
        from psycopg import OperationalError  # noqa: PLC0415 - psycopg is optional

        from onceward.stores.psycopg.messages import is_refusal  # noqa: PLC0415

        return isinstance(error, OperationalError) and is_refusal(error)
    return getattr(error, "sqlstate", None) in REFUSAL_STATES
