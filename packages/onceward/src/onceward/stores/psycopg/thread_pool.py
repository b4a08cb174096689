"""A pool of connections that are used in threads."""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import psycopg

from onceward.stores.postgres.driver import NEVER
from onceward.stores.postgres.pool import SILENT_TICKS, TICK_SECONDS, StatementAges
from onceward.stores.psycopg.connections import ThreadConnection
from onceward.stores.threads import StoreThreads

_SILENT_SECONDS: Final = 0.5


class ThreadConnectionPool:
    """A ``postgres.driver.Pool`` of as many connections as there are threads, last used first.

    Callers on an event loop wait there, for a slot. Callers in the thread of a request wait in
    that thread. A caller that has waited while the server was found to be silent does not connect:
    that would take as long again.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[ThreadConnection]],
        threads: StoreThreads,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[ThreadConnection], Awaitable[None]] | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        """``on_wait`` gets the seconds that a caller waited because all were in use.

        ``on_connect`` gets each new connection before it is used; if it raises, the connection is
        closed. ``on_silence`` is called, on the event loop of ``fill``, while a statement has had
        no response for a second. Deadlines are seen to by the threads themselves.
        """
        self._on_silence = on_silence
        self._timer: asyncio.TimerHandle | None = None
        self._ages = StatementAges()
        self._on_connect = on_connect
        self._on_wait = on_wait
        self._connect = connect
        self._threads = threads
        self._free = threading.Semaphore(threads.count)
        self._lock = threading.Lock()
        self._idle: list[ThreadConnection] = []
        self._busy: set[ThreadConnection] = set()
        # In use since before ``renew``.
        self._outdated: set[ThreadConnection] = set()
        self._is_closed = False
        # When a statement or a new connection last had no response.
        self._silent_at = -math.inf
        threads.open()

    async def fill(self, count: int) -> None:
        if self._timer is None and self._on_silence is not None:
            self._tick(self._on_silence)
        opened = [await self.acquire(10.0) for _ in range(min(count, self._threads.count))]
        for connection in opened:
            self.release(connection)

    def _tick(self, on_silence: Callable[[], None]) -> None:
        with self._lock:
            busy = list(self._busy)
        if any(count > SILENT_TICKS for _, _, count in self._ages.look(busy)):
            on_silence()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK_SECONDS, self._tick, on_silence)

    def take(self) -> None:
        """Return None: a connection needs a slot of the threads."""

    async def acquire(self, timeout_seconds: float) -> ThreadConnection:
        if self._on_wait is None or len(self._busy) < self._threads.count:
            return await self._acquire(timeout_seconds)
        started = time.monotonic()
        try:
            return await self._acquire(timeout_seconds)
        finally:
            self._on_wait(time.monotonic() - started)

    async def _acquire(self, timeout_seconds: float) -> ThreadConnection:
        started = time.monotonic()
        has_slot = await self._threads.take_slot(timeout_seconds)
        is_counted = False
        try:
            await self._wait(timeout_seconds)
            is_counted = True
            connection = self._take_idle() or await self._open(started)
        except BaseException:
            if is_counted:
                self._free.release()
            if has_slot:
                self._threads.free_slot()
            raise
        connection.has_slot = has_slot
        with self._lock:
            self._busy.add(connection)
        return connection

    def release(self, connection: ThreadConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            is_outdated = connection in self._outdated
            self._outdated.discard(connection)
            is_kept = not (self._is_closed or is_outdated or connection.is_closed())
            if is_kept:
                self._idle.append(connection)
            idle: list[ThreadConnection] = []
            if connection.was_cut:  # idle connections lead to the same server
                idle, self._idle = self._idle, []
                self._silent_at = time.monotonic()
        if not is_kept:
            connection.terminate()
        for each in idle:
            with suppress(psycopg.Error):
                each.terminate()
        self._free.release()
        if connection.has_slot:
            connection.has_slot = False
            self._threads.free_slot()

    def renew(self, *, cut: bool = False) -> None:
        with self._lock:
            self._outdated = set(self._busy)
            idle, self._idle = self._idle, []
            running = [each for each in self._busy if each.deadline is not NEVER] if cut else []
        for connection in running:
            connection.was_cut = True
        for connection in (*idle, *running):
            with suppress(psycopg.Error):
                connection.terminate()

    def is_outdated(self, connection: ThreadConnection) -> bool:
        return connection in self._outdated

    async def close(self, timeout_seconds: float) -> None:
        self._is_closed = True
        try:
            await self._close(timeout_seconds)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self._threads.close(0.0)

    async def _close(self, timeout_seconds: float) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        while self._busy and clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with self._lock:
            left, self._idle = [*self._busy, *self._idle], []
        for connection in left:
            with suppress(psycopg.Error):
                connection.terminate()

    async def _open(self, asked_at: float) -> ThreadConnection:
        if self._silent_at > asked_at:
            raise ConnectionError("the server does not respond")
        connecting_at = time.monotonic()
        try:
            connection = await self._connect()
        except OSError:
            # A refusal comes at once, a time-out after a while.
            if time.monotonic() - connecting_at > _SILENT_SECONDS:
                self._silent_at = time.monotonic()
            raise
        if self._on_connect is not None:
            try:
                await self._on_connect(connection)
            except BaseException:
                connection.terminate()
                raise
        return connection

    def _take_idle(self) -> ThreadConnection | None:
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the pool is closed")
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed():
                    return connection
        return None

    async def _wait(self, timeout_seconds: float) -> None:
        """Take one of the connections that the limit allows."""
        if self._free.acquire(blocking=False):
            return
        is_taken = False

        def wait() -> None:
            nonlocal is_taken
            is_taken = self._free.acquire(timeout=timeout_seconds)

        try:
            await self._threads.run(wait)
        except BaseException:
            if is_taken:
                self._free.release()
            raise
        if not is_taken:
            raise TimeoutError(f"no connection was free within {timeout_seconds:g} seconds")
