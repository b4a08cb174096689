"""psycopg's connections, with the methods that the PostgreSQL store uses.

A raw connection is in autocommit mode and Onceward sends BEGIN and COMMIT itself, together with its
own statements. Handlers get the raw connection too, so its ``commit`` and ``rollback`` are refused.

Where psycopg would ask the server to cancel a statement, the connection is cut: see
``postgres.driver``.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from psycopg import AsyncRawCursor, RawCursor, waiting
from psycopg.abc import PQGen
from psycopg.errors import _WaitTimeout
from psycopg.rows import TupleRow

from onceward.errors import UsageError
from onceward.stores.postgres.driver import NEVER, Time
from onceward.stores.postgres.hosts import READ_TIMELINE, Timelines
from onceward.stores.psycopg.messages import ServerLostError, exchange, send, translating_outages
from onceward.stores.replication import CommitNotices
from onceward.stores.threads import StoreThreads

T = TypeVar("T")

# How often psycopg looks for signals while it waits.
_INTERVAL_SECONDS: Final = 0.1
_SETTINGS: Final = (
    *("row_factory", "cursor_factory", "server_cursor_factory"),
    *("prepare_threshold", "prepared_max"),
)


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"a guarded handler must not {what}: Onceward commits its rows together with the record, "
        "or rolls both back. Use `connection.transaction()` for a savepoint"
    )


class ThreadTime:
    """The monotonic time, for threads."""

    @property
    def now(self) -> float:
        return time.monotonic()


class _Deadline:
    """When the running statement of a connection is cut, and what has happened to it."""

    deadline: float = NEVER
    statement_seconds: float = NEVER
    time: Time = ThreadTime()
    was_cut = False
    is_read_only = False

    def _begin_wait(self) -> None:
        """Set the deadline, unless the caller has set one."""
        if self.deadline is NEVER and self.statement_seconds is not NEVER:
            self.deadline = self.time.now + self.statement_seconds


class GuardedAsyncConnection(_Deadline, psycopg.AsyncConnection[TupleRow]):
    """A connection whose transaction only Onceward may end."""

    async def wait(
        self,
        gen: PQGen[T],
        interval: float = _INTERVAL_SECONDS,
        timeout: float | None = None,  # noqa: ASYNC109 - psycopg's name
    ) -> T:
        """Do as psycopg does, but cut the connection if cancelled. The pool sees the deadline."""
        self._begin_wait()
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, interval, timeout)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            _terminate(self, is_unlocked=True)
            raise
        finally:
            self.deadline = NEVER

    async def commit(self) -> None:
        _refuse("commit")

    async def rollback(self) -> None:
        _refuse("roll back")


class GuardedConnection(_Deadline, psycopg.Connection[TupleRow]):
    """A connection whose transaction only Onceward may end."""

    def wait(
        self, gen: PQGen[T], interval: float = _INTERVAL_SECONDS, timeout: float | None = None
    ) -> T:
        """Do as psycopg does, but cut the connection at its deadline, and if interrupted."""
        self._begin_wait()
        limit = timeout
        if self.deadline is not NEVER:
            left = max(0.001, self.deadline - time.monotonic())
            limit = left if timeout is None else min(left, timeout)
        try:
            return waiting.wait(gen, self.pgconn.socket, interval, limit)
        except psycopg.OperationalError as error:
            if limit is None or limit == timeout or not isinstance(error, _WaitTimeout):
                raise
            self.was_cut = True
            _terminate(self, is_unlocked=True)
            raise ServerLostError("the server did not respond in time") from error
        except (KeyboardInterrupt, SystemExit):
            _terminate(self, is_unlocked=True)
            raise
        finally:
            self.deadline = NEVER

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Held for each statement by Onceward and by ``PsycopgSyncTransaction``: a thread that its
        # handler has abandoned must not use the connection after ROLLBACK, for another request.
        self.statement_lock = threading.Lock()

    def commit(self) -> None:
        _refuse("commit")

    def rollback(self) -> None:
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


def _terminate(raw: Any, *, is_unlocked: bool = False) -> None:
    """Close a connection at once; a statement that runs on it fails.

    ``is_unlocked`` says that nothing uses the connection although its lock is held, by the caller.
    """
    if raw.closed:
        return
    with (
        suppress(OSError, psycopg.Error),
        socket.socket(fileno=os.dup(raw.pgconn.socket)) as shared,
    ):
        shared.shutdown(socket.SHUT_RDWR)
    if is_unlocked or not raw.lock.locked():
        raw.pgconn.finish()


def _delegated(path: str) -> Any:
    """Return a property that is an attribute of an attribute."""
    owner, name = path.split(".")
    owner_of = attrgetter(owner)

    def assign(self: Any, value: Any) -> None:
        setattr(owner_of(self), name, value)

    return property(attrgetter(path), assign)


class _Wrapped:
    """Common part of both kinds of connections: see ``postgres.driver.Connection``."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        # What a handler may set, to set it back later.
        self.settings = {name: getattr(raw, name) for name in _SETTINGS}
        self.backend: int = raw.info.backend_pid
        self._notices = CommitNotices()
        raw.add_notice_handler(self._notices.on_diagnostic)
        # How many callbacks there are without those of a handler.
        self.own_notice_handlers = 1

    has_warned: bool = _delegated("_notices.has_warned")
    # When the running statement is cut.
    deadline: float = _delegated("raw.deadline")
    was_cut: bool = _delegated("raw.was_cut")
    is_read_only: bool = _delegated("raw.is_read_only")

    def is_closed(self) -> bool:
        closed: bool = self.raw.closed
        return closed

    def terminate(self) -> None:
        _terminate(self.raw)


class AsyncConnection(_Wrapped):
    """A ``postgres.driver.Connection`` on the event loop."""

    raw: GuardedAsyncConnection

    async def execute(self, sql: str, *values: Any) -> str:
        with translating_outages(self.raw):
            if not values:  # no need for a cursor, nor to prepare it
                async with self.raw.lock:
                    result = await self.raw.wait(exchange(self.raw.pgconn, sql.encode()))
                return _tag(result)
            async with AsyncRawCursor(self.raw) as cursor:
                await cursor.execute(sql, values)
                return cursor.statusmessage or ""

    async def fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        with translating_outages(self.raw):
            async with AsyncRawCursor(self.raw, row_factory=_rows) as cursor:
                await cursor.execute(sql, values or None)
                return [] if cursor.description is None else await cursor.fetchall()

    async def fetchrow(self, sql: str, *values: Any) -> Any:
        rows = await self.fetch(sql, *values)
        return rows[0] if rows else None

    async def notifications(self, seconds: float, *, stop_after: int | None = None) -> list[Any]:
        return [each async for each in self.raw.notifies(timeout=seconds, stop_after=stop_after)]

    async def close(self, *, timeout: float) -> None:  # noqa: ARG002, ASYNC109 - asyncpg's name
        await self.raw.close()


def timeline_of(raw: Any, timelines: Timelines) -> int:
    """Read the timeline of a server; 0 if the role may not. Closes the connection if it raises."""
    try:
        return timelines.check(raw.execute(READ_TIMELINE).fetchone())
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction):
        return 0
    except BaseException:
        raw.close()
        raise


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


class ThreadConnection(_Wrapped):
    """A ``postgres.driver.Connection`` whose calls block a thread, not the event loop."""

    raw: GuardedConnection

    def __init__(self, raw: GuardedConnection, threads: StoreThreads) -> None:
        super().__init__(raw)
        # Set by the pool: a slot of the threads is taken.
        self.has_slot = False
        self._threads = threads

    async def execute(self, sql: str, *values: Any) -> str:
        return await self._run(execute, sql, values)

    async def fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        return await self._run(fetch, sql, values)

    async def fetchrow(self, sql: str, *values: Any) -> Any:
        rows = await self.fetch(sql, *values)
        return rows[0] if rows else None

    async def notifications(self, seconds: float, *, stop_after: int | None = None) -> list[Any]:
        raw = self.raw
        return await self._threads.run(
            lambda: list(raw.notifies(timeout=seconds, stop_after=stop_after)),
            cancel=self.terminate,
        )

    async def close(self, *, timeout: float) -> None:  # noqa: ARG002, ASYNC109 - asyncpg's name
        self.raw.close()

    async def _run(
        self, run: Callable[[GuardedConnection, str, Sequence[Any]], T], sql: str, values: Any
    ) -> T:
        def work() -> T:
            with self.raw.statement_lock:
                return run(self.raw, sql, values)

        return await self._threads.run(work, cancel=self.terminate)
