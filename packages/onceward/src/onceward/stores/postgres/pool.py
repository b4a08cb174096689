"""A pool of asyncpg connections with little overhead while a connection is free.

asyncpg's pool sets a timer, starts a task and wraps every call for each use: a tenth of the time of
a bare request (docs/decisions/0004-speed.md). A unit of work always ends its transaction or closes
the connection, so nothing has to be reset.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from onceward.stores.postgres.driver import NEVER

# Between two looks at the deadlines. A timer for each statement would cost several microseconds.
TICK_SECONDS: Final = 0.25
# So many looks at the same statement are a second of silence.
SILENT_TICKS: Final = 4


class PoolTime:
    """The monotonic time of the last look at the deadlines."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = time.monotonic()


class StatementAges:
    """How often a pool has seen each statement that runs on its connections."""

    def __init__(self) -> None:
        # Deadlines at the last look, and how often each was seen.
        self._seen: dict[Any, tuple[float, int]] = {}

    def look(self, connections: Iterable[Any]) -> list[tuple[Any, float, int]]:
        """Return the connections in use with their deadlines and how often they were seen."""
        seen, self._seen = self._seen, {}
        found = []
        for connection in connections:
            deadline = connection.deadline
            if deadline is NEVER:
                continue
            # Each statement has its own number, so the same object is the same statement.
            before, count = seen.get(connection, (NEVER, 0))
            count = count + 1 if before is deadline else 1
            self._seen[connection] = deadline, count
            found.append((connection, deadline, count))
        return found


class ConnectionPool:
    """Lends connections, last used first, up to a limit; above it, callers wait in order.

    While the server is silent no caller waits: a connection that becomes free would be of no use.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        *,
        limit: int,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
        on_silence: Callable[[], None] | None = None,
        time: PoolTime | None = None,
    ) -> None:
        """``on_wait`` gets the seconds that a caller waited, served or not; 0 is not reported.

        ``on_connect`` gets each new connection before it is used; if it raises, the connection is
        closed. ``on_silence`` is called while a statement has had no response for a second, and
        after a connection was cut at its deadline, which is a value of ``time``.
        """
        self._on_silence = on_silence
        self._time = time or PoolTime()
        self._timer: asyncio.TimerHandle | None = None
        self._ages = StatementAges()
        # When the server last responded: a connection was opened, or returned in order.
        self._responded_at = self._time.now
        # A statement or a new connection has had no response, and nothing has had one since.
        self._is_silent = False
        self._connect = connect
        self._on_connect = on_connect
        self._limit = limit
        self._on_wait = on_wait
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        # In use since before ``renew``.
        self._outdated: set[Any] = set()
        self._connecting = 0
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._is_closed = False

    async def fill(self, count: int) -> None:
        if self._timer is None:
            self._tick()
        opened = [await self._open() for _ in range(min(count, self._limit))]
        for connection in opened:
            self.release(connection)

    def take(self) -> Any:
        """Return a connection that is free now, or None. Waiting callers come first."""
        return None if self._waiting else self._take_idle()

    async def acquire(self, timeout_seconds: float) -> Any:
        connection = self.take()
        if connection is not None:
            return connection
        if not self._waiting and self._has_capacity():
            return await self._open()
        if self._is_silent:
            raise _silent()
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._wait()
        finally:
            if self._on_wait is not None:
                self._on_wait(time.monotonic() - started)

    def release(self, connection: Any) -> None:
        """Return a connection, and serve the next waiting caller. A closed one is dropped."""
        self._busy.discard(connection)
        if self._is_closed or (self._outdated and connection in self._outdated):
            self._outdated.discard(connection)
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)
            self._responded_at, self._is_silent = self._time.now, False
        if self._waiting:
            self._serve_next()

    def renew(self, *, cut: bool = False) -> None:
        """Close idle connections now, and those in use when they are released.

        With ``cut``, those on which a statement runs are cut now.
        """
        self._outdated = set(self._busy)
        self._drop_idle()
        if cut:
            for connection in [each for each in self._busy if each.deadline is not NEVER]:
                cut_connection(connection)

    def is_outdated(self, connection: Any) -> bool:
        return connection in self._outdated

    def _tick(self) -> None:
        """Cut connections whose deadline has passed."""
        now = self._time.now = time.monotonic()
        was_cut = is_silent = False
        for connection, deadline, count in self._ages.look(self._busy):
            if deadline < now:
                cut_connection(connection)
                was_cut = is_silent = True
                # Others may have had responses: then it is the statement that is slow.
                if self._responded_at <= now - (count - 1) * TICK_SECONDS:
                    self._refuse_waiting()
            is_silent = is_silent or count > SILENT_TICKS
        if was_cut:  # idle connections lead to the same server
            self._drop_idle()
        if is_silent and self._on_silence is not None:
            self._on_silence()
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    async def close(self, timeout_seconds: float) -> None:
        self._is_closed = True
        try:
            await self._close(timeout_seconds)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _close(self, timeout_seconds: float) -> None:
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_exception(ConnectionError("the pool is closed"))
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        while (self._busy or self._connecting) and clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for connection in self._busy:
            connection.terminate()
        idle, self._idle = self._idle, []
        for connection in idle:
            try:
                await connection.close(timeout=2)
            except (OSError, TimeoutError):
                connection.terminate()

    def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            connection.terminate()

    def _take_idle(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                self._busy.add(connection)
                return connection
        return None

    def _has_capacity(self) -> bool:
        return len(self._busy) + len(self._idle) + self._connecting < self._limit

    async def _open(self) -> Any:
        if self._is_closed:
            raise ConnectionError("the pool is closed")
        self._connecting += 1
        try:
            connection = await self._connect()
            if self._on_connect is not None:
                try:
                    await self._on_connect(connection)
                except BaseException:
                    connection.terminate()
                    raise
        except BaseException as error:
            self._connecting -= 1
            if isinstance(error, TimeoutError):
                self._refuse_waiting()
            self._serve_next()  # its place is free
            raise
        self._connecting -= 1
        self._responded_at, self._is_silent = time.monotonic(), False
        if self._is_closed:  # meanwhile: no later call would close it
            connection.terminate()
            raise ConnectionError("the pool is closed")
        self._busy.add(connection)
        return connection

    async def _wait(self) -> Any:
        """Wait for a connection, or for capacity to open one."""
        ticket: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            connection = await ticket
        except BaseException:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._return(ticket.result())  # served at the same time
            raise
        return await self._open() if connection is None else connection

    def _serve_next(self) -> None:
        """Serve the first waiting caller: an idle connection, or None to open one."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        if not self._waiting:
            return
        connection = self._take_idle()
        if connection is not None or self._has_capacity():
            self._waiting.popleft().set_result(connection)

    def _refuse_waiting(self) -> None:
        """Refuse all who wait for a connection: the server is silent."""
        self._is_silent = True
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_exception(_silent())

    def _return(self, connection: Any) -> None:
        if connection is None:
            self._serve_next()
        else:
            self.release(connection)


def _silent() -> ConnectionError:
    return ConnectionError("the server does not respond")


def cut_connection(connection: Any) -> None:
    """Close a connection; the statement that runs on it fails. Nothing is sent."""
    connection.was_cut = True
    connection.terminate()
