"""Carrying one request to the configured server and its answer back. Nothing is decided here.

What the transport will not do: follow a redirect, keep a cookie, read without end, log a body or a
token, or talk to a server whose certificate does not hold.
"""

import ssl
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol, Self

import httpx
import msgspec

from holdfast.errors import ConfigurationError

__all__ = ["Answer", "HttpTransport", "NoAnswer", "Request", "Transport"]

_MAX_ANSWER_BYTES: Final = 4_194_304
"""More than any answer to one entry: what is longer is not read to its end."""

_KEEP_ALIVE_SECONDS: Final = 2.0
"""Shorter than servers keep an idle connection. On one that the server has just closed a send gets
no answer, and then nobody knows what became of it."""


class Request(msgspec.Struct, frozen=True):
    """One HTTP request to the configured server."""

    method: str
    # Path and query.
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None


class Answer(msgspec.Struct, frozen=True):
    """What the server said."""

    status: int
    # Names in lower case.
    headers: Mapping[str, str]
    body: bytes
    # The body was longer than is read.
    cut_short: bool = False

    def json(self) -> Any:
        """Return the body as a JSON value; None if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def code(self) -> str | None:
        """The machine's code of an error, in either dialect."""
        if self.status < 400:  # noqa: PLR2004
            return None
        body = self.json()
        code = body.get("code", body.get("error")) if isinstance(body, dict) else None
        return code if isinstance(code, str) else None

    @property
    def request_id(self) -> str | None:
        """The server's id of this exchange."""
        return self.headers.get("x-request-id")


class NoAnswer(msgspec.Struct, frozen=True):
    """The server said nothing."""

    # A few words for a person; no body, no token.
    why: str
    # Whether the request may have left the device. If not, it has certainly not happened.
    left: bool = True


class Transport(Protocol):
    """What the drain sends with. Implementations are used by several threads."""

    def send(self, request: Request) -> Answer | NoAnswer:
        """Send a request once."""


class HttpTransport:
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
        """Take the server's address, such as ``https://api.example`` (a path may follow).

        ``timeout_seconds`` is for the whole of an answer. ``tls`` is for private certificate
        authorities; there is no way to turn verification off by a flag.
        """
        self._prefix = _checked(server)
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


def _checked(server: str) -> str:
    """Return the address without a slash at its end, or say why it cannot be one."""
    try:
        url = httpx.URL(server)
    except (httpx.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"the server's address cannot be read: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigurationError("the server's address should be http://… or https://…")
    if url.userinfo or url.query or url.fragment:
        raise ConfigurationError(
            "the server's address should have no user, password, query or fragment"
        )
    return str(url).rstrip("/")
