"""HTTP transport with httpx: through a proxy, or with any transport of httpx.

It keeps the same rules as ``HttpTransport``, which is faster and the default without a proxy.
"""

import ssl
import time
from collections.abc import Mapping
from typing import Final, Self

import httpx

from holdfast.outbox.transport import NoResponse, Request, Response, ServerUrl

__all__ = ["HttpxTransport"]

_KEEP_ALIVE_SECONDS: Final = 2.0
_MAX_RESPONSE_BYTES: Final = 4_194_304


class HttpxTransport:
    """Sends to one server over HTTP, with httpx."""

    def __init__(
        self,
        server: str,
        *,
        timeout_seconds: float = 30.0,
        connect_seconds: float = 10.0,
        max_response_bytes: int = _MAX_RESPONSE_BYTES,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """See ``HttpTransport``; ``transport`` is one of httpx's transports."""
        url = ServerUrl.parse(server)
        self.origin = f"{url.scheme}://{url.authority}"
        self._prefix = url.text
        self._timeout_seconds = timeout_seconds
        self._max_response_bytes = max_response_bytes
        self._http = httpx.Client(
            verify=tls if tls is not None else True,
            timeout=httpx.Timeout(timeout_seconds, connect=min(connect_seconds, timeout_seconds)),
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS),
            transport=transport,
        )
        # Not compressed: a small response could expand to a very large one.
        self._http.headers = httpx.Headers(
            {"accept": "application/json", "accept-encoding": "identity", "user-agent": "holdfast"}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

    def send(self, request: Request) -> Response | NoResponse:
        """Send a request once."""
        deadline = time.monotonic() + self._timeout_seconds
        try:
            built = self._http.build_request(
                request.method,
                self._prefix + request.target,
                headers=request.headers,
                content=request.body,
            )
            response = self._http.send(built, stream=True)
            try:
                return self._read(response, deadline)
            finally:
                response.close()
                # A cookie of one user must not be sent with another's request.
                self._http.cookies.clear()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return NoResponse(
                f"could not connect: {error or type(error).__name__}", may_have_been_sent=False
            )
        except (httpx.ProxyError, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            return NoResponse(
                f"could not connect: {type(error).__name__}", may_have_been_sent=False
            )
        except httpx.LocalProtocolError:
            # Its text would repeat the header.
            return NoResponse(
                "the request has a header that cannot be sent", may_have_been_sent=False
            )
        except httpx.TransportError as error:
            return NoResponse(f"no response: {_NAMES.get(type(error), type(error).__name__)}")

    def _read(self, response: httpx.Response, deadline: float) -> Response | NoResponse:
        parts: list[bytes] = []
        size = 0
        # Responses of httpx's mock transports have been read already.
        stream = [response.content] if response.is_stream_consumed else response.iter_raw()
        for part in stream:
            parts.append(part)
            size += len(part)
            if size > self._max_response_bytes:
                break
            if time.monotonic() > deadline:
                return NoResponse("no response: it was not complete in time")
        headers = {name.lower(): value for name, value in response.headers.items()}
        body = b"".join(parts)[: self._max_response_bytes]
        return Response(response.status_code, headers, body, size > self._max_response_bytes)


_NAMES: Final[Mapping[type[Exception], str]] = {
    httpx.ReadTimeout: "the server took too long",
    httpx.WriteTimeout: "the server took too long",
    httpx.ReadError: "the connection broke",
    httpx.WriteError: "the connection broke",
    httpx.RemoteProtocolError: "the connection was closed",
}
