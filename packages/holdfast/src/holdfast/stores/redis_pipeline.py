"""One connection to Redis on which short commands are sent without waiting for each other.

redis-py takes a connection out of its pool, sets three timers and runs a dozen coroutines for each
command: 120 microseconds of CPU time, where a guarded request has two commands. Here a command is
one write and one future. redis-py still connects (TLS, password, database) and sends the others.
"""

import asyncio
from asyncio import AbstractEventLoop, BaseTransport, Future, Protocol, Task, TimerHandle, timeout
from collections import deque
from typing import Any, Final

from holdfast.extras import needs_extra

with needs_extra("redis"):
    from redis.asyncio import ConnectionPool
    from redis.asyncio.connection import parse_url
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import InvalidResponse, ResponseError
    from redis.exceptions import TimeoutError as RedisTimeoutError

__all__ = ["RedisPipeline"]

_END: Final = b"\r\n"
_VALUE, _STATUS, _ERROR = b"$+-"
_INCOMPLETE: Final = object()


class RedisPipeline:
    """Sends commands on one connection, which the first command opens, and again after a failure.

    Not thread-safe. A command that is not answered in time fails with all others that wait, because
    responses come in the order of the commands.
    """

    def __init__(self, url: str, timeout_seconds: float) -> None:
        """Take the URL for redis-py; raises ``ValueError`` for what is none."""
        # Version 2 of the protocol: in version 3, servers send messages that nobody asked for.
        own: dict[str, Any] = {"protocol": 2, "retry": Retry(NoBackoff(), 0)}
        settings: dict[str, Any] = {**parse_url(url), **own}
        settings.pop("timeout", None)  # of a pool that waits for a connection
        # Only makes connections.
        self._pool = ConnectionPool(**settings)
        self._timeout_seconds = timeout_seconds
        self._connection: _Connection | None = None
        self._connecting: Task[_Connection] | None = None

    async def get(self, name: bytes) -> bytes | None:
        """Return a value, or None. Raises ``RedisError`` or ``OSError``."""
        connection = self._open_connection() or await self._connect()
        found: bytes | None = await connection.send(
            b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)
        )
        return found

    async def set(self, name: bytes, value: bytes, life_ms: int) -> None:
        """Set a value for this many milliseconds. Raises ``RedisError`` or ``OSError``."""
        connection = self._open_connection() or await self._connect()
        life = b"%d" % life_ms
        await connection.send(
            b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$2\r\nPX\r\n$%d\r\n%b\r\n"
            % (len(name), name, len(value), value, len(life), life)
        )

    async def close(self) -> None:
        """Disconnect; commands that wait fail."""
        if self._connecting is not None:
            await asyncio.wait({self._connecting})
        if self._connection is not None:
            self._connection.close()

    def _open_connection(self) -> "_Connection | None":
        connection = self._connection
        if connection is None or not connection.is_open:
            return None
        # One of another event loop, which may have ended, e.g. before a fork, is left alone.
        return connection if connection.loop is asyncio.get_running_loop() else None

    async def _connect(self) -> "_Connection":
        """Connect; all commands that come meanwhile wait for the same connection."""
        connecting = self._connecting
        if connecting is None or connecting.get_loop() is not asyncio.get_running_loop():
            connecting = self._connecting = asyncio.create_task(self._new_connection())
            connecting.add_done_callback(self._connected)
        # A caller that is cancelled must not cancel it for the others.
        return await asyncio.shield(connecting)

    async def _new_connection(self) -> "_Connection":
        made: Any = self._pool.connection_class(**self._pool.connection_kwargs)
        async with timeout(self._timeout_seconds):
            await made.connect()
        return _Connection(made, self._timeout_seconds)

    def _connected(self, task: "Task[_Connection]") -> None:
        if task is self._connecting:
            self._connecting = None
        if not task.cancelled() and task.exception() is None:
            self._connection = task.result()


class _Connection(Protocol):
    """Takes over the transport of a connection of redis-py."""

    def __init__(self, made: Any, timeout_seconds: float) -> None:
        self.loop: AbstractEventLoop = asyncio.get_running_loop()
        self.is_open = True
        # Taken away from redis-py, which would warn that they are not closed.
        self._reader, self._writer = made._reader, made._writer  # noqa: SLF001 - no public names
        made._reader = made._writer = None  # noqa: SLF001
        self._timeout_seconds = timeout_seconds
        self._transport = self._writer.transport
        self._streams = self._transport.get_protocol()
        self._transport.set_protocol(self)
        self._received = bytearray()
        # Of each command that waits: its future, and when it has waited for too long.
        self._waiting: deque[tuple[Future[Any], float]] = deque()
        self._timer: TimerHandle | None = None
        # Commands of this iteration of the event loop: one system call sends them all.
        self._unsent: list[bytes] = []

    def send(self, command: bytes) -> "Future[Any]":
        """Send a command and return the future of its response."""
        response: Future[Any] = self.loop.create_future()
        self._waiting.append((response, self.loop.time() + self._timeout_seconds))
        if self._timer is None:
            self._timer = self.loop.call_later(self._timeout_seconds, self._check_time)
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent.append(command)
        return response

    def close(self) -> None:
        """Disconnect; commands that wait fail."""
        self._fail(RedisConnectionError("the connection was closed"))

    def data_received(self, data: bytes) -> None:
        """Pass responses to the commands that wait, in their order."""
        received, at = self._received, 0
        received += data
        try:
            while True:
                response, at = _parse(received, at)
                if response is _INCOMPLETE:
                    break
                self._respond(response)
        except (ValueError, IndexError):
            self._fail(InvalidResponse("Redis has sent what is no response to a command"))
        else:
            del received[:at]

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the commands that wait."""
        self._fail(RedisConnectionError(f"the connection was lost: {error or 'closed by Redis'}"))
        self._streams.connection_lost(error)

    def connection_made(self, transport: BaseTransport) -> None:
        """Never called: the connection was made before."""

    def _flush(self) -> None:
        commands, self._unsent = self._unsent, []
        if self.is_open:
            self._transport.write(b"".join(commands))

    def _respond(self, response: Any) -> None:
        future, _ = self._waiting.popleft()
        if future.done():  # its caller was cancelled
            return
        if isinstance(response, Exception):
            future.set_exception(response)
        else:
            future.set_result(response)

    def _check_time(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        until = self._waiting[0][1]
        if until <= self.loop.time():
            self._fail(RedisTimeoutError("Redis did not respond in time"))
        else:
            self._timer = self.loop.call_at(until, self._check_time)

    def _fail(self, error: Exception) -> None:
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            future, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
        self._transport.abort()


def _parse(received: bytearray, at: int) -> tuple[Any, int]:
    """Return the response that begins here, and where the next one begins.

    ``_INCOMPLETE`` if it has not arrived yet; an error as an exception. Raises ``ValueError`` or
    ``IndexError`` for what is no response to GET or SET.
    """
    end = received.find(_END, at)
    if end < 0:
        return _INCOMPLETE, at
    kind, line = received[at], received[at + 1 : end]
    after = end + 2
    if kind == _VALUE:
        size = int(line)
        if size < 0:
            return None, after
        if len(received) < after + size + 2:
            return _INCOMPLETE, at
        return bytes(received[after : after + size]), after + size + 2
    if kind == _STATUS:
        return bytes(line), after
    if kind == _ERROR:
        return ResponseError(line.decode(errors="replace")), after
    raise ValueError("not a response to GET or SET")
