"""A TCP proxy that drops requests and responses at random.

It parses just enough of HTTP/1.1 to know when a request and its response are complete: the fault
that matters is a response lost *after the server has committed*. The random generator is seeded.
"""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["NO_FAULTS", "Exchange", "FaultyProxy", "NetworkFaults"]

_HEAD_BYTES: Final = 65_536
_NO_BODY: Final = (204, 304)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFaults:
    """The share of exchanges that each fault affects, 0 to 1; the rest passes."""

    response_lost: float = 0.0
    """The server has responded, and the device gets nothing."""
    response_truncated: float = 0.0
    """The device gets half of the response."""
    request_lost: float = 0.0
    """The request does not reach the server."""
    disconnected: float = 0.0
    """The request reaches the server, and both connections close before the response."""
    max_delay_seconds: float = 0.0
    """Each response is delayed by a random time up to this."""


NO_FAULTS: Final = NetworkFaults()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as the proxy saw it, and the response if the server sent one."""

    head: bytes
    body: bytes
    response: bytes
    outcome: str

    @property
    def line(self) -> str:
        """Method and path, separated by a space."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").rpartition(" ")[0]

    def header(self, name: str) -> str | None:
        """Return a header of the request; ``name`` is in lower case."""
        return _header(self.head, name)

    @property
    def status(self) -> int | None:
        """The status of the response; None if there was none."""
        return _status_of(self.response) if self.response else None

    @property
    def replayed(self) -> bool:
        """Whether the server replayed a stored response."""
        head = self.response.partition(b"\r\n\r\n")[0]
        return head != b"" and _header(head, "idempotency-replayed") == "true"

    @property
    def response_body(self) -> bytes:
        """The body of the response; empty if there was none."""
        return self.response.partition(b"\r\n\r\n")[2]


async def _ignore(_exchange: Exchange) -> None:
    """Do nothing."""


class FaultyProxy:
    """Forwards requests to a server on loopback. An async context manager."""

    def __init__(
        self,
        *upstream_ports: int,
        faults: NetworkFaults = NO_FAULTS,
        seed: int = 0,
        on_exchange: Callable[[Exchange], Awaitable[None]] = _ignore,
    ) -> None:
        """Bind a port, which refuses connections until the proxy is entered.

        With several upstream ports each connection goes to a random one.

        ``on_exchange`` is awaited after the server has responded and before the device gets the
        response: the place to kill the device.
        """
        self.faults = faults
        self.outcomes: Counter[str] = Counter()
        self._upstream_ports = upstream_ports
        self._random = random.Random(seed)  # noqa: S311 - faults, not a secret
        self._on_exchange = on_exchange
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def requests(self) -> int:
        """The number of complete requests from devices."""
        return self.outcomes.total()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, sock=self._socket, limit=_HEAD_BYTES, backlog=256
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._socket.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        upstream = _Upstream(self._random.choice(self._upstream_ports))
        # asyncio's stream callback would log a cancelled task as an error.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer, upstream):
                pass
        upstream.close()
        writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: "_Upstream"
    ) -> bool:
        """Forward one request and its response; returns False if the connection must close."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length_of(head))
        outcome = self._choose_outcome()
        response = b""
        if outcome == "request_lost":
            pass
        elif outcome == "disconnected":
            await upstream.send(head + body)
        else:
            response = await upstream.request(head + body)
            outcome = outcome if response else "no_response"
        self.outcomes[outcome] += 1
        await self._on_exchange(Exchange(head, body, response, outcome))
        if self.faults.max_delay_seconds:
            await asyncio.sleep(self._random.random() * self.faults.max_delay_seconds)
        if outcome == "passed":
            writer.write(response)
        elif outcome == "response_truncated":
            writer.write(response[: len(response) // 2])
        await writer.drain()
        return outcome == "passed"

    def _choose_outcome(self) -> str:
        number, faults = self._random.random(), self.faults
        for outcome, share in (
            ("response_lost", faults.response_lost),
            ("response_truncated", faults.response_truncated),
            ("request_lost", faults.request_lost),
            ("disconnected", faults.disconnected),
        ):
            if number < share:
                return outcome
            number -= share
        return "passed"


class _Upstream:
    """A connection to the server, opened on demand and reopened after the server closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, request: bytes) -> bytes:
        """Return the complete response; empty if the server is down or dies during the request."""
        try:
            reader, writer = await self._connected()
            writer.write(request)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0 if _status_of(head) in _NO_BODY else _length_of(head)
            return head + await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return b""

    async def send(self, request: bytes) -> None:
        """Send the request and close the connection without reading the response."""
        with suppress(OSError):
            _, writer = await self._connected()
            writer.write(request)
            await writer.drain()
        self.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            self._streams = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=_HEAD_BYTES
            )
        return self._streams

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _header(head: bytes, name: str) -> str | None:
    for line in head.decode("latin-1").split("\r\n")[1:]:
        found, _, value = line.partition(":")
        if found.strip().lower() == name:
            return value.strip()
    return None


def _length_of(head: bytes) -> int:
    return int(_header(head, "content-length") or 0)


def _status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])
