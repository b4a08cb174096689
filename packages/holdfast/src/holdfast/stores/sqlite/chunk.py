"""A transaction for several requests of one batch on SQLite, each in a savepoint."""

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Final

from holdfast.core.idempotency_record import AuditEvent, Record, RecordId
from holdfast.errors import NoTransactionError, StoreUnavailableError
from holdfast.ports import Found, KeyClaimed
from holdfast.stores.sql_loader import Queries
from holdfast.stores.sqlite.rows import find_any
from holdfast.stores.sqlite.unit_of_work import SqliteTransaction, SqliteUnit

__all__ = ["SqliteChunk", "SqliteItemUnit"]

_SET: Final = "SAVEPOINT holdfast_item"
_RELEASE: Final = "RELEASE holdfast_item"
_ROLL_BACK: Final = "ROLLBACK TO holdfast_item"


class SqliteChunk:
    """Holds the write turn from the first claim on, so no other request can commit its keys."""

    # Nothing that a handler can set lasts from one savepoint to the next.
    must_end = False

    def __init__(
        self,
        unit: SqliteUnit,
        sql: Queries,
        probe: Callable[[RecordId], Awaitable[Record | None]],
    ) -> None:
        """``probe`` looks a key up outside the transaction."""
        self._unit = unit
        self._sql = sql
        self._probe = probe
        # A savepoint was set for the next item, or is left from a rollback to it.
        self._has_savepoint = False
        self.is_broken = False

    async def claim(
        self, record_ids: Sequence[RecordId], now: datetime
    ) -> Sequence[KeyClaimed | Found]:
        """Look the keys up; those without a record again in the transaction.

        Only one process writes at a time, so none of them is held by another.
        """
        claims: list[KeyClaimed | Found] = []
        # Without the write turn first: after a lost response, all keys have records.
        free: list[int] = []
        for place, record_id in enumerate(record_ids):
            record = await self._probe(record_id)
            if record is not None and record.expires_at > now:
                claims.append(Found(record))
            else:
                free.append(place)
                claims.append(KeyClaimed())
        if free:
            wanted = [record_ids[place] for place in free]

            def find(db: sqlite3.Connection) -> list[Record | None]:
                return [find_any(db, self._sql, record_id) for record_id in wanted]

            found: list[Record | None] = await self._unit.run(find, is_quick=True)
            for place, record in zip(free, found, strict=True):
                if record is not None:
                    is_live = record.expires_at > now
                    claims[place] = Found(record) if is_live else KeyClaimed(after_expiry=True)
        return claims

    async def statements(self) -> SqliteTransaction:
        """Return the transaction. The savepoint for the next item may be set already."""
        return SqliteTransaction(self)

    async def begin_item(self) -> "SqliteItemUnit":
        """Set a savepoint, unless there is one already."""
        if not self._has_savepoint:
            await self._unit.run(_execute(_SET), is_quick=True)
        self._has_savepoint = False
        return SqliteItemUnit(self)

    async def commit(self, records: Sequence[Record], audits: Sequence[AuditEvent]) -> None:
        """Write records and audit events, and commit."""
        await self._unit.commit_all(records, audits)

    async def rollback(self) -> None:
        """Roll everything back and pass the turn on."""
        await self._unit.rollback()

    async def run(self, work: Any, *, is_quick: bool = False) -> Any:
        """Run a function in the transaction."""
        return await self._unit.run(work, is_quick=is_quick)

    async def end_item(self, *, is_kept: bool) -> None:
        """Release the savepoint, or roll back to it; there is one for the next item then.

        If that fails, the chunk is broken.
        """
        statements = (_RELEASE, _SET) if is_kept else (_ROLL_BACK,)
        try:
            await self._unit.run(_execute(*statements), is_quick=True)
            self._has_savepoint = True
        except (sqlite3.Error, StoreUnavailableError, NoTransactionError):
            self.is_broken = True


class SqliteItemUnit:
    """The part of one request: from its savepoint to the release of it, or the rollback."""

    __slots__ = ("_chunk", "_ended", "_transaction", "superseded")

    def __init__(self, chunk: SqliteChunk) -> None:
        self._chunk = chunk
        self._ended = False
        self._transaction: SqliteTransaction | None = None
        self.superseded = False

    @property
    def transaction(self) -> SqliteTransaction:
        """The handler's transaction."""
        if self._transaction is None:
            self._transaction = SqliteTransaction(self)
        return self._transaction

    @property
    def statements(self) -> SqliteTransaction:
        """The same transaction."""
        return self.transaction

    async def has_written(self) -> bool:
        """Return True: it is not known."""
        return True

    async def keep_alive(self) -> None:
        """Do nothing: SQLite does not end idle transactions."""

    async def run(self, work: Any, *, is_quick: bool = False) -> Any:
        """Run a function in the transaction."""
        if self._ended:
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        return await self._chunk.run(work, is_quick=is_quick)

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:  # noqa: ARG002
        """Release the savepoint. The chunk writes the record and commits."""
        self._end()
        await self._chunk.end_item(is_kept=True)

    async def rollback(self) -> None:
        """Roll back to the savepoint."""
        if not self._ended:
            self._end()
            await self._chunk.end_item(is_kept=False)

    def _end(self) -> None:
        self._ended = True
        # Breaks the reference cycle between unit and transaction.
        self._transaction = None


def _execute(*statements: str) -> Callable[[sqlite3.Connection], Any]:
    def work(db: sqlite3.Connection) -> None:
        for sql in statements:
            db.execute(sql)

    return work
