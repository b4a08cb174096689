"""The unit of work of ``SqlAlchemySyncStore``: a guarded session, and what listens to it.

Listeners directly before calls of the driver see statements. ``commit`` of the pooled connection,
which SQLAlchemy makes for one checkout, sees commits of the connection. A rollback of the
connection leaves it without the transaction that the session began. Not by events of the engine:
with a listener for one of them, SQLAlchemy makes an object for each of eight events on every
connection, a hundred function calls per request.
"""

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakSet

from sqlalchemy import Connection, Engine, RootTransaction, event
from sqlalchemy.orm import Session, sessionmaker

from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.errors import (
    CommitUnknownError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
    UsageError,
)
from onceward.ports import Params, Row
from onceward.stores.rows import HAS_WRITTEN
from onceward.stores.sqlalchemy_errors import (
    driver_error,
    is_outage,
    is_read_only,
    raise_outage,
    raise_without_statement,
    translating_outages,
)
from onceward.stores.sqlalchemy_sessions import (
    ENDED,
    INLINE_BODY_BYTES,
    SUPERSEDED,
    UNIT,
    GuardedUnit,
    has_unflushed_changes,
    listen_for_ends,
    listen_for_statements,
)
from onceward.stores.threads import StoreThreads
from onceward.stores.transaction_control import TRANSACTION_CONTROL

__all__ = ["SqlAlchemySyncUnit", "guard_sessions", "listen_to_driver_calls"]

T = TypeVar("T")

_log = logging.getLogger("onceward.stores")

# How long the rollback waits for a statement of a thread that its handler has abandoned.
_ABANDONED_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.005
# SQLAlchemy's code of errors for a session that another thread uses.
_SESSION_IN_USE: Final = "isce"
# Events, each directly before a call of the driver.
_DRIVER_CALLS: Final = ("do_execute", "do_executemany", "do_execute_no_params")

# A constant of libpq.
_TRANSACTION_IDLE: Final = 0


class UnitStore(Protocol):
    """What a unit needs of its store. All of it blocks."""

    # True on SQLite, where writers take turns and the primary key decides.
    is_sqlite: bool

    def owns(self, connection: Connection) -> bool:
        """Return whether a connection is one of the store's engine."""

    def session_for(self, *, is_in_request_thread: bool) -> tuple[Session, bool]:
        """Return a session, and whether it is the app's, which goes on using it."""

    def run(self, connection: Connection, sql: str, values: Any = ()) -> Any:
        """Run one of Onceward's statements, with ``?`` or ``$1`` for its values."""

    def run_named(self, connection: Connection, sql: str, params: Params) -> Any:
        """Run a statement with named parameters (``:name``)."""

    def fetch(self, connection: Connection, sql: str, params: Params) -> list[Row]:
        """Run a statement with named parameters and return its rows, if it has any."""

    def take_turn(self) -> None:
        """Wait until no other session of this process writes to the SQLite file."""

    def pass_turn_on(self) -> None:
        """Let the next session write."""

    def begin_immediate(
        self, connection: Connection, record_id: RecordId | None, claimed_at: datetime | None
    ) -> bool:
        """Begin on SQLite; return whether the key has a record by now."""

    def save(self, connection: Connection, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event in the session's transaction."""

    def save_and_commit(
        self, connection: Connection, record: Record, audit: AuditEvent | None
    ) -> None:
        """Write record and audit event and commit, in one round trip, on PostgreSQL."""

    def limit(self, raw: Any) -> None:
        """Limit what each statement may take on a connection, until the pool has it back."""

    def commit_driver(self, raw: Any) -> None:
        """Commit on a connection of psycopg. Raises ``CommitUnknownError`` after a warning."""


class SyncSessionStatements:
    """Onceward's statements in the transaction of an app's session."""

    def __init__(self, store: UnitStore, unit: "SqlAlchemySyncUnit") -> None:
        self._store = store
        self._unit = unit

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""

        def run() -> int:
            connection = self._unit.transaction.connection()
            return int(self._store.run_named(connection, sql, params).rowcount)

        return max(await self._unit.run(run), 0)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""

        def run() -> list[Row]:
            return self._store.fetch(self._unit.transaction.connection(), sql, params)

        return await self._unit.run(run)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


class SqlAlchemySyncUnit(GuardedUnit):
    """The session of one guarded request or job. Only Onceward commits or ends it."""

    # For messages.
    flush_hint = "session.flush()"
    # For messages.
    close_hint = "without `with`, close() and remove()"
    # The handler uses ``transaction`` without ``await``.
    is_sync = True

    def __init__(
        self,
        store: UnitStore,
        threads: StoreThreads,
        record_id: RecordId | None,
        claimed_at: datetime | None,
        *,
        has_slot: bool,
    ) -> None:
        """Use a slot of ``threads`` that the caller has taken, or the request's thread."""
        super().__init__()
        self._store = store
        self._threads = threads
        self._record_id = record_id
        self._claimed_at = claimed_at
        self._session: Session | None = None
        self._is_the_apps = False
        self._has_turn = False
        # Whether it runs in the threads of the store, else in that of the request.
        self.has_slot = has_slot
        self._ended = False
        # Rows that SQLite's connection has changed since it was opened, without those of this unit.
        self._changes_before = 0
        # Connections of the session's transaction, and what they began for it.
        self._guarded: list[tuple[Connection, RootTransaction | None]] = []
        # True while Onceward's own statements begin the transaction, on SQLite.
        self._is_beginning = False
        # True once COMMIT was sent with the record.
        self._is_committed = False
        self._lock = threading.Lock()
        # Held while a statement runs in a thread that the handler may have abandoned.
        self._statement = threading.RLock()
        self._statement_thread = 0
        # Of the claim, on PostgreSQL; None once a handler has ended that transaction.
        self.connection: Connection | None = None
        # True if another request has committed the key.
        self.superseded = False
        # Whether the connection was lost, or the database failed, in a statement.
        self.is_lost = False

    @property
    def transaction(self) -> Session:
        """The session to write in."""
        if self._session is None:
            raise NoTransactionError(ENDED)
        return self._session

    @property
    def statements(self) -> SyncSessionStatements:
        """The session's transaction, for Onceward's statements."""
        return SyncSessionStatements(self._store, self)

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a statement of the handler failed in an outage."""
        if not self.is_lost or not is_outage(error):
            return None
        outage = StoreUnavailableError(f"the database is unavailable: {driver_error(error)}")
        outage.__cause__ = driver_error(error)
        return outage

    async def has_written(self) -> bool:
        """Return whether the handler has written, or would with the next flush."""
        return await self.run(self._has_written)

    def _has_written(self) -> bool:
        session = self.transaction
        if has_unflushed_changes(session):
            return True
        self._look_at_connections()
        if not session.in_transaction() or self._ended_by_connection:
            return self._closed_by_handler or self._ended_by_connection
        if not self._store.is_sqlite:
            connection = session.connection()
            return bool(self._store.run(connection, HAS_WRITTEN).scalar())
        driver: Any = session.connection().connection.driver_connection
        return self._has_turn and driver.total_changes != self._changes_before

    async def keep_alive(self) -> None:
        """Do nothing: a session runs one statement at a time and belongs to the app."""

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run a function in the thread of this unit. Raises ``StoreUnavailableError``."""

        def run() -> T:
            try:
                return work()
            except Exception as error:
                raise_outage(error)
                raise

        return self._threads.run(run)

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Flush the session, write record and audit event, and commit."""
        if self._ended:
            raise NoTransactionError(ENDED)
        try:
            await self.run(lambda: self._commit(record, audit))
        finally:
            self._free_slot()

    async def rollback(self) -> None:
        """Roll back; close the connection if that fails."""
        if not self._ended:
            try:
                await self.run(self._undo)
            finally:
                self._free_slot()

    # -- blocking, in the thread ----------------------------------------------------------------

    def start(self) -> Session:
        """Get the session. From now on, only this unit ends its transaction."""
        session, self._is_the_apps = self._store.session_for(is_in_request_thread=not self.has_slot)
        self._session = session
        session.info[UNIT] = self
        return session

    def _commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        session = self.transaction
        try:
            self._look_at_connections()
            self._refuse_closed()
            session.flush()
            connection = self.connection or session.connection()
            if record is not None and self._fits_one_message(session, record):
                self._store.save_and_commit(connection, record, audit)
                self._is_committed = True
            else:
                self._store.save(connection, record, audit)
        except BaseException:
            self._undo()
            raise
        self._may_end = True
        try:
            session.commit()
        except BaseException as error:
            self._undo()
            if is_outage(error):
                lost = f"the connection was lost in COMMIT: {driver_error(error)}"
                raise_without_statement(CommitUnknownError(lost), error)
            raise
        self._end()

    def _fits_one_message(self, session: Session, record: Record) -> bool:
        """Check whether COMMIT may be sent with the record, before ``session.commit()``.

        Not if the app listens to ``before_commit``, because it may write there.
        """
        return (
            not self._store.is_sqlite
            and len(record.body) <= INLINE_BODY_BYTES
            and len(session.dispatch.before_commit) == 1
            and session.get_nested_transaction() is None
        )

    def _undo(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = self._may_end = True
        # From now on statements of other threads are refused, but one may still run.
        deadline = time.monotonic() + _ABANDONED_SECONDS
        while self._statement.acquire(timeout=max(deadline - time.monotonic(), 0)):
            is_over = True
            try:
                is_over = (
                    self._session is None
                    or _roll_back(self._session)
                    or time.monotonic() > deadline
                )
            finally:
                if is_over:
                    self._end()
                self._statement.release()
            if is_over:
                return
            time.sleep(_PAUSE_SECONDS)  # without the lock, for which the other thread may wait
        _log.error("a statement of a cancelled handler does not end: its connection is lost")
        self._leave()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
        session = self._session
        if session is not None:
            if self._is_the_apps:  # goes on using it after the request
                session.info.pop(UNIT, None)
            else:
                try:
                    session.close()
                except Exception as error:  # noqa: BLE001 - the transaction has ended
                    _log.debug("a session cannot be closed: %s", error)
                session.info[UNIT] = None  # not the unit, which refers to the session
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            had_turn, self._has_turn = self._has_turn, False
        if had_turn:
            self._store.pass_turn_on()

    def _free_slot(self) -> None:
        if not self._ended:
            return
        if self.has_slot:
            self.has_slot = False
            self._threads.free_slot()

    # -- called by the listeners below --------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """True once it was committed or rolled back."""
        return self._ended

    def prepare(self) -> None:
        """Wait for the turn to write, on SQLite. Called before a connection is taken."""
        if self._ended:
            raise NoTransactionError(ENDED)
        if self._store.is_sqlite:
            self._take_turn()

    def begin_on(self, connection: Connection) -> None:
        """Guard the connection. On SQLite, begin first.

        Raises ``SupersededError`` if the key has a record by now.
        """
        if not self._store.owns(connection):  # a session may have several engines
            return
        # Not in its execution options, which take a dozen function calls per request.
        setattr(connection, UNIT, self)
        if self.has_slot:  # else the handler has no other thread
            event.listen(connection, "after_cursor_execute", self.end_statement)
        if self._store.is_sqlite:
            self._is_beginning = True
            try:
                self._begin_immediate(connection)
            finally:
                self._is_beginning = False
        self._guarded.append((connection, connection.get_transaction()))
        pooled: Any = connection.connection
        driver = pooled.dbapi_connection
        pooled.commit = partial(self._commit_driver, driver)
        if not self._store.is_sqlite:
            self._store.limit(driver)
            pooled.rollback = partial(self._roll_back_driver, driver)

    def _begin_immediate(self, connection: Connection) -> None:
        self._take_turn()
        with translating_outages():
            taken = self._store.begin_immediate(connection, self._record_id, self._claimed_at)
        driver: Any = connection.connection.driver_connection
        self._changes_before = driver.total_changes
        if taken:
            self.superseded = True
            raise SupersededError(SUPERSEDED)

    def _commit_driver(self, driver: Any) -> None:
        """Commit a guarded connection, unless the handler does."""
        self.refuse_connection_commit()
        if self._is_committed:
            return
        if self._store.is_sqlite:
            driver.commit()
        else:
            self._store.commit_driver(driver)

    def _roll_back_driver(self, driver: Any) -> None:
        """Roll a guarded connection back, as the pool does when it is returned.

        Not after Onceward's COMMIT: psycopg would do nothing then, in some twenty function calls.
        """
        if not self._is_committed or driver.pgconn.transaction_status != _TRANSACTION_IDLE:
            driver.rollback()

    def _look_at_connections(self) -> None:
        """Note the end of the transaction, if the handler has ended it on its connection."""
        for connection, transaction in self._guarded:
            if connection.get_transaction() is not transaction:
                self.note_connection_rollback()

    def note_rollback(self, session: Session) -> None:
        """Note that the next end of a transaction is a rollback."""
        super().note_rollback(session)
        if session.get_nested_transaction() is None:
            self._guarded.clear()

    def note_end(self) -> None:
        """Note the end of a transaction: by a rollback, or by closing the session."""
        self.connection = None
        self._guarded.clear()
        super().note_end()

    def _take_turn(self) -> None:
        if self._has_turn:
            return
        self._store.take_turn()
        with self._lock:
            self._has_turn = not self._ended
        if not self._has_turn:  # rolled back by another thread while this one waited
            self._store.pass_turn_on()
            raise NoTransactionError(ENDED)

    def before_statement(self, sql: str, *, is_insert: bool) -> None:
        """Refuse a statement that begins or ends the transaction, or runs outside it.

        ``is_insert`` says that SQLAlchemy has written an INSERT by itself.
        """
        if not self._may_end and not self._is_beginning:
            self._look_at_connections()
            if self._ended_by_connection:
                raise UsageError(TRANSACTION_CONTROL)
            if not is_insert:  # its text may be long and different every time
                self.refuse_control(sql)
        if self.has_slot:
            self._begin_statement()

    def _begin_statement(self) -> None:
        """Note that a statement begins in this thread. Raises if the unit has ended."""
        self._statement.acquire()
        if self._ended:
            self._statement.release()
            raise NoTransactionError(ENDED)
        self._statement_thread = threading.get_ident()

    def end_statement(self, *_: Any) -> None:
        """Note that a statement has ended, or failed, in this thread."""
        if self._statement_thread == threading.get_ident():
            self._statement_thread = 0
            self._statement.release()


# -- event listeners: they do nothing in a session or connection that no unit guards --------------


# Makers that have the listeners: another store may have the same one.
_guarded_makers: "WeakSet[sessionmaker[Any]]" = WeakSet()


def guard_sessions(maker: sessionmaker[Any]) -> None:
    """Report what happens to the sessions of a maker to their units. Idempotent."""
    if maker in _guarded_makers:
        return
    _guarded_makers.add(maker)
    listen_for_ends(maker)
    listen_for_statements(maker)
    event.listen(maker, "after_begin", _after_begin)


def listen_to_driver_calls(engine: Engine) -> None:
    """Report statements of guarded connections to their units. Idempotent.

    Not undone: another store may have the same engine.
    """
    for name in _DRIVER_CALLS:
        if not event.contains(engine, name, _before_driver_call):
            event.listen(engine, name, _before_driver_call)
    if not event.contains(engine, "handle_error", _after_error):
        event.listen(engine, "handle_error", _after_error)


def _after_begin(session: Session, transaction: Any, connection: Connection) -> None:
    if UNIT not in session.info or transaction.parent is not None:  # a savepoint
        return
    unit: SqlAlchemySyncUnit | None = session.info[UNIT]
    if unit is None or unit.has_ended:
        # It ended after this thread's check in ``prepare``: nothing else returns the connection.
        connection.close()
        raise NoTransactionError(ENDED)
    unit.begin_on(connection)


def _before_driver_call(*args: Any) -> None:
    """Report a statement to the unit of its connection.

    Not in ``before_cursor_execute``: if a listener after this one refuses the statement,
    SQLAlchemy 2.0 calls neither ``after_cursor_execute`` nor ``handle_error``.
    """
    context = args[-1]
    if context is not None:
        unit = getattr(context.root_connection, UNIT, None)
        if unit is not None:
            unit.before_statement(args[1], is_insert=context.isinsert)


def _after_error(context: Any) -> None:
    if is_read_only(context.original_exception):
        context.is_disconnect = True  # SQLAlchemy then discards the connections of the same age
    if context.connection is not None:
        unit = getattr(context.connection, UNIT, None)
        if unit is not None:
            unit.is_lost |= context.is_disconnect or is_outage(context.original_exception)
            unit.end_statement()


def _roll_back(session: Session) -> bool:
    """Roll back; close the connection if that fails.

    Return False if another thread is inside the session: it is about to be refused.
    """
    try:
        session.rollback()
    except Exception as error:  # noqa: BLE001 - the connection is closed then
        # Also raised as InvalidRequestError, while the other thread gets a connection.
        if getattr(error, "code", None) == _SESSION_IN_USE:
            return False
        with suppress(Exception):
            session.invalidate()
    return True
