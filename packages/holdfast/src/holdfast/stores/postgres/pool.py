"""A pool of asyncpg connections that costs next to nothing while one is free.

asyncpg's own pool sets a timer, starts a task and wraps every call for each use: a tenth of a bare
request (docs/decisions/0004-speed.md). A unit always ends its transaction or cuts the connection
off, so there is nothing to reset either.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["ConnectionPool"]


class ConnectionPool:
    """Hands out connections, last used first, up to a limit; who comes too late waits in line."""

    def __init__(self, connect: Callable[[], Awaitable[Any]], *, most: int) -> None:
        """Connect on demand with the given function."""
        self._connect = connect
        self._most = most
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        self._connecting = 0
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._is_closed = False

    async def fill(self, count: int) -> None:
        """Open connections ahead of their use; raises what connecting raises."""
        opened = [await self._open() for _ in range(min(count, self._most))]
        for connection in opened:
            self.release(connection)

    async def acquire(self, timeout_seconds: float) -> Any:
        """Return a live connection. Raises ``TimeoutError`` when none comes free in time."""
        # Who waits comes first: a newcomer does not take what was just given back.
        if not self._waiting:
            connection = self._take_idle()
            if connection is not None:
                return connection
            if self._has_room():
                return await self._open()
        async with asyncio.timeout(timeout_seconds):
            return await self._wait()

    def release(self, connection: Any) -> None:
        """Take a connection back, and hand it to whoever waits longest. A dead one is forgotten."""
        self._busy.discard(connection)
        if self._is_closed:
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)
        self._serve_next()

    async def close(self, timeout_seconds: float) -> None:
        """Wait for what is in use, then disconnect everything."""
        self._is_closed = True
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_exception(ConnectionError("the pool is closed"))
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        while self._busy and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in self._busy:
            connection.terminate()
        idle, self._idle = self._idle, []
        for connection in idle:
            try:
                await connection.close(timeout=2)
            except (OSError, TimeoutError):
                connection.terminate()

    def _take_idle(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                self._busy.add(connection)
                return connection
        return None

    def _has_room(self) -> bool:
        return len(self._busy) + len(self._idle) + self._connecting < self._most

    async def _open(self) -> Any:
        if self._is_closed:
            raise ConnectionError("the pool is closed")
        self._connecting += 1
        try:
            connection = await self._connect()
        except BaseException:
            self._connecting -= 1
            self._serve_next()  # the place is free again
            raise
        self._connecting -= 1
        self._busy.add(connection)
        return connection

    async def _wait(self) -> Any:
        """Wait in line for a connection, or for the room to open one."""
        ticket: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            connection = await ticket
        except BaseException:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._give_back(ticket.result())  # served just as we left
            raise
        return await self._open() if connection is None else connection

    def _serve_next(self) -> None:
        """Serve the head of the line: a connection if one is idle, room for one otherwise."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if not self._waiting:
            return
        connection = self._take_idle()
        if connection is not None or self._has_room():
            self._waiting.popleft().set_result(connection)

    def _give_back(self, connection: Any) -> None:
        if connection is None:
            self._serve_next()
        else:
            self.release(connection)
