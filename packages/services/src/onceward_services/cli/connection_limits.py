"""Limits on the connections of a server process, which an ASGI app cannot see.

Uvicorn's ``limit_concurrency`` refuses health checks too, and Uvicorn waits for a head without a
limit of time or size.
"""

import asyncio
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
_HEAD_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\nconnection: close\r\n\r\n"
)

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
    ) -> None:
        """Give each client ``head_seconds`` to send the head of a request."""
        self._app = app
        self.max_connections = max_connections
        self.head_seconds = head_seconds
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

    def protocol(self) -> type[asyncio.Protocol]:  # noqa: C901 - one small class
        """Return Uvicorn's HTTP protocol with these limits."""
        limits = self
        base: Any = AutoHTTPProtocol

        class LimitedProtocol(base):  # type: ignore[misc]
            _head_timer: asyncio.TimerHandle | None = None
            _head_bytes = 0

            def connection_made(self, transport: asyncio.Transport) -> None:
                limits.open += 1
                super().connection_made(transport)
                if limits.open > limits.max_connections + _SPARE:
                    transport.abort()
                else:
                    self._expect_head()

            def connection_lost(self, exc: Exception | None) -> None:
                limits.open -= 1
                self._has_head()
                super().connection_lost(exc)

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                cycle = self.cycle
                if cycle is not None and not cycle.response_complete:
                    self._has_head()
                    return
                # Part of a head, or the rest of a body whose request was refused.
                if cycle is None or not cycle.more_body:
                    self._head_bytes += len(data)
                if self._head_bytes > _MAX_HEAD_BYTES:
                    self.transport.write(_HEAD_TOO_LARGE)
                    self.transport.close()
                elif self._head_timer is None:
                    self._expect_head()

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
