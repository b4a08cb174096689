"""A TCP connection between two servers that can be cut and healed, without touching their clients.

While it is cut nothing arrives: connections stay open and silent, and new ones get no response, as
with a switch that drops all packets. After ``heal`` open connections continue where they were.
"""

import asyncio
import socket
import threading
from collections.abc import Coroutine
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from onceward_testing.server_process import HOST, free_port

__all__ = ["NetworkLink"]

T = TypeVar("T")

_CHUNK_BYTES: Final = 65_536
_STOP_SECONDS: Final = 10.0


class NetworkLink:
    """Forwards connections on its ``port`` to ``target_port``. Its methods block; thread-safe.

    It listens from the first ``start`` until ``close``.
    """

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self._target_port = target_port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: asyncio.Event | None = None
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def is_cut(self) -> bool:
        """Whether it is cut; False before ``start`` and after ``close``."""
        return self._open is not None and not self._open.is_set()

    def start(self) -> None:
        """Listen and forward. Does nothing if it does already."""
        if self._loop is not None:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"network link {self.port}", daemon=True
        )
        self._thread.start()
        try:
            self._run(self._listen())
        except BaseException:
            self.close()
            raise

    def cut(self) -> None:
        """Forward nothing from now on, in both directions."""
        self._run(self._set_open(is_open=False))

    def heal(self) -> None:
        """Forward again."""
        self._run(self._set_open(is_open=True))

    def close(self) -> None:
        """Close all connections and stop listening. Idempotent."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        self._run(self._close())
        self._loop = self._thread = self._open = self._listener = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_STOP_SECONDS)
        loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise RuntimeError("the network link is closed: call start() first")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_SECONDS)

    async def _listen(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._listener = socket.create_server((HOST, self.port))
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one connection.

        Not ``asyncio.start_server``, which accepts in two steps: a server that is closed in between
        leaves the connection open.
        """
        with suppress(BlockingIOError, ConnectionAbortedError):
            accepted, _ = listener.accept()
            accepted.setblocking(False)
            task = asyncio.get_running_loop().create_task(self._serve(accepted))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            task.add_done_callback(lambda _: accepted.close())  # if cancelled before it began

    async def _set_open(self, *, is_open: bool) -> None:
        if self._open is not None:
            self._open.set() if is_open else self._open.clear()

    async def _close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        connections = tuple(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close in the next round of the loop

    async def _serve(self, accepted: socket.socket) -> None:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(sock=accepted)
            try:
                await self._forward(reader, writer)
            finally:
                writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection in both directions until one side closes it."""
        if self._open is None:
            return
        await self._open.wait()
        far_reader, far_writer = await asyncio.open_connection(HOST, self._target_port)
        directions: list[asyncio.Task[None]] = []
        try:
            for end in (writer, far_writer):  # the client may have disconnected meanwhile
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            directions += [
                asyncio.create_task(self._pump(reader, far_writer, self._open)),
                asyncio.create_task(self._pump(far_reader, writer, self._open)),
            ]
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.transport.abort()  # first: the wait below may be cancelled
            for direction in directions:
                direction.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_open: asyncio.Event
    ) -> None:
        while chunk := await reader.read(_CHUNK_BYTES):
            await is_open.wait()
            writer.write(chunk)
            await writer.drain()
        # The end of a connection does not pass a cut network either.
        await is_open.wait()
