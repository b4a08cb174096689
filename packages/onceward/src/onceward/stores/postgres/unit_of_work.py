"""The transaction of one guarded request or job on PostgreSQL."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Generic, NoReturn, Protocol

from onceward.core.idempotency_record import AuditEvent, Record
from onceward.errors import CommitUnknownError, NoTransactionError, StoreUnavailableError
from onceward.ports import Params, Row, TransactionT_co
from onceward.stores.base import BaseUnit
from onceward.stores.errors import (
    aborted,
    is_read_only,
    raise_commit_error,
    raise_unstorable,
    unavailable,
)
from onceward.stores.postgres.driver import NEVER, Driver
from onceward.stores.postgres.params import finish_statement, positional, rows_changed
from onceward.stores.postgres.session import UsedSession
from onceward.stores.rows import HAS_WRITTEN, audit_values, finish_values
from onceward_protocol.storage.sql_files import Queries

__all__ = ["PostgresTransaction", "PostgresUnit", "SharedPostgresTransaction"]

# Larger bodies are sent as a parameter, in a separate round trip, not in hexadecimal digits.
_INLINE_BODY_BYTES: Final = 16 * 1024


class _Connections(Protocol):
    """Takes connections back; implemented by ``PostgresStore``."""

    sql: Queries
    finish_function: str
    driver: Driver

    def begin_commit(self) -> int:
        """Return a number for a commit that begins now; 0 if it waits for no standby."""

    def confirm_commit(self, started: int) -> None:
        """Note that a commit that began at ``started`` wrote WAL and ended without a warning."""

    def is_outdated(self, connection: Any) -> bool:
        """Check whether another server was reached since the connection was opened."""

    def abandon(self, connection: Any) -> None:
        """Note a connection that was cut during COMMIT: the server still works on it."""

    def release(self, connection: Any) -> None:
        """Return a connection to the pool."""

    async def undo(self, connection: Any, used: UsedSession | None = None) -> None:
        """Roll back, clean the session and return a connection to the pool."""


class _Ended:
    """Replaces the connection of an ended unit, which may serve another request by now."""

    def __getattr__(self, _name: str) -> Any:
        raise NoTransactionError("the transaction has ended: it was committed or rolled back")


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

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        text, values = positional(sql, params)
        self.used.note_statement(sql)
        on, driver = self._on, self._driver
        try:
            on.deadline = driver.time.now + driver.deadlines.statement_seconds
            return rows_changed(await on.execute(text, *values))
        except driver.outages as error:
            _translate(on, driver, error)
        except driver.errors as error:
            self.used.note_failure()
            raise_unstorable(error)
            raise
        finally:
            on.deadline = NEVER

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        text, values = positional(sql, params)
        self.used.note_statement(sql)
        on, driver = self._on, self._driver
        try:
            on.deadline = driver.time.now + driver.deadlines.statement_seconds
            return [dict(row) for row in await on.fetch(text, *values)]
        except driver.outages as error:
            _translate(on, driver, error)
        except driver.errors as error:
            self.used.note_failure()
            raise_unstorable(error)
            raise
        finally:
            on.deadline = NEVER

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        text, values = positional(sql, params)
        self.used.note_statement(sql)
        on, driver = self._on, self._driver
        try:
            on.deadline = driver.time.now + driver.deadlines.statement_seconds
            row = await on.fetchrow(text, *values)
        except driver.outages as error:
            _translate(on, driver, error)
        except driver.errors as error:
            self.used.note_failure()
            raise_unstorable(error)
            raise
        finally:
            on.deadline = NEVER
        return None if row is None else dict(row)


def _translate(connection: Any, driver: Driver, error: BaseException) -> NoReturn:
    """Raise an outage as ``StoreUnavailableError``; note a server that became read-only."""
    if is_read_only(error):
        connection.is_read_only = True
    driver.translate_error(error)


class SharedPostgresTransaction(PostgresTransaction):
    """Shares its connection with ``keep_alive``: asyncpg runs one statement at a time."""

    def __init__(self, connection: Any, driver: Driver) -> None:
        super().__init__(connection, driver)
        self.lock = asyncio.Lock()

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        async with self.lock:
            return await super().execute(sql, params)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        async with self.lock:
            return await super().fetch_all(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        async with self.lock:
            return await super().fetch_one(sql, params)


class PostgresUnit(BaseUnit, Generic[TransactionT_co]):
    """Owns a connection with an open transaction until commit or rollback."""

    can_commit_after = True

    def __init__(
        self, store: _Connections, connection: Any, *, is_kept_alive: bool = False
    ) -> None:
        self._store = store
        self._connection = connection
        self._ended = False
        self._is_ending = False
        self.is_sync = store.driver.is_sync
        kind = SharedPostgresTransaction if is_kept_alive else PostgresTransaction
        self.statements: PostgresTransaction = kind(connection, store.driver)
        self._transaction: TransactionT_co = store.driver.handler_transaction(self.statements)

    @property
    def transaction(self) -> TransactionT_co:
        """What the handler gets. It depends on the driver."""
        return self._transaction

    @property
    def connection(self) -> Any:
        """The connection, for statements of the store."""
        return self._connection

    @property
    def is_lost(self) -> bool:
        """Whether the connection was lost before the end of the transaction."""
        return not self._ended and bool(self._connection.is_closed())

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
                await self._connection.execute("SELECT 1")

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
            raise NoTransactionError("the transaction has ended: it was committed or rolled back")
        self._is_ending = True
        if isinstance(self.statements, SharedPostgresTransaction):
            await self._stop_keep_alive()
        store, connection, used = self._store, self._connection, self.statements.used
        tag, started = await self._send_commit(record, audit, last_statement)
        self._ended = True
        self.statements.end()
        is_outdated = store.is_outdated(connection)
        if used.may_have_names or used.is_raw:
            await self._release(tag)
        else:
            store.release(connection)
        if tag == "ROLLBACK":  # PostgreSQL rolls an aborted transaction back, without an error
            raise aborted()
        if is_outdated or connection.has_warned:
            raise CommitUnknownError("the commit may not be on the server that was promoted")
        if started and record is not None:  # so it has written WAL
            store.confirm_commit(started)

    async def _send_commit(
        self, record: Record | None, audit: AuditEvent | None, last_statement: str | None
    ) -> tuple[str, int]:
        """Send the last message; return its command tag and the number of the commit."""
        store, driver, connection = self._store, self._store.driver, self._connection
        is_sent = False
        try:
            message = self._last_message(record, audit, last_statement)
            if message is None:
                await self._save_separately(record, audit)
                message = self._last_message(None, None, None)
            started = store.begin_commit()
            connection.has_warned, is_sent = False, True
            connection.deadline = driver.time.now + driver.deadlines.commit_seconds
            return await connection.execute(message), started
        except driver.errors as error:
            self._note_cut()
            await self._fail()
            is_cleaned = self.statements.used.is_used
            raise_commit_error(
                error, driver.outages, is_cleaned=is_cleaned, is_cut=connection.was_cut
            )
        except driver.outages as error:
            self._note_cut()
            await self._fail()
            raise CommitUnknownError(str(error), is_cut=connection.was_cut) from error
        except BaseException:
            # Cancelled while COMMIT may wait for a standby. A request to cancel would end the wait.
            connection.terminate()
            if is_sent:
                store.abandon(connection)
            await self._fail()
            raise
        finally:
            connection.deadline = NEVER

    def _note_cut(self) -> None:
        if self._connection.was_cut:
            self._store.abandon(self._connection)

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
        sql, connection = self._store.sql, self._connection
        if record is not None:
            await connection.execute(sql["finish"], *finish_values(record, audit))
        elif audit is not None:
            await connection.execute(
                sql["save_audit_event"], *audit_values(audit, audit.created_at)
            )

    async def _release(self, tag: str) -> None:
        """Return the connection after COMMIT; close it if it cannot be cleaned."""
        connection, used, store = self._connection, self.statements.used, self._store
        try:
            if used.is_used:
                await used.drop_names(connection, tag)
            if used.is_raw and not store.driver.restore(connection):
                connection.terminate()
        except BaseException as error:
            connection.terminate()
            if not isinstance(error, Exception):
                raise
        finally:
            store.release(connection)

    async def rollback(self) -> None:
        """Roll back."""
        if not self._ended:
            await self._fail()

    async def _stop_keep_alive(self) -> None:
        """Wait for a ``keep_alive`` under way, and refuse further ones."""
        self._is_ending = True
        if isinstance(self.statements, SharedPostgresTransaction):
            async with self.statements.lock:
                pass

    async def _fail(self) -> None:
        self._ended = True
        if not self._is_ending:
            await self._stop_keep_alive()
        self.statements.end()
        await self._store.undo(self._connection, self.statements.used)
