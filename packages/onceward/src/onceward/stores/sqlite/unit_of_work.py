"""Transactions on SQLite: of one guarded request or job, and of several in one batch.

They begin with their first statement.
"""

import re
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from onceward.errors import NoTransactionError, StoreUnavailableError, SupersededError
from onceward.ports import Found, KeyClaimed, Params, Row
from onceward.records import AuditEvent, Record, RecordId
from onceward.stores.base import BaseUnit, ItemUnit, ended
from onceward.stores.errors import SUPERSEDED, is_sqlite_outage
from onceward.stores.rows import audit_values, record_of, record_values, rows_of, to_text, to_values
from onceward.stores.sqlite.group_commit import Writer
from onceward.stores.statements import refuse_transaction_control
from onceward_protocol.storage.sql_files import Queries

_INSERTS_VALUES: Final = re.compile(
    r"\s*INSERT\s+(OR\s+\w+\s+)?INTO\s+\w+\s*(\([^)]*\))?\s*VALUES\b", re.IGNORECASE
)
_SELECTS: Final = re.compile(r"\bSELECT\b", re.IGNORECASE)


_SET: Final = "SAVEPOINT onceward_item"
_RELEASE: Final = "RELEASE onceward_item"
_ROLL_BACK: Final = "ROLLBACK TO onceward_item"
# So many requests run before a chunk ends early.
_LEAST_ITEMS: Final = 4


class SqliteTransaction:
    """The ``Transaction`` of a handler on SQLite."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        """``run`` runs a function in the transaction of a unit, or in the part of one request."""
        self._run = run

    def end(self) -> None:
        """Refuse further statements: the transaction goes on with another request."""
        self._run = _refuse

    async def execute(self, sql: str, params: Params = None) -> int:
        quick, values = is_quick(sql), to_values(params)
        changed: int = await self._run(lambda db: db.execute(sql, values).rowcount, is_quick=quick)
        return max(changed, 0)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        quick, values = is_quick(sql), to_values(params)
        rows: list[Row] = await self._run(
            lambda db: rows_of(db.execute(sql, values)), is_quick=quick
        )
        return rows

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        rows = await self.fetch_all(sql, params)
        return rows[0] if rows else None


async def _refuse(_work: object, *, is_quick: bool) -> None:  # noqa: ARG001
    raise ended()


class SqliteUnit(BaseUnit):
    """Takes the write turn with the first statement and releases it in any case."""

    __slots__ = (
        "_changes_before",
        "_claimed_at",
        "_ended",
        "_has_turn",
        "_is_chunk",
        "_record_id",
        "_sql",
        "_transaction",
        "_waits",
        "superseded",
        "writer",
    )
    is_lost = False

    def __init__(
        self,
        writer: Writer,
        sql: Queries,
        record_id: RecordId | None,
        claimed_at: str,
        *,
        is_chunk: bool = False,
        waits: bool = True,
    ) -> None:
        """With ``is_chunk``, it is for several requests, and waits behind single ones.

        Without ``waits`` it waits for requests of this process, but not for other processes.
        """
        self._waits = waits
        self._is_chunk = is_chunk
        self.writer = writer
        self._sql = sql
        self._record_id = record_id
        self._claimed_at = claimed_at
        self._has_turn = False
        self._ended = False
        # Rows that the connection has changed since it was opened, without those of this unit.
        self._changes_before = 0
        self._transaction: SqliteTransaction | None = None
        self.superseded = False

    @property
    def transaction(self) -> SqliteTransaction:
        if self._transaction is None:
            self._transaction = SqliteTransaction(self.run)
        return self._transaction

    @property
    def statements(self) -> SqliteTransaction:
        """The same transaction."""
        return self.transaction

    async def has_written(self) -> bool:
        if not self._has_turn or self._ended:
            return False
        changes: int = await self.run(lambda db: db.total_changes)
        return changes != self._changes_before

    async def run(self, work: Any, *, is_quick: bool = False) -> Any:
        """Run a function in the transaction; begin it first if necessary."""
        if self._ended:
            raise ended()
        if self.superseded:
            raise SupersededError(SUPERSEDED)
        try:
            if self._has_turn:
                return await self.writer.run(work, is_quick=is_quick)
            return await self._begin(work, is_quick=is_quick)
        except sqlite3.OperationalError as error:
            if is_sqlite_outage(error):
                raise StoreUnavailableError(f"SQLite: {error}") from error
            raise

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        await self.commit_all(
            () if record is None else (record,), () if audit is None else (audit,)
        )

    async def commit_all(self, records: Sequence[Record], audits: Sequence[AuditEvent]) -> None:
        """Write records and audit events and commit; may share the commit with other requests."""

        def write_records(db: sqlite3.Connection) -> None:
            sql = self._sql
            for record in records:
                if db.execute(sql["save_record"], record_values(record)).rowcount == 0:
                    self.superseded = True
                    raise SupersededError(SUPERSEDED)
            for audit in audits:
                db.execute(sql["save_audit_event"], audit_values(audit, to_text(audit.created_at)))

        if self._ended:
            raise ended()
        try:
            if not self._has_turn:
                await self._begin(_nothing, is_quick=True)
        except sqlite3.Error as error:
            await self.rollback()
            raise StoreUnavailableError(f"SQLite could not commit: {error}") from error
        except BaseException:
            await self.rollback()
            raise
        # From here on the writer ends the transaction, even if this task is cancelled: a rollback
        # here would come after the turn was passed on, and undo another request.
        self._end()
        try:
            await self.writer.commit(write_records, is_chunk=self._is_chunk)
        except sqlite3.Error as error:
            raise StoreUnavailableError(f"SQLite could not commit: {error}") from error

    async def rollback(self) -> None:
        if not self._ended:
            self._end()
            if self._has_turn:
                await self.writer.rollback()

    def _end(self) -> None:
        self._ended = True
        # Breaks the reference cycle between unit and transaction.
        self._transaction = None

    async def _begin(self, work: Any, *, is_quick: bool) -> Any:
        def check_and_work(db: sqlite3.Connection) -> Any:
            self._changes_before = db.total_changes
            if self._record_id is not None and exists(
                db, self._sql, self._record_id, self._claimed_at
            ):
                self.superseded = True
                raise SupersededError(SUPERSEDED)
            return work(db)

        await self.writer.take_turn(is_chunk=self._is_chunk)
        self._has_turn = True
        return await self.writer.begin(check_and_work, is_quick=is_quick, waits=self._waits)


@lru_cache(maxsize=1024)
def is_quick(sql: str) -> bool:
    """Check whether a handler's statement only inserts given values, which takes microseconds.

    Raises ``UsageError`` for one that begins or ends the transaction.
    """
    refuse_transaction_control(sql)
    return _INSERTS_VALUES.match(sql) is not None and _SELECTS.search(sql) is None


def _nothing(_db: sqlite3.Connection) -> None:
    return


def find_any(db: sqlite3.Connection, sql: Queries, record_id: RecordId) -> Record | None:
    """Return the record of a key, expired or not."""
    row = db.execute(sql["find_any_record"], record_id).fetchone()
    return None if row is None else record_of(record_id, row)


def exists(db: sqlite3.Connection, sql: Queries, record_id: RecordId, instant: str) -> bool:
    """Check whether a key has a record that is not expired."""
    return db.execute(sql["live_record_exists"], (*record_id, instant)).fetchone() is not None


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
        return self._items >= _LEAST_ITEMS and self._unit.writer.has_waiting_single

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
        await self._unit.commit_all(records, audits)

    async def rollback(self) -> None:
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
