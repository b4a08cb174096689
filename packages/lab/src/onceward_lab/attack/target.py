"""The server under attack: its guarded operation, raw connections to it, and what an attack is."""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from onceward_lab.attack.latencies import Latencies
from onceward_lab.conformance.harness import (
    CheckFailedError,
    Credentials,
    Harness,
    Request,
    Response,
)
from onceward_lab.conformance.run import SignIn

__all__ = [
    "Attack",
    "Limits",
    "RawResponse",
    "Target",
    "expect_no_failure",
    "expect_refusal",
    "with_member",
]

_STATUS: Final = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2}) ")
_IDLE_SECONDS: Final = 0.4
_TRIES: Final = 10
_PAUSE_SECONDS: Final = 0.5
_CLIENT_ERROR: Final = 400
_SERVER_ERROR: Final = 500
_OVERLOADED: Final = 503
# Statuses after which a client sends the same request again.
_BUSY: Final = frozenset({408, 425, 429, 503})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much to send, and how long the server may take."""

    # Connections that are opened at once, and requests of a flood.
    connections: int = 200
    # Seconds until a connection that stalls must be closed.
    patience_seconds: float = 45.0
    # The size of bodies that are expensive to read.
    body_bytes: int = 1_000_000
    # The 99th percentile of a health check under load.
    health_ms: float = 250.0


class RawResponse(msgspec.Struct, frozen=True):
    """The response on one raw connection."""

    statuses: tuple[int, ...]
    data: bytes
    is_closed: bool

    def summary(self) -> str:
        """Return the statuses and whether the server closed the connection."""
        text = ", ".join(map(str, self.statuses)) or "no response"
        return f"{text}, connection closed" if self.is_closed else text


class Target:
    """Sends valid, invalid and raw requests to one server."""

    def __init__(
        self,
        url: str,
        harness: Harness,
        sign_in: SignIn,
        *,
        limits: Limits,
        redis_url: str | None = None,
        health_path: str = "/healthz",
        lose_commit: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """``sign_in`` may have the secret with which the server verifies tokens.

        ``lose_commit`` makes the database of the server lose the effects of a key, as a restore of
        an earlier backup does.
        """
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.harness = harness
        self.sign_in = sign_in
        self.limits = limits
        self.redis_url = redis_url
        self.health_path = health_path
        self.lose_commit = lose_commit
        self.quiet = Latencies()
        # Set after an attack has found nothing of the server in Redis.
        self.is_redis_unused = False
        self._host = parts.hostname or "127.0.0.1"
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self.netloc = parts.netloc

    @property
    def path(self) -> str:
        """The path of the guarded operation, with that of the base URL."""
        return self._prefix + self.harness.profile.request.path

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        return await asyncio.open_connection(self._host, self._port, ssl=self._tls)

    async def head(self, *lines: bytes, signed_in: bool = True, key: str | None = None) -> bytes:
        """Return the head of a request to the operation, with these lines more."""
        request = self.harness.profile.request
        parts = [
            f"{request.method} {self.path} HTTP/1.1".encode(),
            f"Host: {self.netloc}".encode(),
            b"Content-Type: application/json",
        ]
        sent = dict(request.headers)
        if signed_in:
            sent |= dict(self.harness.credentials.headers)
        if key is not None:
            sent[self.harness.profile.key_header] = key
        parts += [f"{name}: {value}".encode("latin-1") for name, value in sent.items()]
        return b"\r\n".join([*parts, *lines]) + b"\r\n\r\n"

    async def body(self) -> bytes:
        """Return a valid body that was not sent before."""
        return msgspec.json.encode((await self.harness.new_request()).body)

    async def exchange(
        self, raw: bytes, *, seconds: float = 10.0, ends: bool = False
    ) -> RawResponse:
        """Send bytes as they are, and read until the server closes or sends nothing more.

        With ``ends``, nothing can be sent after them.
        """
        reader, writer = await self.connect()
        data, is_closed = b"", False
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        try:
            writer.write(raw)
            if ends and writer.can_write_eof():
                writer.write_eof()
            while (left := end - loop.time()) > 0:
                try:
                    async with asyncio.timeout(min(left, _IDLE_SECONDS) if data else left):
                        more = await reader.read(65536)
                except TimeoutError:
                    break
                if not more:
                    is_closed = True
                    break
                data += more
        except OSError:  # closed while bytes were on their way
            is_closed = True
        finally:
            writer.transport.abort()
        return RawResponse(tuple(map(int, _STATUS.findall(data))), data, is_closed)

    async def health(self) -> int:
        """Request a page that needs no sign-in; returns the status."""
        return (await self.harness.client.get(self.health_path)).status_code

    async def write(self) -> int:
        """Send a valid signed-in write; returns the status."""
        request, key = await self.harness.new_request(), self.harness.new_key()
        return (await self.harness.send(request, key)).status

    async def send_until_served(
        self, request: Request, key: str, *, credentials: Credentials | None = None
    ) -> Response:
        """Send a valid request, and again while the server is busy.

        For attacks that are not about load.
        """
        for _ in range(_TRIES - 1):
            response = await self.harness.send(request, key, credentials=credentials)
            if response.status not in _BUSY:
                return response
            await asyncio.sleep(_PAUSE_SECONDS)
        return await self.harness.send(request, key, credentials=credentials)


class Attack(msgspec.Struct, frozen=True):
    """One attack. ``run`` returns what happened, or raises ``CheckFailedError``."""

    name: str
    group: str
    expected: str
    run: Callable[[Target], Awaitable[str]]
    why: str
    change: str


def expect_refusal(what: str, status: int, summary: str, allowed: Sequence[int] = ()) -> None:
    """Raise unless the status is a client error, one of ``allowed`` if any are given."""
    is_refused = status in allowed if allowed else _CLIENT_ERROR <= status < _SERVER_ERROR
    if not is_refused:
        raise CheckFailedError(f"{what}: {summary}")


def expect_no_failure(what: str, status: int, summary: str) -> None:
    """Raise for an error of the server; 503 is a refusal."""
    if status >= _SERVER_ERROR and status != _OVERLOADED:
        raise CheckFailedError(f"{what}: {summary}")


def with_member(request: Request, value: bytes, name: str = "attack") -> bytes:
    """Return the request's body with one member more, whose value is any bytes."""
    body: Any = request.body
    encoded = msgspec.json.encode(body if isinstance(body, dict) else {})
    separator = b"," if len(encoded) > len(b"{}") else b""
    return encoded[:-1] + separator + b'"' + name.encode() + b'":' + value + b"}"
