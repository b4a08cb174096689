"""psycopg's connections, with the methods that the PostgreSQL store uses.

A raw connection is in autocommit mode and Holdfast sends BEGIN and COMMIT itself, together with its
own statements. Handlers get the raw connection too, so its ``commit`` and ``rollback`` are refused.
"""

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from psycopg import AsyncRawCursor, RawCursor
from psycopg.rows import TupleRow

from holdfast.errors import UsageError
from holdfast.stores.psycopg.errors import translating_outages
from holdfast.stores.psycopg_message import exchange, send
from holdfast.stores.threads import StoreThreads

__all__ = [
    "AsyncConnection",
    "GuardedAsyncConnection",
    "GuardedConnection",
    "ThreadConnection",
    "execute",
    "fetch",
]

T = TypeVar("T")

_CANCEL_SECONDS: Final = 5.0
_SETTINGS: Final = (
    *("row_factory", "cursor_factory", "server_cursor_factory"),
    *("prepare_threshold", "prepared_max"),
)


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"a guarded handler must not {what}: Holdfast commits its rows together with the record, "
        "or rolls both back. Use `connection.transaction()` for a savepoint"
    )


class GuardedAsyncConnection(psycopg.AsyncConnection[TupleRow]):
    """A connection whose transaction only Holdfast may end."""

    async def commit(self) -> None:
        """Raise ``UsageError``."""
        _refuse("commit")

    async def rollback(self) -> None:
        """Raise ``UsageError``."""
        _refuse("roll back")


class GuardedConnection(psycopg.Connection[TupleRow]):
    """A connection whose transaction only Holdfast may end."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Held for each statement by Holdfast and by ``PsycopgSyncTransaction``: a thread that its
        # handler has abandoned must not use the connection after ROLLBACK, for another request.
        self.statement_lock = threading.Lock()

    def commit(self) -> None:
        """Raise ``UsageError``."""
        _refuse("commit")

    def rollback(self) -> None:
        """Raise ``UsageError``."""
        _refuse("roll back")


@lru_cache(maxsize=512)
def _row_type(names: tuple[str, ...]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a type of tuples that ``dict(row)`` turns into a mapping."""
    positions = {name: position for position, name in enumerate(names)}

    class Row(tuple[Any, ...]):
        __slots__ = ()

        def keys(self) -> Sequence[str]:
            return names

        def __getitem__(self, at: Any) -> Any:
            return super().__getitem__(positions[at] if isinstance(at, str) else at)

    return Row


def _rows(cursor: Any) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Make rows with positions and names; psycopg's row factory."""
    return _row_type(tuple(column.name for column in cursor.description or ()))


def _tag(result: Any) -> str:
    status: bytes | None = result.command_status
    return "" if status is None else status.decode()


def _terminate(raw: Any) -> None:
    """Close a connection at once; a statement that runs on it fails."""
    if raw.closed:
        return
    with (
        suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(raw.pgconn.socket)) as shared,
    ):
        shared.shutdown(socket.SHUT_RDWR)
    if not raw.lock.locked():
        raw.pgconn.finish()


def _settings(raw: Any) -> dict[str, Any]:
    """Return what a handler may set on psycopg's connection, to set it back later."""
    return {name: getattr(raw, name) for name in _SETTINGS}


class AsyncConnection:
    """A ``postgres.driver.Connection`` on the event loop."""

    def __init__(self, raw: GuardedAsyncConnection) -> None:
        self.raw = raw
        self.settings = _settings(raw)

    async def execute(self, sql: str, *values: Any) -> str:
        """Run a statement, or several without values; return the last command tag."""
        with translating_outages(self.raw):
            if not values:  # no need for a cursor, nor to prepare it
                async with self.raw.lock:
                    result = await self.raw.wait(exchange(self.raw.pgconn, sql.encode()))
                return _tag(result)
            async with AsyncRawCursor(self.raw) as cursor:
                await cursor.execute(sql, values)
                return cursor.statusmessage or ""

    async def fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        """Return rows, if the statement has any."""
        with translating_outages(self.raw):
            async with AsyncRawCursor(self.raw, row_factory=_rows) as cursor:
                await cursor.execute(sql, values or None)
                return [] if cursor.description is None else await cursor.fetchall()

    async def fetchrow(self, sql: str, *values: Any) -> Any:
        """Return the first row, or None."""
        rows = await self.fetch(sql, *values)
        return rows[0] if rows else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commit what runs inside, or roll it back after an exception."""
        with translating_outages(self.raw):
            async with self.raw.transaction():
                yield

    def is_closed(self) -> bool:
        """Return whether it is closed or broken."""
        return self.raw.closed

    def terminate(self) -> None:
        """Close at once."""
        _terminate(self.raw)

    async def close(self, *, timeout: float) -> None:  # noqa: ARG002, ASYNC109 - asyncpg's name
        """Close; nothing is waited for."""
        await self.raw.close()


def execute(raw: GuardedConnection, sql: str, values: Sequence[Any] = ()) -> str:
    """Run a statement, or several without values, and return the last command tag. Blocks."""
    with translating_outages(raw):
        if not values:  # no need for a cursor, nor to prepare it
            return _tag(send(raw, sql))
        with RawCursor(raw) as cursor:
            cursor.execute(sql, values)
            return cursor.statusmessage or ""


def fetch(raw: GuardedConnection, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    """Return rows, if the statement has any. Blocks."""
    with translating_outages(raw), RawCursor(raw, row_factory=_rows) as cursor:
        cursor.execute(sql, values or None)
        return [] if cursor.description is None else cursor.fetchall()


class ThreadConnection:
    """A ``postgres.driver.Connection`` whose calls block a thread, not the event loop."""

    def __init__(self, raw: GuardedConnection, threads: StoreThreads) -> None:
        self.raw = raw
        self.settings = _settings(raw)
        # Set by the pool: a slot of the threads is taken.
        self.has_slot = False
        self._threads = threads

    async def execute(self, sql: str, *values: Any) -> str:
        """Run a statement, or several without values; return the last command tag."""
        return await self._run(execute, sql, values)

    async def fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        """Return rows, if the statement has any."""
        return await self._run(fetch, sql, values)

    async def fetchrow(self, sql: str, *values: Any) -> Any:
        """Return the first row, or None."""
        rows = await self.fetch(sql, *values)
        return rows[0] if rows else None

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Commit what runs inside, or roll it back after an exception."""
        await self.execute("BEGIN")
        try:
            yield
        except BaseException:
            with suppress(psycopg.Error, OSError):
                await self.execute("ROLLBACK")
            raise
        await self.execute("COMMIT")

    def is_closed(self) -> bool:
        """Return whether it is closed or broken."""
        return self.raw.closed

    def terminate(self) -> None:
        """Close at once."""
        _terminate(self.raw)

    async def close(self, *, timeout: float) -> None:  # noqa: ARG002, ASYNC109 - asyncpg's name
        """Close; nothing is waited for."""
        self.raw.close()

    async def _run(
        self, run: Callable[[GuardedConnection, str, Sequence[Any]], T], sql: str, values: Any
    ) -> T:
        def work() -> T:
            with self.raw.statement_lock:
                return run(self.raw, sql, values)

        return await self._threads.run(work, cancel=self._cancel)

    def _cancel(self) -> None:
        try:
            self.raw.cancel_safe(timeout=_CANCEL_SECONDS)
        except psycopg.Error:  # it may still arrive, during a later statement
            _terminate(self.raw)
