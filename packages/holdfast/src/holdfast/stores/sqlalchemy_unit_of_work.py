"""One guarded request's transaction in an app's own SQLAlchemy session: ends once, by us."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import event
from sqlalchemy import exc as sa_errors
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.util import await_only

from holdfast.core.idempotency_record import AuditEvent, Record, RecordId
from holdfast.errors import (
    CommitUnknownError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
    UsageError,
)
from holdfast.ports import Params, Row
from holdfast.stores.postgres.params import positional
from holdfast.stores.sqlite.rows import is_outage, to_values

if TYPE_CHECKING:
    from holdfast.stores.sqlalchemy import SqlAlchemyStore

__all__ = ["SUPERSEDED", "SqlAlchemyUnit", "fetch", "telling_outages", "undoing"]

SUPERSEDED: Final = "another request with this key was committed first"

_ROLLBACK_SECONDS: Final = 5.0
# Shut down, starting up, full, a standby; and a transaction that a failed statement has spoilt.
_OUTAGE_STATES: Final = frozenset({"57P01", "57P02", "57P03", "53300", "25006", "25P02"})


class SessionStatements:
    """Holdfast's own statements inside an app's session."""

    def __init__(self, session: AsyncSession, *, is_sqlite: bool) -> None:
        """Use the session's connection, so that everything is one transaction."""
        self._session = session
        self._is_sqlite = is_sqlite

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        with telling_outages():
            connection = await self._session.connection()
            if self._is_sqlite:
                result = await connection.exec_driver_sql(sql, to_values(params))
            else:
                text, values = positional(sql, params)
                result = await connection.exec_driver_sql(text, tuple(values))
        return max(result.rowcount, 0)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        with telling_outages():
            connection = await self._session.connection()
            return await fetch(connection, sql, params, is_sqlite=self._is_sqlite)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


async def fetch(
    connection: AsyncConnection, sql: str, params: Params, *, is_sqlite: bool
) -> list[Row]:
    """Run a statement with named parameters and return its rows, if it gives any."""
    if is_sqlite:
        result = await connection.exec_driver_sql(sql, to_values(params))
    else:
        text, values = positional(sql, params)
        result = await connection.exec_driver_sql(text, tuple(values))
    return [dict(row) for row in result.mappings()] if result.returns_rows else []


class SqlAlchemyUnit:
    """One guarded request's session. Ends in exactly one commit or rollback, both ours."""

    def __init__(
        self,
        store: "SqlAlchemyStore",
        session: AsyncSession,
        record_id: RecordId | None,
        claimed_at: Any,
    ) -> None:
        """Watch the session; on SQLite nothing is held before its first statement."""
        self._store = store
        self._record_id = record_id
        self._claimed_at = claimed_at
        self._has_turn = False
        self._is_ours_to_end = False
        self._rolled_back = False
        self._closed_by_handler = False
        self._ended = False
        self.superseded = False
        self.transaction = session
        watched = session.sync_session
        event.listen(watched, "before_commit", self._refuse_commit)
        event.listen(watched, "after_rollback", self._note_rollback)
        event.listen(watched, "after_transaction_end", self._note_end)
        if store.is_sqlite:
            # The turn is waited for without a connection: these two come before one is taken.
            event.listen(watched, "do_orm_execute", self._take_turn)
            event.listen(watched, "before_flush", self._take_turn)
            event.listen(watched, "after_begin", self._begin)

    @property
    def statements(self) -> "SessionStatements":
        """The session's connection, for statements of Holdfast's own."""
        return SessionStatements(self.transaction, is_sqlite=self._store.is_sqlite)

    async def keep_alive(self) -> None:
        """Do nothing: a session takes one statement at a time, and it is the app's."""

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Flush the handler's rows, write record and audit event, and commit all of it."""
        if self._ended:
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        session = self.transaction
        async with undoing(self):
            self._refuse_closed()
            await session.flush()
            await self._store.save(await session.connection(), record, audit)
        self._is_ours_to_end = True
        try:
            await session.commit()
        except BaseException as error:
            await self.rollback()
            if isinstance(error, Exception) and _is_outage(error):
                raise CommitUnknownError(f"the connection was lost in COMMIT: {error}") from error
            raise
        self._ended = True
        await self._store.end(self._let_go())

    async def rollback(self) -> None:
        """Undo everything; cut off what cannot be undone."""
        if not self._ended:
            self._ended = self._is_ours_to_end = True
            await self._store.end(self._undo())

    async def _undo(self) -> None:
        session = self.transaction
        try:
            async with asyncio.timeout(_ROLLBACK_SECONDS):
                await session.rollback()
        except Exception:  # noqa: BLE001 - dead or hanging: then it is cut off
            with suppress(Exception):
                await session.invalidate()
        await self._let_go()

    async def _let_go(self) -> None:
        try:
            with suppress(Exception):
                await self.transaction.close()
        finally:
            if self._has_turn:
                self._has_turn = False
                self._store.pass_turn_on()

    # -- what the session tells, each in SQLAlchemy's greenlet ------------------------------

    def _take_turn(self, *_: Any) -> None:
        if self._ended and not self._has_turn:
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        if not self._has_turn:
            await_only(self._store.take_turn())
            self._has_turn = True

    def _begin(self, _session: Any, transaction: Any, connection: Any) -> None:
        if transaction.parent is not None:
            return  # a savepoint; its transaction was here before it
        self._take_turn()
        with telling_outages():
            taken = self._store.begin_immediate(connection, self._record_id, self._claimed_at)
        if taken:
            self.superseded = True
            raise SupersededError(SUPERSEDED)

    def _refuse_commit(self, session: Any) -> None:
        if not self._is_ours_to_end and session.get_nested_transaction() is None:
            raise UsageError(
                "a guarded handler must not commit: Holdfast commits its rows together with the "
                "record. Use `await session.flush()` to have ids assigned"
            )

    def _refuse_closed(self) -> None:
        if self._closed_by_handler:
            raise UsageError(
                "the handler closed Holdfast's session, which undid what it wrote: "
                "use it without `async with` and without close()"
            )

    def _note_rollback(self, _session: Any) -> None:
        self._rolled_back = True

    def _note_end(self, _session: Any, transaction: Any) -> None:
        if transaction.parent is None and not self._is_ours_to_end:
            self._closed_by_handler |= not self._rolled_back
            self._rolled_back = False


def _is_outage(error: BaseException) -> bool:
    """Tell the database's troubles from the handler's."""
    if isinstance(error, OSError | sa_errors.TimeoutError | sa_errors.PendingRollbackError):
        return True
    cause: BaseException | None = error
    if isinstance(error, sa_errors.DBAPIError):
        if error.connection_invalidated:
            return True
        cause = error.orig
    if isinstance(cause, sqlite3.OperationalError):
        return is_outage(cause) or "no such savepoint: holdfast" in str(cause)
    state = str(getattr(cause, "sqlstate", None) or "")
    return state.startswith("08") or state in _OUTAGE_STATES


@contextmanager
def telling_outages() -> Iterator[None]:
    """Raise the database's troubles as such, and everything else as it came."""
    try:
        yield
    except Exception as error:
        if _is_outage(error):
            raise StoreUnavailableError(f"the database does not answer: {error}") from error
        raise


@asynccontextmanager
async def undoing(unit: SqlAlchemyUnit) -> AsyncIterator[None]:
    """Roll back on every way out but the straight one. For what comes before COMMIT."""
    try:
        with telling_outages():
            yield
    except BaseException:
        await unit.rollback()
        raise
