"""What the stores on async and on sync SQLAlchemy share: guarded sessions, and their statements.

A session is guarded by the unit in its ``info``: only the unit ends the session's transaction. Its
connection has the unit in its execution options. The listeners below do nothing in a session or
connection without one.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, Protocol

from sqlalchemy import StaticPool, event
from sqlalchemy import exc as sa_errors
from sqlalchemy.orm import Session

from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.errors import ConfigurationError, NoTransactionError, SupersededError, UsageError
from onceward.ports import RecordQuery
from onceward.stores.rows import audit_values, finish_values
from onceward.stores.sqlalchemy_errors import SUPERSEDED_STATES, is_read_only
from onceward.stores.sqlite.rows import record_values, to_text
from onceward.stores.transaction_control import TRANSACTION_CONTROL, refuse_transaction_control

__all__ = [
    "CLAIMED_ROWS",
    "ENDED",
    "HELD_ROWS",
    "INLINE_BODY_BYTES",
    "SUPERSEDED",
    "UNIT",
    "GuardedUnit",
    "autocommit_refusal",
    "begin_immediate",
    "database_of",
    "has_idle_connection",
    "has_unflushed_changes",
    "listen_for_connection_ends",
    "listen_for_control",
    "listen_for_control_statements",
    "listen_for_ends",
    "listen_for_statements",
    "max_connections",
    "record_list_values",
    "save",
    "warn_unless_synchronous",
]

_log = logging.getLogger("onceward.stores")

# The key of Session.info for the unit that guards the session; None once it has ended. Also the
# option of the session's connection.
UNIT: Final = "onceward_unit"

ENDED: Final = "the transaction has ended: it was committed or rolled back"
SUPERSEDED: Final = "another request with this key was committed first"

# onceward_claim returns its result as a number of rows. Claimed: whether it has an expired record.
CLAIMED_ROWS: Final = {0: False, 3: True}
HELD_ROWS: Final = 2

# Larger bodies are sent as a parameter, in a separate round trip, not in hexadecimal digits.
INLINE_BODY_BYTES: Final = 16 * 1024

_SYNCHRONOUS_FULL: Final = 2

# The parameters of SQLite's list_records, in the order of PostgreSQL's.
_LIST_NAMES: Final = (
    *("tenant", "endpoint", "key"),
    *("after_at", "after_tenant", "after_endpoint", "after_key", "limit"),
)


# -- sessions -------------------------------------------------------------------------------------


class GuardedUnit(ABC):
    """Refuses ends of a session's transaction that are not the unit's."""

    # How the handler flushes the session, for messages.
    flush_hint: str
    # How to use the session without closing it, for messages.
    close_hint: str

    def __init__(self) -> None:
        self._may_end = False
        self._rolled_back = False
        self._closed_by_handler = False
        # True if the handler has ended the transaction on the session's connection.
        self._ended_by_connection = False
        # When the last statement was sent, in monotonic seconds.
        self.statement_at = 0.0

    @abstractmethod
    def prepare(self) -> None:
        """Get ready for a statement or flush, before it takes a connection."""

    def refuse_commit(self, session: Session) -> None:
        """Raise if the handler commits."""
        if not self._may_end and session.get_nested_transaction() is None:
            raise UsageError(
                "a guarded handler must not commit: Onceward commits its rows together with the "
                f"record. Use `{self.flush_hint}` to have ids assigned"
            )

    def guard_connection(self, connection: Any) -> None:
        """Refuse statements on the session's connection that begin or end the transaction."""
        # Not in ``info``, which belongs to the pooled connection and outlives the session's use.
        connection.execution_options(**{UNIT: self})

    def refuse_control(self, sql: str) -> None:
        """Raise if a statement begins or ends the transaction, or the connection has ended it."""
        if self._may_end:
            return
        if self._ended_by_connection:
            raise UsageError(TRANSACTION_CONTROL)
        refuse_transaction_control(sql)

    def refuse_connection_commit(self) -> None:
        """Raise if the handler commits the session's connection."""
        if not self._may_end:
            self._ended_by_connection = True
            raise UsageError(TRANSACTION_CONTROL)

    def note_connection_rollback(self) -> None:
        """Note a rollback of the connection. If it is the session's, ``note_rollback`` follows."""
        self._ended_by_connection = not self._may_end

    def note_rollback(self, session: Session) -> None:
        """Note that the next end of a transaction is a rollback."""
        self._rolled_back = True
        if session.get_nested_transaction() is None:
            self._ended_by_connection = False

    def note_end(self) -> None:
        """Note the end of a transaction: by a rollback, or by closing the session."""
        if not self._may_end:
            self._closed_by_handler |= not self._rolled_back
            self._rolled_back = self._ended_by_connection = False

    def _refuse_closed(self) -> None:
        if self._closed_by_handler:
            raise UsageError(
                "the handler closed Onceward's session, which rolled it back: "
                f"use it {self.close_hint}"
            )
        if self._ended_by_connection:
            raise UsageError(TRANSACTION_CONTROL)


def listen_for_ends(target: Any) -> None:
    """Report commits, rollbacks and ends of guarded sessions of a class or maker to their units."""
    event.listen(target, "before_commit", _before_commit)
    event.listen(target, "after_rollback", _after_rollback)
    event.listen(target, "after_transaction_end", _after_transaction_end)


def listen_for_statements(target: Any) -> None:
    """Call ``prepare`` before a guarded session of a class or maker takes a connection."""
    event.listen(target, "do_orm_execute", _before_statement)
    event.listen(target, "before_flush", _before_flush)


def listen_for_control(engine: Any) -> None:
    """Report statements, commits and rollbacks of guarded connections to their units. Idempotent.

    Not undone: another store may have the same engine.
    """
    for name, listener in (
        ("before_cursor_execute", _before_cursor_execute),
        ("commit", _on_connection_commit),
        ("rollback", _on_connection_rollback),
    ):
        if not event.contains(engine, name, listener):
            event.listen(engine, name, listener)


def listen_for_control_statements(engine: Any) -> None:
    """Report statements of guarded connections to their units. Idempotent; not undone.

    By ``do_execute`` and its like: with a listener for an event of the engine itself, SQLAlchemy
    makes an object for each of eight events on every connection, 108 function calls per request.
    """
    for name, listener in (
        ("do_execute", _before_execute),
        ("do_executemany", _before_execute),
        ("do_execute_no_params", _before_execute_no_params),
    ):
        if not event.contains(engine, name, listener):
            event.listen(engine, name, listener)
    if not event.contains(engine, "handle_error", _after_error):
        event.listen(engine, "handle_error", _after_error)


def _after_error(context: Any) -> None:
    if is_read_only(context.original_exception):
        context.is_disconnect = True  # SQLAlchemy then discards the connections of the same age


def listen_for_connection_ends(connection: Any) -> None:
    """Report commits and rollbacks of one guarded connection to its unit. Idempotent."""
    for name, listener in (
        ("commit", _on_connection_commit),
        ("rollback", _on_connection_rollback),
    ):
        if not event.contains(connection, name, listener):
            event.listen(connection, name, listener)


def _before_execute(_cursor: Any, sql: str, _parameters: Any, context: Any) -> None:
    if context is not None:
        _before_cursor_execute(context.root_connection, None, sql, None, context, False)


def _before_execute_no_params(_cursor: Any, sql: str, context: Any) -> None:
    _before_execute(None, sql, None, context)


def _before_cursor_execute(
    connection: Any, _cursor: Any, sql: str, _parameters: Any, context: Any, _many: bool
) -> None:
    unit = connection.get_execution_options().get(UNIT)
    if unit is not None:
        unit.statement_at = time.monotonic()
        # SQLAlchemy has written an INSERT by itself. Its text may be long and different every time.
        if not (context is not None and context.isinsert):
            unit.refuse_control(sql)


def _on_connection_commit(connection: Any) -> None:
    unit = connection.get_execution_options().get(UNIT)
    if unit is not None:
        unit.refuse_connection_commit()


def _on_connection_rollback(connection: Any) -> None:
    unit = connection.get_execution_options().get(UNIT)
    if unit is not None:
        unit.note_connection_rollback()


def _before_commit(session: Session) -> None:
    unit = session.info.get(UNIT)
    if unit is not None:
        unit.refuse_commit(session)


def _after_rollback(session: Session) -> None:
    unit = session.info.get(UNIT)
    if unit is not None:
        unit.note_rollback(session)


def _after_transaction_end(session: Session, transaction: Any) -> None:
    unit = session.info.get(UNIT)
    if unit is not None and transaction.parent is None:  # not a savepoint
        unit.note_end()


def _before_statement(state: Any) -> None:
    _before_flush(state.session)


def _before_flush(session: Session, *_: Any) -> None:
    if UNIT in session.info:
        unit: GuardedUnit | None = session.info[UNIT]
        if unit is None:
            raise NoTransactionError(ENDED)
        unit.prepare()


def has_unflushed_changes(session: Session) -> bool:
    """Return whether the next flush would write."""
    return bool(session.new or session.deleted or any(map(session.is_modified, session.dirty)))


# -- engines --------------------------------------------------------------------------------------


def database_of(engine: Any, databases: dict[tuple[str, str], str], supported: str) -> str:
    """Return the package of an engine's database. Raises ``ConfigurationError``.

    ``databases`` are packages by database and driver, ``supported`` names them.
    """
    name, driver = engine.dialect.name, engine.dialect.driver
    database = databases.get((name, driver))
    if database is None:
        raise ConfigurationError(f"{name}+{driver} is not supported: use {supported}")
    if isinstance(engine.pool, StaticPool):
        raise ConfigurationError(
            "this engine shares one connection, and so one transaction, between all requests: "
            "use a SQLite file"
        )
    return database


def max_connections(pool: Any) -> int | None:
    """Return how many connections an engine's pool allows; None if there is no limit."""
    overflow: int = getattr(pool, "_max_overflow", -1)
    return None if overflow < 0 else pool.size() + overflow


def has_idle_connection(pool: Any) -> bool:
    """Return whether a pool has a connection that it lends without a message to the server.

    Then there is nothing to limit, and a time limit costs some twenty function calls. Attributes of
    SQLAlchemy's pools say whether a connection is tested or may be too old.
    """
    idle: Callable[[], int] | None = getattr(pool, "checkedin", None)
    is_tested = getattr(pool, "_pre_ping", True) or getattr(pool, "_recycle", 0) != -1
    return idle is not None and not is_tested and idle() > 0


def autocommit_refusal() -> ConfigurationError:
    """Return the error for an engine whose statements do not begin a transaction."""
    return ConfigurationError(
        "this engine is in AUTOCOMMIT mode, so nothing can commit together: "
        "use an engine with transactions"
    )


def warn_unless_synchronous(level: int) -> None:
    """Log a warning if SQLite's ``PRAGMA synchronous`` is below FULL."""
    if level < _SYNCHRONOUS_FULL:
        _log.warning(
            "SQLite runs with PRAGMA synchronous below FULL: a power failure may lose "
            "acknowledged requests together with their records"
        )


# -- statements, blocking or in SQLAlchemy's greenlet ---------------------------------------------


class _Run(Protocol):
    """Runs one of Onceward's statements."""

    def __call__(self, sql: str, values: Any = (), /) -> Any: ...


def begin_immediate(
    connection: Any, find_record: str, record_id: RecordId | None, claimed_at: datetime | None
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
    return connection.exec_driver_sql(find_record, values).first() is not None


def save(
    run: _Run, sql: Any, record: Record | None, audit: AuditEvent | None, *, is_sqlite: bool
) -> None:
    """Write record and audit event in the session's transaction. ``sql`` has the statements."""
    if is_sqlite:
        if record is not None and run(sql["save_record"], record_values(record)).rowcount == 0:
            raise SupersededError(SUPERSEDED)
        if audit is not None:
            _save_audit(run, sql, audit, to_text(audit.created_at))
        run("RELEASE onceward")
    elif record is not None:
        try:
            run(sql["finish"], finish_values(record, audit))
        except sa_errors.DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) in SUPERSEDED_STATES:
                raise SupersededError(SUPERSEDED) from error
            raise
    elif audit is not None:
        _save_audit(run, sql, audit, audit.created_at)
    else:
        # Without a statement, COMMIT would roll an aborted transaction back without an error.
        run("SELECT 1")


def _save_audit(run: _Run, sql: Any, audit: AuditEvent, created_at: Any) -> None:
    run(sql["save_audit_event"], audit_values(audit, created_at))


def record_list_values(
    query: RecordQuery, instant: Callable[[datetime], Any], *, is_sqlite: bool
) -> Any:
    """Return the parameters of ``list_records``; ``instant`` converts what the database stores."""
    after = query.after or (None, None, None, None)
    at = None if after[0] is None else instant(after[0])
    values = (query.only_tenant, query.endpoint, query.key, at, *after[1:], query.limit)
    return dict(zip(_LIST_NAMES, values, strict=True)) if is_sqlite else values
