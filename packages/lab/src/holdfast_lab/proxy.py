"""A proxy that loses things: requests on their way, answers after the server has committed.

It understands just enough of HTTP/1.1 to know when a request and its answer are whole, because the
instant that matters is *after the server has committed and before the device knows*. What is lost
is decided by a seeded chance, so a run can be told from another by its number.
"""

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

__all__ = ["CALM", "CuttingProxy", "Exchange", "Weather"]

_HEAD_BYTES: Final = 65_536
_NO_BODY: Final = (204, 304)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """Which share of exchanges meets which fate; the rest passes."""

    lose_answer: float = 0.0
    """The server has answered, and the device never hears it."""
    cut_answer: float = 0.0
    """Half of the answer arrives."""
    cut_request: float = 0.0
    """Nothing reaches the server."""
    drop_midway: float = 0.0
    """The request arrives, and both connections die before the answer."""
    longest_delay_seconds: float = 0.0
    """Each answer takes up to so much longer."""


CALM: Final = Weather()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as the proxy saw it, and the answer if the server gave one."""

    head: bytes
    body: bytes
    answer: bytes
    fate: str

    @property
    def line(self) -> str:
        """Method and path."""
        return self.head.split(b"\r\n", 1)[0].decode("latin-1").rpartition(" ")[0]

    def header(self, name: str) -> str | None:
        """Return a header of the request, by its name in lower case."""
        return _header(self.head, name)

    @property
    def status(self) -> int | None:
        """The answer's status; None if there was no answer."""
        return _status_of(self.answer) if self.answer else None

    @property
    def replayed(self) -> bool:
        """Whether the server answered from its memory."""
        head = self.answer.partition(b"\r\n\r\n")[0]
        return head != b"" and _header(head, "idempotency-replayed") == "true"

    @property
    def answer_body(self) -> bytes:
        """What the server said."""
        return self.answer.partition(b"\r\n\r\n")[2]


async def _nobody(_exchange: Exchange) -> None:
    """Watch nothing."""


class CuttingProxy:
    """Stands between devices and a server on loopback. An async context manager."""

    def __init__(
        self,
        *upstream_ports: int,
        weather: Weather = CALM,
        seed: int = 0,
        on_exchange: Callable[[Exchange], Awaitable[None]] = _nobody,
    ) -> None:
        """Take the ports of the servers; the proxy's own is held, but refuses until it is opened.

        With several servers each connection goes to one of them, by chance.

        ``on_exchange`` is awaited when the server has answered (or has not), before the device can
        know: whoever wants to kill the device at the worst moment does it there.
        """
        self.weather = weather
        self.fates: Counter[str] = Counter()
        self._upstream_ports = upstream_ports
        self._chance = random.Random(seed)  # noqa: S311 - weather, not a secret
        self._on_exchange = on_exchange
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def requests(self) -> int:
        """How many whole requests came from devices."""
        return self.fates.total()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._meet, sock=self._socket, limit=_HEAD_BYTES, backlog=256
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._socket.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        upstream = _Upstream(self._chance.choice(self._upstream_ports))
        # A task that ends cancelled would be logged as an error by the stream's own callback.
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer, upstream):
                pass
        upstream.close()
        writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upstream: "_Upstream"
    ) -> bool:
        """Carry one request and its answer; returns whether the connection lives on."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_length_of(head))
        fate = self._fate()
        answer = b""
        if fate == "cut_request":
            pass
        elif fate == "drop_midway":
            await upstream.send(head + body)
        else:
            answer = await upstream.ask(head + body)
            fate = fate if answer else "no_answer"
        self.fates[fate] += 1
        await self._on_exchange(Exchange(head, body, answer, fate))
        if self.weather.longest_delay_seconds:
            await asyncio.sleep(self._chance.random() * self.weather.longest_delay_seconds)
        if fate == "passed":
            writer.write(answer)
        elif fate == "cut_answer":
            writer.write(answer[: len(answer) // 2])
        await writer.drain()
        return fate == "passed"

    def _fate(self) -> str:
        dice, sky = self._chance.random(), self.weather
        for fate, share in (
            ("lose_answer", sky.lose_answer),
            ("cut_answer", sky.cut_answer),
            ("cut_request", sky.cut_request),
            ("drop_midway", sky.drop_midway),
        ):
            if dice < share:
                return fate
            dice -= share
        return "passed"


class _Upstream:
    """One connection to the server, made when needed and again when the server has closed it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> bytes:
        """Return the whole answer; empty if the server is not there or dies over it."""
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
        """Send, and hang up without listening."""
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
