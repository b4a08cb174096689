"""A transaction for several requests of one batch on SQLite, each in a savepoint."""

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Final

from onceward.core.idempotency_record import AuditEvent, Record, RecordId
from onceward.errors import NoTransactionError, StoreUnavailableError
from onceward.ports import Found, KeyClaimed
from onceward.stores.base import ItemUnit
from onceward.stores.sqlite.unit_of_work import SqliteTransaction, SqliteUnit, find_any
from onceward_protocol.storage.sql_files import Queries

__all__ = ["SqliteChunk"]

_SET: Final = "SAVEPOINT onceward_item"
_RELEASE: Final = "RELEASE onceward_item"
_ROLL_BACK: Final = "ROLLBACK TO onceward_item"
# So many requests run before a chunk ends early.
_LEAST_ITEMS: Final = 4


class SqliteChunk:
    """Holds the write turn from the first claim on, so no other request can commit its keys.

    A savepoint is released, and the next one set, with the first statement of the next request.
    """

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
        # What comes before the first statement of the next item.
        self._before: tuple[str, ...] = (_SET,)
        # A statement of the current item has run, or may have.
        self._is_touched = False
        self._items = 0
        self.is_broken = False
        self.needs_savepoints = False

    @property
    def must_end(self) -> bool:
        """True if a single request waits for the write turn, and some of this chunk have run."""
        return self._items >= _LEAST_ITEMS and self._unit.is_awaited

    async def claim(
        self, record_ids: Sequence[RecordId], now: datetime
    ) -> Sequence[KeyClaimed | Found]:
        """Look the keys up; from the first without a record on, in the transaction.

        Only one process writes at a time, so none of them is held by another.
        """
        claims: list[KeyClaimed | Found] = []
        # Without the write turn first: after a lost response, all keys have records.
        for record_id in record_ids:
            record = await self._probe(record_id)
            if record is None or record.expires_at <= now:
                break
            claims.append(Found(record))
        first_free = len(claims)
        if first_free < len(record_ids):
            wanted = record_ids[first_free:]

            def find(db: sqlite3.Connection) -> list[Record | None]:
                return [find_any(db, self._sql, record_id) for record_id in wanted]

            found: list[Record | None] = await self._unit.run(find, is_quick=True)
            for record in found:
                if record is None:
                    claims.append(KeyClaimed())
                else:
                    is_live = record.expires_at > now
                    claims.append(Found(record) if is_live else KeyClaimed(after_expiry=True))
        return claims

    async def statements(self) -> SqliteTransaction:
        """Return the transaction. The savepoint of the last item may not be released yet."""
        return SqliteTransaction(self._unit.run)

    async def begin_item(self) -> ItemUnit:
        self._is_touched = False
        self._items += 1
        transaction = SqliteTransaction(self.run_in_item)
        return ItemUnit(self.end_item, transaction, transaction)

    async def commit(self, records: Sequence[Record], audits: Sequence[AuditEvent]) -> None:
        """Write records and audit events, and commit."""
        await self._unit.commit_all(records, audits)

    async def rollback(self) -> None:
        """Roll everything back and pass the turn on."""
        await self._unit.rollback()

    async def run_in_item(self, work: Any, *, is_quick: bool = False) -> Any:
        """Run a function in the savepoint of the current item."""
        if self._is_touched:
            return await self._unit.run(work, is_quick=is_quick)
        self._is_touched = True

        def work_in_savepoint(db: sqlite3.Connection) -> Any:
            try:
                for sql in self._before:
                    db.execute(sql)
            except sqlite3.Error:
                self.is_broken = True
                raise
            return work(db)

        return await self._unit.run(work_in_savepoint, is_quick=is_quick)

    async def end_item(self, *, is_kept: bool) -> None:
        """Keep the savepoint until the next one is set, or roll back to it.

        If that fails, the chunk is broken.
        """
        if not self._is_touched:  # nothing to keep or to undo
            return
        self._is_touched = False
        if is_kept:
            self._before = (_RELEASE, _SET)
            return
        try:
            await self._unit.run(_roll_back, is_quick=True)
            self._before = ()
        except (sqlite3.Error, StoreUnavailableError, NoTransactionError):
            self.is_broken = True


def _roll_back(db: sqlite3.Connection) -> None:
    db.execute(_ROLL_BACK)
