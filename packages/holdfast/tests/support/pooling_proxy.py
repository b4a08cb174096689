"""A connection pooler for PostgreSQL, reduced to what transaction pooling changes.

Clients share server connections: each transaction gets the one that was released last, as with
PgBouncer. With ``per_transaction=False`` a client keeps its own, as with session pooling.
"""

import asyncio
import struct
from collections.abc import Callable
from typing import Self

_SSL_REQUEST = 80877103
_HEADER = struct.Struct("!cI")


class _ServerConnection:
    """A connection to PostgreSQL that has been authenticated without a password."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.greeting = b""

    @classmethod
    async def open(cls, port: int, startup: bytes) -> Self:
        server = cls(*await asyncio.open_connection("127.0.0.1", port))
        server.writer.write(startup)
        kind = b""
        while kind != b"Z":
            kind, message = await read_message(server.reader)
            server.greeting += message
        return server


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    header = await reader.readexactly(_HEADER.size)
    kind, length = _HEADER.unpack(header)
    return kind, header + await reader.readexactly(length - 4)


class _Link:
    """Connects a client to a server connection until no transaction is open."""

    def __init__(
        self,
        client: asyncio.StreamWriter,
        release: Callable[[_ServerConnection], None] | None,
    ) -> None:
        self.server: _ServerConnection | None = None
        self._client = client
        self._release = release
        self._requests = 0
        self._responses: asyncio.Task[None] | None = None

    def use(self, server: _ServerConnection) -> None:
        self.server = server
        self._responses = asyncio.create_task(self._respond(server))

    def send(self, kind: bytes, message: bytes) -> None:
        assert self.server is not None
        if kind in b"QS":  # each ends with a message that the server is ready
            self._requests += 1
        self.server.writer.write(message)

    async def close(self) -> None:
        if self._responses is not None:
            self._responses.cancel()
            await asyncio.wait({self._responses})

    async def _respond(self, server: _ServerConnection) -> None:
        while True:
            kind, message = await read_message(server.reader)
            if kind == b"Z":
                self._requests -= 1
                is_idle = message[-1:] == b"I" and self._requests == 0
                if is_idle and self._release is not None:
                    self.server = None
                    self._release(server)
                    self._client.write(message)
                    return
            self._client.write(message)


class PoolingProxy:
    """Listens on a free port of loopback."""

    def __init__(self, server_port: int, *, per_transaction: bool) -> None:
        self._server_port = server_port
        self._per_transaction = per_transaction
        self._idle: list[_ServerConnection] = []
        self._all: list[_ServerConnection] = []
        self._clients: set[asyncio.Task[None]] = set()
        self.port = 0

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
            server.writer.close()

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
        link = _Link(writer, self._release if self._per_transaction else None)
        server = await self._acquire(startup)
        writer.write(server.greeting)
        if self._per_transaction:
            self._idle.append(server)
        else:
            link.use(server)
        try:
            while (message := await read_message(reader))[0] != b"X":
                if link.server is None:
                    link.use(await self._acquire(startup))
                link.send(*message)
        finally:
            await link.close()

    def _release(self, server: _ServerConnection) -> None:
        self._idle.append(server)

    async def _read_startup(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bytes:
        while True:
            size = await reader.readexactly(4)
            body = await reader.readexactly(struct.unpack("!I", size)[0] - 4)
            if struct.unpack("!I", body[:4])[0] != _SSL_REQUEST:
                return size + body
            writer.write(b"N")

    async def _acquire(self, startup: bytes) -> _ServerConnection:
        if self._idle:
            return self._idle.pop()
        server = await _ServerConnection.open(self._server_port, startup)
        self._all.append(server)
        return server
