"""An HTTP transport that sends a request again if its connection was closed before a response."""

import asyncio
from typing import Final

import httpx

__all__ = ["RetryingTransport"]

_TRIES: Final = 4
_PAUSE_SECONDS: Final = 0.3


class RetryingTransport(httpx.AsyncHTTPTransport):
    """Retries as every client of an idempotent operation does.

    A server closes idle connections, and those whose head is late. On a busy machine a request may
    be sent on one of them. A server that closes every connection is found: the last error is
    raised. Timeouts are not retried.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request, at most four times."""
        for _ in range(_TRIES - 1):
            try:
                return await super().handle_async_request(request)
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                await asyncio.sleep(_PAUSE_SECONDS)
        return await super().handle_async_request(request)
