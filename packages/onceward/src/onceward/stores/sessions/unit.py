"""The transaction of a guarded request in a session or connection of the app."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from onceward.errors import NoTransactionError
from onceward.ports import Params, Row, TransactionT_co
from onceward.records import AuditEvent, Record, RecordId
from onceward.stores.base import BaseUnit
from onceward.stores.postgres.params import finish_statement
from onceward.stores.rows import HAS_WRITTEN

if TYPE_CHECKING:
    from onceward.stores.sessions.store import SessionStore

__all__ = ["ENDED", "SessionStatements", "SessionUnit"]

T = TypeVar("T")

ENDED: Final = "the transaction has ended: it was committed or rolled back"
# Larger bodies are sent as a parameter, in a separate round trip, not in hexadecimal digits.
_INLINE_BODY_BYTES: Final = 16 * 1024


class SessionStatements:
    """Onceward's statements in the transaction of a unit."""

    def __init__(self, store: "SessionStore[Any]", unit: "SessionUnit[Any]") -> None:
        self._store = store
        self._unit = unit

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        return await self._unit.run(lambda: self._store.execute(self._unit.connection, sql, params))

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        return await self._unit.run(lambda: self._store.fetch(self._unit.connection, sql, params))

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


class SessionUnit(BaseUnit, ABC, Generic[TransactionT_co]):
    """One guarded request or job. Only Onceward commits or ends its transaction.

    Methods without ``async`` block: ``run`` calls them where the store's connections are used.
    """

    def __init__(
        self, store: "SessionStore[Any]", record_id: RecordId | None, claimed_at: datetime | None
    ) -> None:
        self._store = store
        self.record_id = record_id
        self.claimed_at = claimed_at
        # True once it was committed or rolled back.
        self.has_ended = False
        # True from the end of the handler on: Onceward ends the transaction.
        self._may_end = False
        # True once COMMIT was sent with the record.
        self._is_committed = False
        # Rows that SQLite's connection has changed since it was opened, without those of this unit.
        self._changes_before = 0
        # True once the handler may use it: the key is claimed, or there is none.
        self.is_claimed = False
        # True if BEGIN and the claim shared a message.
        self.has_messages = False
        # Frees what the request has taken for this unit.
        self._on_free: Callable[[], None] | None = None
        # Called if the key was not claimed.
        self._on_leave: Callable[[], None] | None = None
        # True if another request has committed the key.
        self.superseded = False

    @property
    @abstractmethod
    def transaction(self) -> TransactionT_co:
        """The session or connection that handlers use."""

    @property
    @abstractmethod
    def connection(self) -> Any:
        """The connection with the transaction, for statements of Onceward."""

    @property
    def statements(self) -> SessionStatements:
        """The same transaction, for Onceward's statements."""
        return SessionStatements(self._store, self)

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run a blocking function. Raises ``StoreUnavailableError``."""
        return self._store.run_in_unit(work)

    async def has_written(self) -> bool:
        """Return whether the handler has written, or would with the next flush."""
        return await self.run(self._has_written)

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event, and commit them with the handler's rows."""
        if self.has_ended:
            raise NoTransactionError(ENDED)
        try:
            await self.run(partial(self._commit, record, audit))
        except BaseException:
            await self.rollback()
            raise
        self._free()

    async def rollback(self) -> None:
        """Roll back; close the connection if that fails."""
        if not self.has_ended:
            await self._store.run_to_end(self.undo)
        self._free()

    # -- blocking -------------------------------------------------------------------------

    @abstractmethod
    def start(self) -> Any:
        """Begin the transaction, or prepare the session that begins it, and guard it."""

    def confirm(self) -> None:
        """Commit what the claim has read, so that a synchronous standby has it too, or raise."""
        self._store.messages.confirm(self.connection)

    def _commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        store = self._store
        self._prepare_commit()
        connection = self.connection
        notices = None
        try:
            if (
                record is not None
                and len(record.body) <= _INLINE_BODY_BYTES
                and store.messages.can_finish(connection)
                and self._may_share_commit()
            ):
                statement = finish_statement(store.finish_function, record, audit)
                store.messages.finish_and_commit(connection, statement)
                self._is_committed = True
            else:
                notices = store.messages.notices_of(connection)
                store.save(connection, record, audit)
        except Exception as error:
            store.raise_record_error(connection, error)
            raise
        self._may_end = True
        try:
            self._end_transaction()
        except Exception as error:
            is_cut = notices is not None and notices.was_cut
            store.raise_commit_error(error, is_cut=is_cut)
            raise
        self._end()

    @abstractmethod
    def _may_share_commit(self) -> bool:
        """Check whether COMMIT may be sent with the record, if the driver can."""

    def _has_written(self) -> bool:
        if not self._store.is_sqlite:
            return bool(self._store.run(self.connection, HAS_WRITTEN).rows[0][0])
        return self._store.total_changes(self.connection) != self._changes_before

    @abstractmethod
    def _prepare_commit(self) -> None:
        """Write what the handler has left to write. Raises if it may not be committed."""

    @abstractmethod
    def _end_transaction(self) -> None:
        """Commit; after ``finish_and_commit``, only note the end."""

    @abstractmethod
    def _end(self) -> None:
        """Let the session go: the transaction has ended."""

    @abstractmethod
    def undo(self) -> None:
        """Roll back. Never raises. Idempotent."""

    def leave(self) -> None:
        """Let the next request have the connection that this one does not need."""
        if self._on_leave is not None:
            self._on_leave()

    def _free(self) -> None:
        if self.has_ended:
            free, self._on_free = self._on_free, None
            if free is not None:
                free()
