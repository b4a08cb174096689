"""The transaction of a guarded request in an app's own async SQLAlchemy session."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from functools import wraps
from typing import Any, Final, Protocol, TypeVar

from onceward_protocol.extras import needs_extra

with needs_extra("sqlalchemy"):
    from sqlalchemy import event
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncSession,
    )
    from sqlalchemy.orm import Session, make_transient
    from sqlalchemy.util import await_only

from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.core.table_names import TableNames
from onceward.errors import (
    CommitUnknownError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
)
from onceward.ports import (
    Params,
    Row,
)
from onceward.stores.asyncpg_messages import (
    LateConnections,
    LimitedTransaction,
    SharedTransaction,
    begin_with,
    late_connections,
    limited_transaction,
)
from onceward.stores.connection_gate import ConnectionGate, Visit, current_visit
from onceward.stores.postgres.params import (
    finish_statement,
    instant_literal,
    positional,
    rows_changed,
    text_literals,
)
from onceward.stores.rows import HAS_WRITTEN
from onceward.stores.session_limits import SessionLimits
from onceward.stores.sqlalchemy_errors import (
    SAVEPOINT,
    SUPERSEDED_STATES,
    driver_error,
    is_aborted,
    is_outage,
    raise_without_statement,
    translating_outages,
)
from onceward.stores.sqlalchemy_sessions import (
    ENDED,
    INLINE_BODY_BYTES,
    SUPERSEDED,
    UNIT,
    GuardedUnit,
    autocommit_refusal,
    has_unflushed_changes,
    listen_for_connection_ends,
    listen_for_ends,
    listen_for_statements,
)
from onceward.stores.sqlite.rows import to_values
from onceward.stores.sqlstates import unstorable_error
from onceward.stores.transaction_control import aborted

__all__ = [
    "OUTAGE",
    "SqlAlchemyUnit",
    "end_transaction",
    "fetch_rows",
    "guarded_class",
    "refuse_autocommit",
    "rolling_back",
]

T = TypeVar("T")

# The key of Session.info for the instances that were inserted, if it wrote before the claim.
_WROTE: Final = "onceward_wrote"
# The key of Session.info for the last outage that one of its methods raised.
OUTAGE: Final = "onceward_outage"
# The methods of a session that use a connection. The others call these.
_CONNECTING: Final = (
    "begin_nested",
    "commit",
    "connection",
    "execute",
    "flush",
    "scalar",
    "scalars",
)

_ROLLBACK_SECONDS: Final = 6.0


class UnitStore(Protocol):
    """What a unit needs of its store."""

    # Limits how many guarded requests use the pool at once.
    gate: ConnectionGate
    # For PostgreSQL.
    limits: SessionLimits
    table_names: TableNames
    claim_function: str
    finish_function: str

    @property
    def is_sqlite(self) -> bool:
        """True on SQLite, where writers take turns and the primary key decides."""

    def new_session(self) -> AsyncSession:
        """Return a session for a request."""

    async def take_turn(self) -> None:
        """Wait until no other session of this process writes to the SQLite file."""

    def pass_turn_on(self) -> None:
        """Let the next session write."""

    def begin_immediate(
        self, connection: Any, record_id: RecordId | None, claimed_at: datetime | None
    ) -> bool:
        """Begin on SQLite; return whether the key has a record by now. Runs in a greenlet."""

    async def save(
        self, connection: AsyncConnection, record: Record | None, audit: AuditEvent | None
    ) -> None:
        """Write record and audit event in the session's transaction."""

    async def run_to_end(self, ending: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, even if the caller is cancelled."""


class SessionStatements:
    """Onceward's statements in the transaction of an app's session."""

    def __init__(self, session: AsyncSession, *, is_sqlite: bool) -> None:
        self._session = session
        self._is_sqlite = is_sqlite

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        with translating_outages():
            connection = await self._session.connection()
            if self._is_sqlite:
                result = await connection.exec_driver_sql(sql, to_values(params))
            else:
                text, values = positional(sql, params)
                result = await connection.exec_driver_sql(text, tuple(values))
        return max(result.rowcount, 0)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        with translating_outages():
            connection = await self._session.connection()
            return await fetch_rows(connection, sql, params, is_sqlite=self._is_sqlite)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


async def fetch_rows(
    connection: AsyncConnection, sql: str, params: Params, *, is_sqlite: bool
) -> list[Row]:
    """Run a statement with named parameters and return its rows, if it has any."""
    if is_sqlite:
        result = await connection.exec_driver_sql(sql, to_values(params))
    else:
        text, values = positional(sql, params)
        result = await connection.exec_driver_sql(text, tuple(values))
    return [dict(row) for row in result.mappings()] if result.returns_rows else []


class SqlAlchemyUnit(GuardedUnit):
    """The session of one guarded request or job. Only Onceward commits or ends it."""

    # For messages.
    flush_hint = "await session.flush()"
    # For messages.
    close_hint = "without `async with` and without close()"

    def __init__(
        self,
        store: UnitStore,
        session: AsyncSession | None,
        record_id: RecordId | None,
        claimed_at: datetime | None,
    ) -> None:
        """Use ``session``, which the request closes, or a new one."""
        super().__init__()
        self._store = store
        self._is_shared = session is not None
        self._record_id = record_id
        self._claimed_at = claimed_at
        self._own_visit: Visit | None = None
        self._shared_transaction: SharedTransaction | None = None
        # Looks for a statement that the server does not respond to.
        self._late: LateConnections | None = None
        self._adapter: Any = None
        self._is_guarded = False
        self._has_turn = False
        self._ended = False
        # Rows that SQLite's connection has changed since it was opened, without those of this unit.
        self._changes_before = 0
        # True if another request has committed the key.
        self.superseded = False
        # The session that handlers use.
        self.transaction = store.new_session() if session is None else session

    async def enter(self) -> None:
        """Wait until this request may take a connection, if it has not been admitted yet."""
        visit = current_visit()
        if visit is None:
            visit = self._own_visit = Visit()
        gate = self._store.gate
        gate.before_claim(visit)
        await gate.admit(visit)

    def begin_and_claim(self, session: Session, connecting: asyncio.Timeout | None = None) -> int:
        """Begin and claim on PostgreSQL; return the number of rows of ``onceward_claim``.

        ``connecting`` ends once there is a connection: the claim has a limit of its own. One
        message where the driver allows it. Runs in SQLAlchemy's greenlet.
        """
        assert self._record_id is not None  # noqa: S101 - without a key there is no claim
        assert self._claimed_at is not None  # noqa: S101
        number, now = self._store.table_names.lock_number(*self._record_id), self._claimed_at
        claim = self._store.claim_function
        connection = session.connection()
        if connecting is not None:
            connecting.reschedule(None)
        self.guard_connection(connection)
        self._limit_statements(connection)
        sent = begin_with(
            connection,
            f"SELECT {claim}({number},{','.join(text_literals(self._record_id))},"
            f"{instant_literal(now)})",
            self,
            self._store.limits,
        )
        if sent is not None:
            self._shared_transaction, tag = sent
            return rows_changed(tag)
        listen_for_connection_ends(connection)
        found = connection.exec_driver_sql(
            f"SELECT {claim}($1,$2,$3,$4,$5)", (number, *self._record_id, now)
        ).all()
        driver: Any = connection.connection.driver_connection
        _check_transaction(driver)
        return len(found)

    def _limit_statements(self, connection: Any) -> None:
        """Close the connection if the server does not respond to a statement of the handler."""
        self._adapter = connection.connection.dbapi_connection
        if self._late is None:
            self.statement_at = time.monotonic()
            self._late = late_connections()
            self._late.watch(self)

    def look(self, now: float) -> None:
        """Close the connection if the server does not respond to a statement of the handler."""
        if now - self.statement_at < self._store.limits.statement_seconds:
            return
        # SQLAlchemy's adapter holds this lock while a statement runs.
        running: asyncio.Lock | None = getattr(self._adapter, "_execute_mutex", None)
        if running is not None and running.locked():
            self._adapter.driver_connection.terminate()

    async def confirm(self) -> None:
        """Commit what the claim has read, so that a synchronous standby has it too.

        Raises ``StoreUnavailableError`` if it may not have it. The session can be used.
        """
        pooled = self.transaction.sync_session.connection().connection
        transaction = limited_transaction(pooled, self._store.limits)
        assert transaction is not None  # noqa: S101 - the claim has begun
        await transaction.confirm()

    def guard(self) -> None:
        """From now on, only this unit ends the session's transaction."""
        self._is_guarded = True
        self.transaction.sync_session.info[UNIT] = self

    @property
    def statements(self) -> SessionStatements:
        """The session's transaction, for Onceward's statements."""
        return SessionStatements(self.transaction, is_sqlite=self._store.is_sqlite)

    async def has_written(self) -> bool:
        """Return whether the handler has written, or would with the next flush."""
        session = self.transaction.sync_session
        if has_unflushed_changes(session):
            return True
        if not session.in_transaction() or self._ended_by_connection:
            return self._closed_by_handler or self._ended_by_connection
        if not self._store.is_sqlite:
            row = await self.statements.fetch_one(HAS_WRITTEN)
            return row is None or bool(row["written"])
        if not self._has_turn:
            return False
        driver: Any = session.connection().connection.driver_connection
        return bool(driver.total_changes != self._changes_before)

    async def keep_alive(self) -> None:
        """Do nothing: a session runs one statement at a time and belongs to the app."""

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Flush the session, write record and audit event, and commit."""
        if self._ended:
            raise NoTransactionError(ENDED)
        session = self.transaction
        ending: SharedTransaction | LimitedTransaction | None = None
        async with rolling_back(self):
            self._refuse_closed()
            ending = shared = self._usable_transaction(record)
            if shared is None:
                await session.flush()
                connection = await session.connection()
                await self._store.save(connection, record, audit)
                if not self._store.is_sqlite:
                    assert connection.sync_connection is not None  # noqa: S101 - it is open
                    pooled = connection.sync_connection.connection
                    ending = limited_transaction(pooled, self._store.limits)
                self._may_end = True
        try:
            if shared is None or record is None:
                await session.commit()
            else:
                last_statement = finish_statement(self._store.finish_function, record, audit)
                await session.run_sync(self._flush_and_commit, shared, last_statement)
        except BaseException as error:
            is_sent = self._may_end  # an error of the flush comes before COMMIT
            await self.rollback()
            is_cut = ending is not None and ending.was_cut
            known = _commit_error(error, is_cut=is_cut) if is_sent else _flush_error(error)
            if known is error:
                raise
            if isinstance(known, StoreUnavailableError | CommitUnknownError):
                raise_without_statement(known, error)
            raise known from error
        self._ended = True
        self._end_of_session()

    def _flush_and_commit(
        self, session: Session, shared: SharedTransaction, last_statement: str
    ) -> None:
        session.flush()
        self._may_end = True
        shared.last_statement = last_statement
        session.commit()

    def _usable_transaction(self, record: Record | None) -> SharedTransaction | None:
        """Return the transaction whose COMMIT can carry the record, if it can."""
        shared = self._shared_transaction
        if shared is None or record is None or len(record.body) > INLINE_BODY_BYTES:
            return None
        # A handler that has rolled back is in another transaction by now.
        sync = self.transaction.sync_session
        if sync.in_nested_transaction() or not sync.in_transaction():
            return None
        adapter: Any = sync.connection().connection.dbapi_connection
        is_usable = getattr(adapter, "_transaction", None) is shared
        return shared if is_usable and not adapter.driver_connection.is_closed() else None

    async def rollback(self) -> None:
        """Roll back; close the connection if that fails."""
        if not self._ended:
            self._ended = self._may_end = True
            await self._store.run_to_end(self._undo())

    async def _undo(self) -> None:
        session = self.transaction
        if self._is_shared and not self._is_guarded:  # the request goes on without the claim
            with suppress(Exception):
                await session.run_sync(end_transaction)
            self._leave()
            return
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await session.rollback()
        except Exception:  # noqa: BLE001 - the connection is closed then
            with suppress(Exception):
                await session.invalidate()
        await self._close()

    async def _close(self) -> None:
        try:
            with suppress(Exception):
                await self.transaction.close()
        finally:
            self._end_of_session()

    def _end_of_session(self) -> None:
        """Detach what the session has loaded; it has returned its connection."""
        try:
            with suppress(Exception):
                self.transaction.sync_session.expunge_all()
        finally:
            if self._has_turn:
                self._has_turn = False
                self._store.pass_turn_on()
            self._leave()
            # The session must not refer to the unit that refers to it.
            info = self.transaction.sync_session.info
            info.pop(OUTAGE, None)
            info[UNIT] = None
            if self._is_shared:  # what comes after the end, e.g. a background task, may write
                del info[UNIT]

    def _leave(self) -> None:
        self._shared_transaction = None  # which refers to the unit
        if self._late is not None:
            self._late.leave(self)
            self._late = self._adapter = None
        if self._own_visit is not None:
            self._own_visit.leave()

    # -- called by the listeners below, in SQLAlchemy's greenlet ----------------------------

    def prepare(self) -> None:
        """Wait for the turn to write, on SQLite."""
        if self._ended and not self._has_turn:
            raise NoTransactionError(ENDED)
        if not self._has_turn:
            await_only(self._store.take_turn())
            self._has_turn = True

    def begin_on(self, connection: Any) -> None:
        """Guard the connection. On SQLite, begin first.

        Raises ``SupersededError`` if the key has a record by now.
        """
        if self._store.is_sqlite:
            self._begin_immediate(connection)
        else:
            listen_for_connection_ends(connection)
            self._limit_statements(connection)
        self.guard_connection(connection)

    def _begin_immediate(self, connection: Any) -> None:
        self.prepare()
        with translating_outages():
            taken = self._store.begin_immediate(connection, self._record_id, self._claimed_at)
        driver: Any = connection.connection.driver_connection
        self._changes_before = driver.total_changes
        if taken:
            self.superseded = True
            raise SupersededError(SUPERSEDED)


# -- event listeners, of a subclass of the app's session class: the app's own sessions have none --


def guarded_class(base: type[Session], is_sqlite: bool) -> type[Session]:
    """Return a subclass whose sessions can be guarded. Listeners of the app's class apply to it."""
    methods = {name: _noting_outages(getattr(base, name)) for name in _CONNECTING}
    found = type(base.__name__, (base,), methods)
    listen_for_ends(found)
    event.listen(found, "after_transaction_end", _forget_written)
    event.listen(found, "after_flush", _after_flush)
    event.listen(found, "do_orm_execute", _note_statement)
    event.listen(found, "after_begin", _after_begin)
    if is_sqlite:
        # Before a connection is taken: the wait for the turn must not hold one.
        listen_for_statements(found)
    return found


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


def _forget_written(session: Session, transaction: Any) -> None:
    if transaction.parent is None:
        session.info.pop(_WROTE, None)


def _after_flush(session: Session, _context: Any) -> None:
    if UNIT not in session.info:
        session.info.setdefault(_WROTE, []).extend(session.new)


def _note_statement(state: Any) -> None:
    if UNIT not in state.session.info and (state.is_insert or state.is_update or state.is_delete):
        state.session.info.setdefault(_WROTE, [])


def _after_begin(session: Session, transaction: Any, connection: Any) -> None:
    if transaction.parent is None:  # not a savepoint
        unit = session.info.get(UNIT)
        if unit is not None:
            unit.begin_on(connection)


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


def _flush_error(error: BaseException) -> BaseException:
    """Return what to raise for an error before the commit."""
    if isinstance(error, Exception) and is_outage(error):
        return StoreUnavailableError(f"the database is unavailable: {driver_error(error)}")
    if is_aborted(error):
        return aborted(SAVEPOINT)
    return unstorable_error(error) or error


def _commit_error(error: BaseException, *, is_cut: bool) -> BaseException:
    """Return what to raise for an error of a commit."""
    if not isinstance(error, Exception):
        return error
    state = getattr(getattr(error, "orig", error), "sqlstate", None)
    if state in SUPERSEDED_STATES:
        return SupersededError(SUPERSEDED)
    if is_aborted(error):
        return aborted(SAVEPOINT)
    if is_outage(error):
        lost = f"the connection was lost in COMMIT: {driver_error(error)}"
        return CommitUnknownError(lost, is_cut=is_cut)
    return error


async def refuse_autocommit(connection: AsyncConnection) -> None:
    """Raise if statements do not begin a transaction, as with an autocommit engine."""
    driver: Any = (await connection.get_raw_connection()).driver_connection
    _check_transaction(driver)


def _check_transaction(driver: Any) -> None:
    if not driver.is_in_transaction():
        raise autocommit_refusal()


@asynccontextmanager
async def rolling_back(unit: SqlAlchemyUnit) -> AsyncIterator[None]:
    """Roll back if the block raises. For everything before COMMIT."""
    try:
        with translating_outages():
            yield
    except BaseException:
        await unit.rollback()
        raise
