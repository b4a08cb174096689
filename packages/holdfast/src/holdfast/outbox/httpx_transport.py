"""Carrying requests with httpx: through a proxy, or by any transport that httpx has.

The same promises as ``HttpTransport``, which is quicker and the default where no proxy is set.
"""

import ssl
import time
from collections.abc import Mapping
from typing import Final, Self

import httpx

from holdfast.outbox.exchange import Answer, NoAnswer, Request
from holdfast.outbox.server_address import ServerAddress

__all__ = ["HttpxTransport"]

_KEEP_ALIVE_SECONDS: Final = 2.0
_MAX_ANSWER_BYTES: Final = 4_194_304


class HttpxTransport:
    """Sends to one server over HTTP, with httpx."""

    def __init__(
        self,
        server: str,
        *,
        timeout_seconds: float = 30.0,
        connect_seconds: float = 10.0,
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
        tls: ssl.SSLContext | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Take what ``HttpTransport`` takes; ``transport`` is one of httpx's own."""
        address = ServerAddress.parse(server)
        self.origin = f"{address.scheme}://{address.authority}"
        self._prefix = address.text
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        self._http = httpx.Client(
            verify=tls if tls is not None else True,
            timeout=httpx.Timeout(timeout_seconds, connect=min(connect_seconds, timeout_seconds)),
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS),
            transport=transport,
        )
        # Not compressed: a small answer could turn into a very large one.
        self._http.headers = httpx.Headers(
            {"accept": "application/json", "accept-encoding": "identity", "user-agent": "holdfast"}
        )

    def __enter__(self) -> Self:
        """Open with a ``with``."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def send(self, request: Request) -> Answer | NoAnswer:
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
                # One user's cookie must not go along with another's request.
                self._http.cookies.clear()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return NoAnswer(f"could not connect: {error or type(error).__name__}", left=False)
        except (httpx.ProxyError, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            return NoAnswer(f"could not connect: {type(error).__name__}", left=False)
        except httpx.LocalProtocolError:
            # Its text would repeat the header that it is about.
            return NoAnswer("the request has a header that cannot be sent", left=False)
        except httpx.TransportError as error:
            return NoAnswer(f"no answer: {_NAMES.get(type(error), type(error).__name__)}")

    def _read(self, response: httpx.Response, deadline: float) -> Answer | NoAnswer:
        parts: list[bytes] = []
        size = 0
        # What a transport for tests gives has been read already.
        stream = [response.content] if response.is_stream_consumed else response.iter_raw()
        for part in stream:
            parts.append(part)
            size += len(part)
            if size > self._max_answer_bytes:
                break
            if time.monotonic() > deadline:
                return NoAnswer("no answer: it came too slowly")
        headers = {name.lower(): value for name, value in response.headers.items()}
        body = b"".join(parts)[: self._max_answer_bytes]
        return Answer(response.status_code, headers, body, size > self._max_answer_bytes)


_NAMES: Final[Mapping[type[Exception], str]] = {
    httpx.ReadTimeout: "the server took too long",
    httpx.WriteTimeout: "the server took too long",
    httpx.ReadError: "the connection broke",
    httpx.WriteError: "the connection broke",
    httpx.RemoteProtocolError: "the connection was closed",
}
