"""The transaction of one guarded request or job on PostgreSQL."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from onceward.core.idempotency_record import AuditEvent, Record
from onceward.errors import StoreUnavailableError
from onceward.ports import Params, Row, TransactionT_co
from onceward.stores.base import BaseUnit, ended
from onceward.stores.errors import (
    aborted,
    is_read_only,
    raise_commit_error,
    raise_unstorable,
    unavailable,
)
from onceward.stores.postgres.connections import sending_commit
from onceward.stores.postgres.driver import NEVER, Driver
from onceward.stores.postgres.params import finish_statement, positional, rows_changed
from onceward.stores.postgres.session import UsedSession
from onceward.stores.rows import HAS_WRITTEN, audit_values, finish_values

if TYPE_CHECKING:
    from onceward.stores.postgres.store import BasePostgresStore

__all__ = ["PostgresTransaction", "PostgresUnit", "SharedPostgresTransaction"]

T = TypeVar("T")

# Larger bodies are sent as a parameter, in a separate round trip, not in hexadecimal digits.
_INLINE_BODY_BYTES: Final = 16 * 1024


class _Ended:
    """Replaces the connection of an ended unit, which may serve another request by now."""

    def __getattr__(self, _name: str) -> Any:
        raise ended()


_ENDED: Final = _Ended()


class PostgresTransaction:
    """The ``Transaction`` of a handler. ``connection`` is the driver's, for everything else."""

    def __init__(self, connection: Any, driver: Driver) -> None:
        self._on = connection
        self._driver = driver
        # The driver's connection, for Onceward.
        self.raw = driver.raw(connection)
        self.used = UsedSession()

    @property
    def connection(self) -> Any:
        """The driver's connection. Raises ``NoTransactionError`` after the end when it is used."""
        self.used.note_raw()
        return self.raw

    def end(self) -> None:
        """Refuse further statements: the connection may serve another request by now."""
        self._on = self.raw = _ENDED

    def execute(self, sql: str, params: Params = None) -> Coroutine[Any, Any, int]:
        """Run a statement and return how many rows it changed."""
        return self._run("execute", sql, params, rows_changed)

    def fetch_all(self, sql: str, params: Params = None) -> Coroutine[Any, Any, Sequence[Row]]:
        """Return all rows of a query."""
        return self._run("fetch", sql, params, _dicts)

    def fetch_one(self, sql: str, params: Params = None) -> Coroutine[Any, Any, Row | None]:
        """Return the first row of a query, or None."""
        return self._run("fetchrow", sql, params, _dict_or_none)

    async def _run(self, method: str, sql: str, params: Params, convert: Callable[[Any], T]) -> T:
        text, values = positional(sql, params)
        self.used.note_statement(sql)
        on, driver = self._on, self._driver
        try:
            on.deadline = driver.time.now + driver.deadlines.statement_seconds
            return convert(await getattr(on, method)(text, *values))
        except driver.outages as error:
            if is_read_only(error):
                on.is_read_only = True
            driver.translate_error(error)
        except driver.errors as error:
            self.used.note_failure()
            raise_unstorable(error)
            raise
        finally:
            on.deadline = NEVER


def _dicts(rows: Sequence[Any]) -> Sequence[Row]:
    return [dict(row) for row in rows]


def _dict_or_none(row: Any) -> Row | None:
    return None if row is None else dict(row)


class SharedPostgresTransaction(PostgresTransaction):
    """Shares its connection with ``keep_alive``: asyncpg runs one statement at a time."""

    def __init__(self, connection: Any, driver: Driver) -> None:
        super().__init__(connection, driver)
        self.lock = asyncio.Lock()

    async def _run(self, method: str, sql: str, params: Params, convert: Callable[[Any], T]) -> T:
        async with self.lock:
            return await super()._run(method, sql, params, convert)


class PostgresUnit(BaseUnit, Generic[TransactionT_co]):
    """Owns a connection with an open transaction until commit or rollback."""

    can_commit_after = True

    def __init__(
        self, store: "BasePostgresStore[Any]", connection: Any, *, is_kept_alive: bool = False
    ) -> None:
        self._store = store
        self._connections = store.connections
        # The connection, for statements of the store.
        self.connection = connection
        self._ended = False
        self._is_ending = False
        self.is_sync = store.driver.is_sync
        kind = SharedPostgresTransaction if is_kept_alive else PostgresTransaction
        self.statements: PostgresTransaction = kind(connection, store.driver)
        # What the handler gets. It depends on the driver.
        self.transaction: TransactionT_co = store.driver.handler_transaction(self.statements)

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost before the end of the transaction."""
        return not self._ended and bool(self.connection.is_closed())

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a statement on the driver's connection failed with it."""
        driver = self._store.driver
        is_of_driver = isinstance(error, (*driver.outages, *driver.errors))
        return unavailable(error) if is_of_driver and self.is_lost else None

    async def has_written(self) -> bool:
        """Return whether the handler has written."""
        row = await self.statements.fetch_one(HAS_WRITTEN)
        return row is None or bool(row["written"])

    async def keep_alive(self) -> None:
        """Run a query so that the transaction is not idle, unless a statement is running."""
        shared = self.statements
        if (
            not isinstance(shared, SharedPostgresTransaction)
            or self._is_ending
            or shared.lock.locked()
        ):
            return
        async with shared.lock:
            with suppress(Exception):  # the next statement fails
                await self.connection.execute("SELECT 1")

    def commit(self, record: Record | None, audit: AuditEvent | None) -> Coroutine[Any, Any, None]:
        """Write record and audit event and commit, in one round trip."""
        return self._commit(record, audit, None)

    async def commit_after(self, statement: str) -> None:
        """Run a statement without parameters and commit, in one round trip."""
        await self._commit(None, None, statement)

    async def _commit(
        self, record: Record | None, audit: AuditEvent | None, last_statement: str | None
    ) -> None:
        if self._ended:  # the connection may serve another request by now
            raise ended()
        if isinstance(self.statements, SharedPostgresTransaction):
            await self._stop_keep_alive()
        connections, connection, used = self._connections, self.connection, self.statements.used
        driver = connections.driver
        try:
            message = self._last_message(record, audit, last_statement)
            if message is None:
                await self._save_separately(record, audit)
                message = self._last_message(None, None, None)
            started = connections.begin_commit()
            with sending_commit(connections, connection) as commit:
                tag = await connection.execute(message)
        except (*driver.errors, *driver.outages) as error:
            await self._fail()
            raise_commit_error(
                error, driver.outages, is_cleaned=used.is_used, is_cut=connection.was_cut
            )
        except BaseException:
            connection.terminate()
            await self._fail()
            raise
        self._ended = True
        self.statements.end()
        if used.may_have_names or used.is_raw:
            await self._release(tag)
        else:
            connections.release(connection)
        if tag == "ROLLBACK":  # PostgreSQL rolls an aborted transaction back, without an error
            raise aborted()
        commit.raise_if_unknown()
        if started and record is not None:  # so it has written WAL
            connections.confirm_commit(started)

    def _last_message(
        self, record: Record | None, audit: AuditEvent | None, last_statement: str | None
    ) -> str | None:
        """Return the message that commits; None if something must be sent before it."""
        used = self.statements.used
        if last_statement is not None:
            return used.ending(f"{last_statement};COMMIT")
        if record is None:
            # COMMIT of an aborted transaction is no error; a statement before it is.
            end = "SELECT 1;COMMIT" if used.is_used else "COMMIT"
            return used.ending(end) if audit is None else None
        if len(record.body) > _INLINE_BODY_BYTES:
            return None
        finish = finish_statement(self._store.finish_function, record, audit)
        return used.ending(f"{finish};COMMIT")

    async def _save_separately(self, record: Record | None, audit: AuditEvent | None) -> None:
        sql, connection = self._store.sql, self.connection
        if record is not None:
            await connection.execute(sql["finish"], *finish_values(record, audit))
        elif audit is not None:
            await connection.execute(
                sql["save_audit_event"], *audit_values(audit, audit.created_at)
            )

    async def _release(self, tag: str) -> None:
        """Return the connection after COMMIT; close it if it cannot be cleaned."""
        connection, used, connections = self.connection, self.statements.used, self._connections
        try:
            if used.is_used:
                await used.drop_names(connection, tag)
            if used.is_raw and not connections.driver.restore(connection):
                connection.terminate()
        except BaseException as error:
            connection.terminate()
            if not isinstance(error, Exception):
                raise
        finally:
            connections.release(connection)

    async def rollback(self) -> None:
        """Roll back."""
        if not self._ended:
            await self._fail()

    async def _stop_keep_alive(self) -> None:
        """Wait for a ``keep_alive`` under way, and refuse further ones."""
        is_first, self._is_ending = not self._is_ending, True
        if is_first and isinstance(self.statements, SharedPostgresTransaction):
            async with self.statements.lock:
                pass

    async def _fail(self) -> None:
        self._ended = True
        await self._stop_keep_alive()
        self.statements.end()
        await self._connections.undo(self.connection, self.statements.used)
