"""One guarded request's transaction on PostgreSQL, open since the claim."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import asyncpg

from holdfast.core.idempotency_record import AuditEvent, Record
from holdfast.errors import CommitUnknownError, NoTransactionError, StoreUnavailableError
from holdfast.ports import Params, Row
from holdfast.stores.postgres.errors import (
    OUTAGES,
    SPOILT,
    raise_not_committed,
    raise_told,
)
from holdfast.stores.postgres.params import positional
from holdfast.stores.postgres.rows import audit_values, finish_statement, finish_values, rows_of
from holdfast.stores.sql_loader import load_queries

if TYPE_CHECKING:
    from holdfast.stores.postgres.store import PostgresStore

__all__ = ["PostgresTransaction", "PostgresUnit", "SharedPostgresTransaction"]

_SQL: Final = load_queries("holdfast.stores.postgres")

# Above this a body is sent as a parameter, in a round trip of its own, not as twice its size in
# hex.
_INLINE_BODY_BYTES: Final = 16 * 1024


class _Ended:
    """Stands where the connection was: by now it may serve another request."""

    def __getattr__(self, _name: str) -> Any:
        raise NoTransactionError("the transaction has ended: it was committed or rolled back")


_ENDED: Final = _Ended()


class PostgresTransaction:
    """What a handler writes in on PostgreSQL. ``connection`` is asyncpg's own, for the rest."""

    def __init__(self, connection: Any) -> None:
        """Wrap the connection the unit holds."""
        self.connection = connection

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        text, values = positional(sql, params)
        try:
            return rows_of(await self.connection.execute(text, *values))
        except OUTAGES as error:
            raise_told(error)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        text, values = positional(sql, params)
        try:
            return [dict(row) for row in await self.connection.fetch(text, *values)]
        except OUTAGES as error:
            raise_told(error)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        text, values = positional(sql, params)
        try:
            row = await self.connection.fetchrow(text, *values)
        except OUTAGES as error:
            raise_told(error)
        return None if row is None else dict(row)


class SharedPostgresTransaction(PostgresTransaction):
    """One whose connection is also kept awake meanwhile: asyncpg takes one call at a time."""

    def __init__(self, connection: Any) -> None:
        """Wrap the connection the unit holds."""
        super().__init__(connection)
        self.turn = asyncio.Lock()

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        async with self.turn:
            return await super().execute(sql, params)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        async with self.turn:
            return await super().fetch_all(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        async with self.turn:
            return await super().fetch_one(sql, params)


class PostgresUnit:
    """One guarded request's transaction, open since the claim."""

    superseded = False

    def __init__(
        self, store: "PostgresStore", connection: Any, *, is_touched: bool = False
    ) -> None:
        """Own the connection until the end."""
        self._store = store
        self._connection = connection
        self._ended = False
        self._is_ending = False
        kind = SharedPostgresTransaction if is_touched else PostgresTransaction
        self.transaction: PostgresTransaction = kind(connection)

    @property
    def statements(self) -> PostgresTransaction:
        """The same."""
        return self.transaction

    async def keep_alive(self) -> None:
        """Keep the transaction from ending as left alone; not while a statement runs in it."""
        shared = self.transaction
        if (
            not isinstance(shared, SharedPostgresTransaction)
            or self._is_ending
            or shared.turn.locked()
        ):
            return
        async with shared.turn:
            with suppress(Exception):  # whoever uses it next finds out
                await shared.connection.execute("SELECT 1")

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event and commit, in one round trip."""
        if self._ended:  # the connection may serve another request by now
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        connection = self._connection
        await self._be_alone()
        try:
            if record is None:
                if audit is not None:
                    await connection.execute(_SQL["save_audit_event"], *audit_values(audit))
                tag = await connection.execute("COMMIT")
            elif len(record.body) <= _INLINE_BODY_BYTES:
                tag = await connection.execute(f"{finish_statement(record, audit)};COMMIT")
            else:
                await connection.execute(_SQL["finish"], *finish_values(record, audit))
                tag = await connection.execute("COMMIT")
        except asyncpg.PostgresError as error:
            await self._fail()
            raise_not_committed(error)
        except OUTAGES as error:
            await self._fail()
            raise CommitUnknownError(str(error)) from error
        except BaseException:
            await self._fail()
            raise
        self._ended = True
        self.transaction.connection = _ENDED
        self._store.release(connection)
        if tag == "ROLLBACK":
            raise StoreUnavailableError(SPOILT)

    async def rollback(self) -> None:
        """Undo everything."""
        if not self._ended:
            await self._fail()

    async def _be_alone(self) -> None:
        """Let a touch that is under way end, and no other begin."""
        self._is_ending = True
        if isinstance(self.transaction, SharedPostgresTransaction):
            async with self.transaction.turn:
                pass

    async def _fail(self) -> None:
        self._ended = True
        if not self._is_ending:
            await self._be_alone()
        self.transaction.connection = _ENDED
        await self._store.undo(self._connection)
