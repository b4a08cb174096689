"""The unit of work of SQLAlchemy's stores: a guarded session, and what listens to it.

A session is guarded by the unit in its ``info``: only the unit ends the session's transaction. Its
connection has the unit as an attribute. Listeners directly before calls of the driver see
statements. ``commit`` of the pooled connection, which SQLAlchemy makes for one checkout, sees
commits of the connection. A rollback of the connection leaves it without the transaction that the
session began. Not by events of the engine: with a listener for one of them, SQLAlchemy makes an
object for each of eight events on every connection, a hundred function calls per request.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import partial, wraps
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from sqlalchemy import Connection, Engine, RootTransaction, event
from sqlalchemy.orm import Session, make_transient

from onceward.errors import StoreUnavailableError, SupersededError, UsageError
from onceward.ports import TransactionT_co
from onceward.records import RecordId
from onceward.stores.base import ended
from onceward.stores.errors import SUPERSEDED, is_read_only
from onceward.stores.sessions.sqlalchemy_engine import (
    SqlAlchemySessions,
    is_lost,
    is_outage,
    listen_once,
    translating_outages,
    unavailable,
)
from onceward.stores.sessions.store import SessionUnit
from onceward.stores.statements import TRANSACTION_CONTROL, refuse_transaction_control

_log = logging.getLogger("onceward.stores")

# The key of Session.info for the unit that guards the session; None once it has ended. Also the
# attribute of the session's connection.
_UNIT: Final = "onceward_unit"
# The key of Session.info for the instances that were inserted, if it wrote before the claim.
_WROTE: Final = "onceward_wrote"
# The key of Session.info for the last outage that one of its methods raised.
OUTAGE: Final = "onceward_outage"
# The methods of a session that use a connection. The others call these.
_CONNECTING: Final = (
    *("begin_nested", "commit", "connection", "execute", "flush", "scalar", "scalars"),
)

# How long the rollback waits for a statement of a thread that its handler has abandoned.
_ABANDONED_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 0.005
# SQLAlchemy's code of errors for a session that another thread uses.
_SESSION_IN_USE: Final = "isce"
# Events, each directly before a call of the driver.
_DRIVER_CALLS: Final = ("do_execute", "do_executemany", "do_execute_no_params")


class Given(NamedTuple):
    """The session of a unit, and who else uses it."""

    session: Session
    # What handlers get.
    handle: Any
    # The request goes on using it after the end.
    is_shared: bool = False
    # It is not closed at the end, either.
    is_kept: bool = False


class SqlAlchemyUnit(SessionUnit[TransactionT_co]):
    """The session of one guarded request or job. Only Onceward commits or ends it."""

    _store: SqlAlchemySessions[Any]

    def __init__(
        self,
        store: SqlAlchemySessions[Any],
        record_id: RecordId | None,
        claimed_at: datetime | None,
        given: Callable[[], Given],
        *,
        free: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
        has_slot: bool = False,
    ) -> None:
        """``given`` returns the session; ``free`` frees what the request has taken for the unit.

        ``leave`` is called if the key was not claimed. With ``has_slot`` the unit runs in threads
        of the store, which the handler may abandon, else in that of the request.
        """
        super().__init__(store, record_id, claimed_at)
        # The handler uses ``transaction`` without ``await``.
        self.is_sync = not store.is_async
        self._give = given
        self._given: Given | None = None
        # Of ``_given``.
        self._session: Any = None
        self._on_free = free
        self._on_leave = leave
        self._has_slot = has_slot
        self._has_turn = False
        # How the transaction was ended by the handler, for the error of the commit.
        self._rolled_back = False
        self._closed_by_handler = False
        self._ended_by_connection = False
        # Connections of the session's transaction, and what they began for it.
        self._guarded: list[tuple[Connection, RootTransaction | None]] = []
        # True while Onceward's own statements begin the transaction, on SQLite.
        self._is_beginning = False
        self._lock = threading.Lock()
        # Held while a statement runs in a thread that the handler may have abandoned.
        self._statement = threading.RLock()
        self._statement_thread = 0
        # Of the claim, on PostgreSQL; None once a handler has ended that transaction.
        self._connection: Connection | None = None
        # When the last statement was sent, in monotonic seconds; 0 without a time limit.
        self.statement_at = 0.0
        # Whether the connection was lost, or the database failed, in a statement.
        self._is_lost = False

    @property
    def transaction(self) -> TransactionT_co:
        if self._given is None:
            raise ended()
        handle: TransactionT_co = self._given.handle
        return handle

    @property
    def connection(self) -> Connection:
        if self._connection is not None:
            return self._connection
        if self._session is None:
            raise ended()
        connection: Connection = self._session.connection()
        return connection

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a statement of the handler failed in an outage."""
        return unavailable(error) if self._is_lost and is_outage(error) else None

    # -- blocking -------------------------------------------------------------------------

    def start(self) -> Any:
        """Get the session, which only this unit ends from now on; on PostgreSQL its connection."""
        self._given = given = self._give()
        self._session = session = given.session
        session.info[_UNIT] = self
        if self._store.is_sqlite:
            return None
        self._connection = self._store.connect(session)
        return self._connection

    def _has_written(self) -> bool:
        session = self._session
        if has_unflushed_changes(session):
            return True
        self._look_at_connections()
        if not session.in_transaction() or self._ended_by_connection:
            return self._closed_by_handler or self._ended_by_connection
        if self._store.is_sqlite and not self._has_turn:
            return False
        return super()._has_written()

    def _prepare_commit(self) -> None:
        self._look_at_connections()
        if self._closed_by_handler:
            raise UsageError(
                "the handler closed Onceward's session, which rolled it back: "
                f"use it {self._store.close_hint}"
            )
        if self._ended_by_connection:
            raise UsageError(TRANSACTION_CONTROL)
        self._session.flush()

    def _may_share_commit(self) -> bool:
        """Check whether COMMIT may be sent before ``session.commit()``.

        Not if the app may write there: in a listener to ``before_commit``, or because one to a
        flush has left something to flush.
        """
        session = self._session
        return (
            len(session.dispatch.before_commit) == 1
            and session.get_nested_transaction() is None
            and session._is_clean()  # noqa: SLF001 - the public ways take a dozen calls
        )

    def _end_transaction(self) -> None:
        self._session.commit()

    def undo(self) -> None:
        with self._lock:
            if self.has_ended:
                return
            self.has_ended = self._may_end = True
        # From now on statements of other threads are refused, but one may still run.
        deadline = time.monotonic() + _ABANDONED_SECONDS
        while self._statement.acquire(timeout=max(deadline - time.monotonic(), 0)):
            is_over = True
            try:
                is_over = self._roll_back() or time.monotonic() > deadline
            finally:
                if is_over:
                    self._end()
                self._statement.release()
            if is_over:
                return
            time.sleep(_PAUSE_SECONDS)  # without the lock, for which the other thread may wait
        _log.error("a statement of a cancelled handler does not end: its connection is lost")
        self._leave_turn()

    def _roll_back(self) -> bool:
        """Roll back; close the connection if that fails.

        Return False if another thread is inside the session: it is about to be refused.
        """
        given = self._given
        if given is None:
            return True
        session = given.session
        try:
            messages = self._store.messages
            if any(is_lost(connection, messages) for connection, _ in self._guarded):
                session.invalidate()
            with self._store.messages.rolling_back():
                if given.is_shared and not given.is_kept and not self.is_claimed:
                    end_transaction(session)  # the request goes on without the claim
                else:
                    session.rollback()
        except Exception as error:  # noqa: BLE001 - the connection is closed then
            # Also raised as InvalidRequestError, while the other thread gets a connection.
            if self._has_slot and getattr(error, "code", None) == _SESSION_IN_USE:
                return False
            with suppress(Exception):
                session.invalidate()
        return True

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True
        given = self._given
        if given is not None:
            info = given.session.info
            info.pop(OUTAGE, None)
            if not given.is_kept and (self.is_claimed or not given.is_shared):
                try:
                    given.session.close()
                except Exception as error:  # noqa: BLE001 - the transaction has ended
                    _log.debug("a session cannot be closed: %s", error)
            if given.is_shared:  # what comes after the end, e.g. a background task, may write
                info.pop(_UNIT, None)
            else:
                info[_UNIT] = None  # not the unit, which refers to the session
        self._leave_turn()

    def _leave_turn(self) -> None:
        with self._lock:
            had_turn, self._has_turn = self._has_turn, False
        if had_turn:
            self._store.pass_turn_on()

    # -- called by the listeners below ------------------------------------------------------

    def prepare(self) -> None:
        """Wait for the turn to write, on SQLite. Called before a connection is taken."""
        if self.has_ended:
            raise ended()
        if self._store.is_sqlite:
            self._take_turn()

    def begin_on(self, connection: Connection) -> None:
        """Guard the connection. On SQLite, begin first.

        Raises ``SupersededError`` if the key has a record by now.
        """
        if (
            connection.dialect is not self._store.engine.dialect
        ):  # a session may have several engines
            return
        # Not in its execution options, which take a dozen function calls per request.
        setattr(connection, _UNIT, self)
        if self._has_slot:  # else the handler has no other thread
            event.listen(connection, "after_cursor_execute", self.end_statement)
        store = self._store
        if store.is_sqlite:
            self._is_beginning = True
            try:
                self._begin_immediate(connection)
            finally:
                self._is_beginning = False
        self._guarded.append((connection, connection.get_transaction()))
        pooled: Any = connection.connection
        pooled.commit = partial(self._commit_driver, connection, pooled.dbapi_connection)
        if not store.is_sqlite:
            store.messages.limit(connection, self)
            pooled.rollback = partial(self._roll_back_driver, pooled.dbapi_connection)

    def _begin_immediate(self, connection: Connection) -> None:
        self._take_turn()
        with translating_outages():
            taken = self._store.begin_immediate(connection, self.record_id, self.claimed_at)
        self._changes_before = self._store.total_changes(connection)
        if taken:
            self.superseded = True
            raise SupersededError(SUPERSEDED)

    def _commit_driver(self, connection: Connection, driver: Any) -> None:
        """Commit a guarded connection, unless the handler does."""
        if not self._may_end:
            self._ended_by_connection = True
            raise UsageError(TRANSACTION_CONTROL)
        if not self._is_committed:
            with self._store.messages.committing(connection):
                driver.commit()

    def _roll_back_driver(self, driver: Any) -> None:
        """Roll a guarded connection back, as the pool does when it is returned."""
        if not self._is_committed or self._store.messages.needs_rollback(driver):
            driver.rollback()

    def _look_at_connections(self) -> None:
        """Note the end of the transaction, if the handler has ended it on its connection."""
        for connection, transaction in self._guarded:
            if connection.get_transaction() is not transaction:
                self._ended_by_connection = not self._may_end

    def refuse_commit(self, session: Session) -> None:
        """Raise ``UsageError`` if the handler commits."""
        if not self._may_end and session.get_nested_transaction() is None:
            raise UsageError(
                "a guarded handler must not commit: Onceward commits its rows together with the "
                f"record. Use `{self._store.flush_hint}` to have ids assigned"
            )

    def note_rollback(self, session: Session) -> None:
        """Note that the next end of a transaction is a rollback."""
        self._rolled_back = True
        if session.get_nested_transaction() is None:
            self._ended_by_connection = False
            self._guarded.clear()

    def note_end(self) -> None:
        """Note the end of a transaction: by a rollback, or by closing the session."""
        self._connection = None
        self._guarded.clear()
        if not self._may_end:
            self._closed_by_handler |= not self._rolled_back
            self._rolled_back = self._ended_by_connection = False

    def _take_turn(self) -> None:
        if self._has_turn:
            return
        self._store.take_turn()
        with self._lock:
            self._has_turn = not self.has_ended
        if not self._has_turn:  # rolled back by another thread while this one waited
            self._store.pass_turn_on()
            raise ended()

    def before_statement(self, sql: str, *, is_insert: bool) -> None:
        """Refuse a statement that begins or ends the transaction, or runs outside it.

        ``is_insert`` says that SQLAlchemy has written an INSERT by itself.
        """
        if self.statement_at:
            self.statement_at = time.monotonic()
        if not self._may_end and not self._is_beginning:
            self._look_at_connections()
            if self._ended_by_connection:
                raise UsageError(TRANSACTION_CONTROL)
            if not is_insert:  # its text may be long and different every time
                refuse_transaction_control(sql)
        if self._has_slot:
            self._begin_statement()

    def _begin_statement(self) -> None:
        """Note that a statement begins in this thread. Raises if the unit has ended."""
        self._statement.acquire()
        if self.has_ended:
            self._statement.release()
            raise ended()
        self._statement_thread = threading.get_ident()

    def note_error(self, *, is_outage: bool) -> None:
        """Note that a statement has failed in this thread."""
        self._is_lost |= is_outage
        self.end_statement()

    def end_statement(self, *_: Any) -> None:
        """Note that a statement has ended, or failed, in this thread."""
        if self._statement_thread == threading.get_ident():
            self._statement_thread = 0
            self._statement.release()


# -- event listeners: they do nothing in a session or connection that no unit guards --------------


# Makers that have the listeners: another store may have the same one.
_guarded_makers: "WeakSet[Any]" = WeakSet()


def guard_sessions(target: Any) -> None:
    """Report what happens to the sessions of a class or maker to their units. Idempotent."""
    if target in _guarded_makers:
        return
    _guarded_makers.add(target)
    for name, listener in (
        ("before_commit", _before_commit),
        ("after_rollback", _after_rollback),
        ("after_transaction_end", _after_transaction_end),
        ("do_orm_execute", _before_statement),
        ("before_flush", _before_flush),
        ("after_begin", _after_begin),
    ):
        event.listen(target, name, listener)


def guarded_class(base: type[Session]) -> type[Session]:
    """Return a subclass whose sessions can be guarded, also after they were used.

    Listeners of the app's class apply to it; the app's own sessions have none of these.
    """
    methods = {name: _noting_outages(getattr(base, name)) for name in _CONNECTING}
    found = type(base.__name__, (base,), methods)
    guard_sessions(found)
    event.listen(found, "after_transaction_end", _forget_written)
    event.listen(found, "after_flush", _after_flush)
    event.listen(found, "do_orm_execute", _note_statement)
    return found


def listen_to_driver_calls(engine: Engine) -> None:
    """Report statements of guarded connections to their units. Idempotent.

    Not undone: another store may have the same engine.
    """
    for name in _DRIVER_CALLS:
        listen_once(engine, name, _before_driver_call)
    listen_once(engine, "handle_error", _after_error)


def _noting_outages(method: Callable[..., Any]) -> Callable[..., Any]:
    """Note an outage in the session and raise it unchanged: the app may handle it."""

    @wraps(method)
    def call(session: Session, *arguments: Any, **options: Any) -> Any:
        try:
            return method(session, *arguments, **options)
        except Exception as error:
            if is_outage(error):
                session.info[OUTAGE] = error
            raise

    return call


def _before_commit(session: Session) -> None:
    unit = session.info.get(_UNIT)
    if unit is not None:
        unit.refuse_commit(session)


def _after_rollback(session: Session) -> None:
    unit = session.info.get(_UNIT)
    if unit is not None:
        unit.note_rollback(session)


def _after_transaction_end(session: Session, transaction: Any) -> None:
    unit = session.info.get(_UNIT)
    if unit is not None and transaction.parent is None:  # not a savepoint
        unit.note_end()


def _before_statement(state: Any) -> None:
    _before_flush(state.session)


def _before_flush(session: Session, *_: Any) -> None:
    if _UNIT in session.info:
        unit: SqlAlchemyUnit[Any] | None = session.info[_UNIT]
        if unit is None:
            raise ended()
        unit.prepare()


def _after_begin(session: Session, transaction: Any, connection: Connection) -> None:
    if _UNIT not in session.info or transaction.parent is not None:  # a savepoint
        return
    unit: SqlAlchemyUnit[Any] | None = session.info[_UNIT]
    if unit is None or unit.has_ended:
        # It ended after this thread's check in ``prepare``: nothing else returns the connection.
        connection.close()
        raise ended()
    unit.begin_on(connection)


def _forget_written(session: Session, transaction: Any) -> None:
    if transaction.parent is None:
        session.info.pop(_WROTE, None)


def _after_flush(session: Session, _context: Any) -> None:
    if _UNIT not in session.info:
        session.info.setdefault(_WROTE, []).extend(session.new)


def _note_statement(state: Any) -> None:
    if _UNIT not in state.session.info and (state.is_insert or state.is_update or state.is_delete):
        state.session.info.setdefault(_WROTE, [])


def _before_driver_call(*args: Any) -> None:
    """Report a statement to the unit of its connection.

    Not in ``before_cursor_execute``: if a listener after this one refuses the statement,
    SQLAlchemy 2.0 calls neither ``after_cursor_execute`` nor ``handle_error``.
    """
    context = args[-1]
    if context is not None:
        unit = getattr(context.root_connection, _UNIT, None)
        if unit is not None:
            unit.before_statement(args[1], is_insert=context.isinsert)


def _after_error(context: Any) -> None:
    error = context.original_exception
    if is_read_only(error):
        context.is_disconnect = True  # SQLAlchemy then discards the connections of the same age
    if context.is_disconnect or is_outage(error):
        # Of a connection that the app got from its session; the session does not raise it.
        (context.sqlalchemy_exception or error).__dict__[OUTAGE] = True
    if context.connection is not None:
        unit = getattr(context.connection, _UNIT, None)
        if unit is not None:
            unit.note_error(is_outage=context.is_disconnect or is_outage(error))


# -- sessions -------------------------------------------------------------------------------------


def end_transaction(session: Session) -> bool:
    """Roll back without expiring what was loaded; return whether nothing had been written.

    ``Session.rollback`` would expire it, and an async handler cannot load it again by reading an
    attribute. Rows that were inserted become new objects, which can be added again.
    """
    inserted = session.info.pop(_WROTE, None)
    while (
        transaction := session.get_nested_transaction() or session.get_transaction()
    ) is not None:
        transaction.close()
    for instance in inserted or ():
        if instance in session:
            session.expunge(instance)
            make_transient(instance)
    return inserted is None


def has_unflushed_changes(session: Session) -> bool:
    """Return whether the next flush would write."""
    return bool(session.new or session.deleted or any(map(session.is_modified, session.dirty)))
