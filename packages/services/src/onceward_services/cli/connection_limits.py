"""Limits on the connections of a server process, which an ASGI app cannot see.

Uvicorn's ``limit_concurrency`` refuses health checks too, and Uvicorn waits for a head without a
limit of time or size.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from onceward.errors import OverloadedError
from onceward.guard.error_formats import render_error
from onceward_protocol.error_codes import ErrorFormat
from onceward_protocol.ids import new_request_id

__all__ = ["ConnectionLimits", "raise_file_limit"]

_HEALTH: Final = frozenset({"/healthz", "/readyz"})
# Above the limit, this many connections more get a response: health checks theirs, others 503.
_SPARE: Final = 64
_MAX_HEAD_BYTES: Final = 64 * 1024
# Files that a process opens besides its connections.
_OTHER_FILES: Final = 256
_END: Final = b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD_TOO_LARGE: Final = b"HTTP/1.1 431 Request Header Fields Too Large" + _END
_BODY_TOO_LARGE: Final = b"HTTP/1.1 413 Content Too Large" + _END
_BODY_TOO_LATE: Final = b"HTTP/1.1 408 Request Timeout" + _END

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class ConnectionLimits:
    """Wraps an app: above ``max_connections``, all but health checks get 503."""

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        max_connections: int,
        head_seconds: float,
        body_seconds: float = math.inf,
        max_body_bytes: float = math.inf,
        max_per_address: int = 0,
    ) -> None:
        """Give each client ``head_seconds`` for the head of a request, ``body_seconds`` for a body.

        They hold on every path; what the app refuses earlier has its own response. With
        ``max_per_address`` 0, one address may have all connections.
        """
        self._app = app
        self.max_connections = max_connections
        self.head_seconds = head_seconds
        self.body_seconds = body_seconds
        self.max_body_bytes = max_body_bytes
        self.max_per_address = max_per_address
        # Open connections of each address.
        self._addresses: Counter[str] = Counter()
        # Connections that are open now.
        self.open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        if self.open <= self.max_connections or scope["type"] != "http" or scope["path"] in _HEALTH:
            await self._app(scope, receive, send)
            return
        error = OverloadedError(
            "the server has too many connections; try again shortly", retry_after_seconds=1
        )
        request_id = new_request_id()
        response = render_error(error, ErrorFormat.PROBLEM, request_id)
        headers = [
            *response.headers,
            (b"content-length", str(len(response.body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": response.status, "headers": headers})
        await send({"type": "http.response.body", "body": response.body})

    def _count(self, address: str, change: int) -> int:
        """Count a connection of an address, or its end; return how many there are now."""
        self.open += change
        self._addresses[address] += change
        count = self._addresses[address]
        if not count:
            del self._addresses[address]
        return count

    def protocol(self) -> type[asyncio.Protocol]:  # noqa: C901 - one small class
        """Return Uvicorn's HTTP protocol with these limits."""
        limits = self
        base: Any = AutoHTTPProtocol

        class LimitedProtocol(base):  # type: ignore[misc]
            _head_timer: asyncio.TimerHandle | None = None
            _head_bytes = 0
            # While a body is read whose end has not arrived with its head.
            _body_timer: asyncio.TimerHandle | None = None
            _body_bytes = 0
            _address = ""

            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                self._address = str((transport.get_extra_info("peername") or ("",))[0])
                count, most = limits._count(self._address, 1), limits.max_per_address
                if limits.open > limits.max_connections + _SPARE or 0 < most < count:
                    transport.abort()
                else:
                    self._expect_head()

            def connection_lost(self, exc: Exception | None) -> None:
                limits._count(self._address, -1)
                self._has_head()
                self._has_body()
                super().connection_lost(exc)

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                cycle = self.cycle
                if cycle is not None and not cycle.response_complete:
                    self._has_head()
                    if cycle.more_body:
                        self._expect_body(len(data))
                    elif self._body_timer is not None:
                        self._has_body()
                    return
                self._has_body()
                # Part of a head, or the rest of a body whose request was refused.
                if cycle is None or not cycle.more_body:
                    self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.transport.write(_HEAD_TOO_LARGE)
                    self.transport.close()
                elif self._head_timer is None:
                    self._expect_head()

            def on_headers_complete(self) -> None:
                super().on_headers_complete()
                # The head ends here: httptools adds the trailers of the body to this list.
                self.headers: list[tuple[bytes, bytes]] = []

            def _expect_head(self) -> None:
                self._head_timer = self.loop.call_later(limits.head_seconds, self._head_is_late)

            def _has_head(self) -> None:
                self._head_bytes = 0
                if self._head_timer is not None:
                    self._head_timer.cancel()
                    self._head_timer = None

            def _head_is_late(self) -> None:
                self._head_timer = None
                self.transport.close()

            def _expect_body(self, size: int) -> None:
                if self._body_timer is None and limits.body_seconds < math.inf:
                    self._body_timer = self.loop.call_later(
                        limits.body_seconds, self._refuse_body, _BODY_TOO_LATE
                    )
                self._body_bytes += size
                if self._body_bytes > limits.max_body_bytes:
                    self._refuse_body(_BODY_TOO_LARGE)

            def _has_body(self) -> None:
                self._body_bytes = 0
                if self._body_timer is not None:
                    self._body_timer.cancel()
                    self._body_timer = None

            def _refuse_body(self, response: bytes) -> None:
                self._has_body()
                if self.cycle is not None and not self.cycle.response_started:
                    self.transport.write(response)
                self.transport.close()

        return LimitedProtocol


def raise_file_limit(connections: int) -> None:
    """Let this process open so many connections, as far as its hard limit allows."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _SPARE + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
