"""A connection pooler for PostgreSQL, reduced to what its modes change.

With ``session`` a client keeps its server connection, as with session pooling. Otherwise clients
share server connections, as with transaction pooling. A transaction gets the one that was released
last with ``last``, and the one that the client had before, if it is free, with ``same``: then
statements see no difference. As with PgBouncer, clients get process ids that are no backend's, and
what a server sends while no client is connected to it is dropped.
"""

import asyncio
import itertools
import struct
from typing import Literal, Self

Mode = Literal["session", "last", "same"]

_SSL_REQUEST = 80877103
_HEADER = struct.Struct("!cI")
_KEY = struct.Struct("!cIII")


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    header = await reader.readexactly(_HEADER.size)
    kind, length = _HEADER.unpack(header)
    return kind, header + await reader.readexactly(length - 4)


class _ServerConnection:
    """A connection to PostgreSQL that has been authenticated without a password."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.client: _Client | None = None
        self.greeting: list[tuple[bytes, bytes]] = []
        self._reader = reader
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, port: int, startup: bytes) -> Self:
        server = cls(*await asyncio.open_connection("127.0.0.1", port))
        server.writer.write(startup)
        while not server.greeting or server.greeting[-1][0] != b"Z":
            server.greeting.append(await read_message(server._reader))
        server._reading = asyncio.create_task(server._read())
        return server

    async def _read(self) -> None:
        while True:
            message = await read_message(self._reader)
            if self.client is not None:
                self.client.receive(*message)

    async def close(self) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self.writer.close()


class _Client:
    """A client, and the server connection that its transaction has."""

    def __init__(self, proxy: "PoolingProxy", writer: asyncio.StreamWriter) -> None:
        self.latest: _ServerConnection | None = None
        self._proxy = proxy
        self._writer = writer
        self._server: _ServerConnection | None = None
        self._requests = 0

    async def greet(self, startup: bytes, number: int) -> None:
        server = await self._acquire(startup)
        for kind, message in server.greeting:
            is_key = kind == b"K"
            self._writer.write(_KEY.pack(b"K", 12, number, 0) if is_key else message)
        self._release_if_shared()

    async def send(self, startup: bytes, kind: bytes, message: bytes) -> None:
        server = self._server or await self._acquire(startup)
        if kind in b"QS":  # each ends with a message that the server is ready
            self._requests += 1
        server.writer.write(message)

    def receive(self, kind: bytes, message: bytes) -> None:
        if kind == b"Z":
            self._requests -= 1
            if message[-1:] == b"I" and self._requests == 0:
                self._release_if_shared()
        self._writer.write(message)

    def leave(self) -> None:
        if self._server is not None:
            self._server.client = None

    async def _acquire(self, startup: bytes) -> _ServerConnection:
        server = self._server = self.latest = await self._proxy.acquire(startup, self.latest)
        server.client = self
        return server

    def _release_if_shared(self) -> None:
        if self._proxy.mode != "session" and self._server is not None:
            server, self._server = self._server, None
            server.client = None
            self._proxy.idle.append(server)


class PoolingProxy:
    """Listens on a free port of loopback."""

    def __init__(self, server_port: int, mode: Mode) -> None:
        self.mode = mode
        self.idle: list[_ServerConnection] = []
        self.port = 0
        self._server_port = server_port
        self._all: list[_ServerConnection] = []
        self._clients: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        for server in self._all:
            await server.close()

    async def acquire(self, startup: bytes, latest: _ServerConnection | None) -> _ServerConnection:
        if self.mode == "last" and self.idle:
            return self.idle.pop()
        if latest is not None and latest in self.idle:
            self.idle.remove(latest)
            return latest
        server = await _ServerConnection.open(self._server_port, startup)
        self._all.append(server)
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        try:
            await self._relay(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        except asyncio.CancelledError:
            pass  # the proxy stops
        finally:
            self._clients.discard(task)
            writer.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        startup = await self._read_startup(reader, writer)
        client = _Client(self, writer)
        try:
            await client.greet(startup, next(self._numbers))
            while (message := await read_message(reader))[0] != b"X":
                await client.send(startup, *message)
        finally:
            client.leave()

    async def _read_startup(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        while True:
            size = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!I", size)[0] - 4)
            if struct.unpack("!I", body[:4])[0] != _SSL_REQUEST:
                return size + body
            writer.write(b"N")
