"""HTTP transport: requests, responses, the transport protocol, and the default implementation.

The default does not follow redirects, keep cookies, read without limit, log bodies or tokens, or
accept an invalid certificate.

It uses the standard library's ``http.client``: on a fast network most of the time of a send is the
client's own, and this one needs less than half of what httpx does. Proxies are left to httpx, which
is imported only then.
"""

import http.client
import io
import ipaddress
import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from onceward_outbox.errors import ConfigurationError
from onceward_protocol.error_codes import ERROR_HEADER, error_code
from onceward_protocol.extras import needs_extra

if TYPE_CHECKING:
    import httpx

_MAX_RESPONSE_BYTES: Final = 4_194_304
"""Longer bodies are not read to their end."""

_KEEP_ALIVE_SECONDS: Final = 2.0
"""Shorter than servers keep an idle connection. On one that the server has just closed, a send gets
no response, and its outcome is unknown."""

_MAX_IDLE: Final = 8
"""Idle connections kept: one outbox sends from fewer threads than this."""

_CONNECTIONS: Final = 8
"""Requests that may be sent at once: four lanes, each with a repeat of a silent request."""

_SMALL_BYTES: Final = 16_384
"""A body that is written without waiting, because it fits into the buffer of a connection."""

_INFORMATIONAL: Final = range(100, 200)
_ERROR_HEADER: Final = ERROR_HEADER.lower()

_HEADERS: Final = {
    "Accept": "application/json",
    # Not compressed: a small response could expand to a very large one.
    "Accept-Encoding": "identity",
    "User-Agent": "onceward",
}
_FIELD: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [\t\x20-\x7e]*")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})

_Connection = http.client.HTTPConnection
_PORTS: Final = {"http": 80, "https": 443}


class Request(msgspec.Struct, frozen=True):
    """One HTTP request to the configured server."""

    # The HTTP method.
    method: str
    # Path and query.
    target: str
    # Names and values.
    headers: Mapping[str, str]
    # The body; None sends none.
    body: bytes | None = None


class Response(msgspec.Struct, frozen=True):
    """One HTTP response."""

    # The HTTP status.
    status: int
    # Names in lower case.
    headers: Mapping[str, str]
    # The body, up to the transport's limit.
    body: bytes
    # The body was longer than the limit.
    cut_short: bool = False

    def json(self) -> Any:
        """Return the body as a JSON value; None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    @property
    def code(self) -> str | None:
        """The machine-readable code of an error, from its header or its body."""
        if self.status < 400:  # noqa: PLR2004
            return None
        return error_code(self.headers.get(_ERROR_HEADER), self.body)

    @property
    def request_id(self) -> str | None:
        """The server's id of this request."""
        return self.headers.get("x-request-id")

    @property
    def error_body(self) -> str:
        """The body as text, for the entry's history."""
        return self.body.decode("utf-8", "replace")


class NoResponse(msgspec.Struct, frozen=True):
    """No response came."""

    # A few words for a person; no body, no token.
    reason: str
    # If False, the request has certainly not reached the server.
    may_have_been_sent: bool = True


_TOO_LONG: Final = NoResponse("no response: the server took too long")
_TOO_SLOW: Final = NoResponse("no response: it was not complete in time")
_CLOSED: Final = NoResponse("no response: the connection was closed")
_BROKE: Final = NoResponse("no response: the connection broke")
# The text of the error itself would repeat the header.
_BAD_HEADER: Final = NoResponse(
    "the request has a header that cannot be sent", may_have_been_sent=False
)


def _not_connected(why: str) -> NoResponse:
    return NoResponse(f"could not connect: {why}", may_have_been_sent=False)


class Transport(Protocol):
    """Sends requests to the configured server. Implementations are used by several threads.

    One with an attribute ``connections`` is called for up to so many requests at once. Its ``send``
    then takes ``timeout_seconds``, the time that the response to this request may take.
    """

    def send(self, request: Request) -> Response | NoResponse:
        """Send a request once."""


class ServerUrl(NamedTuple):
    """Scheme, host, port, and the path before every request's path."""

    scheme: str
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, server: str, *, allow_http: bool = False) -> Self:
        """Parse a URL such as ``https://api.example/mobile``. Raises ``ConfigurationError``.

        ``http://`` is for this machine only, unless ``allow_http``: others would read the token.
        """
        try:
            url = urlsplit(server)
            host, port = url.hostname, url.port
            # Other characters must not get into headers and logs.
            readable = server.isascii() and server.isprintable() and " " not in server
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigurationError(f"the server URL cannot be parsed: {error}") from None
        if not readable:
            raise ConfigurationError(
                "the server URL contains whitespace or non-ASCII characters; "
                "write international host names as punycode (xn--…)"
            )
        if url.scheme not in _PORTS or not host:
            raise ConfigurationError("the server URL should start with http:// or https://")
        if url.username is not None or url.query or url.fragment or server.endswith(("?", "#")):
            raise ConfigurationError(
                "the server URL should have no user, password, query or fragment"
            )
        if url.scheme == "http" and not (allow_http or _is_loopback(host)):
            raise ConfigurationError(
                f"http:// sends the token and the payloads to {host} unencrypted: use https://, or "
                "allow it explicitly (allow_http=True, --allow-http)"
            )
        return cls(url.scheme, host, port or _PORTS[url.scheme], url.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """The value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme and authority: the URL without its path."""
        return f"{self.scheme}://{self.authority}"

    @property
    def is_proxied(self) -> bool:
        """Whether the environment sets a proxy for this server."""
        proxies = getproxies()
        return bool(proxies.get(self.scheme) or proxies.get("all")) and not proxy_bypass(self.host)


def _is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _ServerTransport:
    """A context manager that closes the connections to one server."""

    # How many requests it may be called for at once.
    connections = _CONNECTIONS

    def __init__(self, url: ServerUrl, timeout_seconds: float, max_response_bytes: int) -> None:
        # Scheme, host and port of the server.
        self.origin = url.origin
        # The same with the path that comes before those of requests.
        self.base_url = f"{url.origin}{url.path}"
        self._timeout_seconds = timeout_seconds
        self._max_response_bytes = max_response_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. Idempotent."""


class HttpTransport(_ServerTransport):
    """Sends to one server over HTTP. Thread-safe."""

    def __init__(
        self,
        server: str,
        *,
        timeout_seconds: float = 30.0,
        connect_seconds: float = 10.0,
        max_response_bytes: int = _MAX_RESPONSE_BYTES,
        tls: ssl.SSLContext | None = None,
        allow_http: bool = False,
    ) -> None:
        """Take the server's URL, such as ``https://api.example`` (a path may follow).

        ``timeout_seconds`` is for the whole response, unless a send has its own. ``tls`` is for
        private certificate authorities; there is no way to turn verification off by a flag.
        ``allow_http`` permits ``http://`` to other machines. Where the environment sets a proxy
        (``HTTPS_PROXY`` and others), requests go through it, with httpx.
        """
        url = ServerUrl.parse(server, allow_http=allow_http)
        super().__init__(url, timeout_seconds, max_response_bytes)
        self._path = url.path
        fixed = {"Host": url.authority} | _HEADERS
        self._fixed = "\r\n".join(f"{name}: {value}" for name, value in fixed.items())
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._new = _connector(url, min(connect_seconds, timeout_seconds), tls)
        self._closed = False
        self._by_proxy: HttpxTransport | None = None
        if url.is_proxied:
            self._by_proxy = HttpxTransport(
                server,
                timeout_seconds=timeout_seconds,
                connect_seconds=connect_seconds,
                max_response_bytes=max_response_bytes,
                tls=tls,
                allow_http=allow_http,
            )

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()
        if self._by_proxy is not None:
            self._by_proxy.close()

    def reset(self) -> None:
        """Use new connections from now on, because the network may have changed."""
        while self._idle:
            try:
                self._idle.pop()[1].close()
            except IndexError:  # another thread took the last one
                break

    def send(
        self, request: Request, *, timeout_seconds: float | None = None
    ) -> Response | NoResponse:
        """Send a request once."""
        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        if self._by_proxy is not None:
            return self._by_proxy.send(request, timeout_seconds=seconds)
        begun = self.begin(request, timeout_seconds=seconds)
        response = begun if isinstance(begun, NoResponse) else begun.finish()
        if isinstance(response, NoResponse):
            self.reset()
        return response

    def begin_at_once(self, request: Request, *, timeout_seconds: float) -> "Exchange | None":
        """Write a request to an idle connection; None if that could take time."""
        is_small = request.body is None or len(request.body) <= _SMALL_BYTES
        connection = self._idle_connection() if is_small and self._by_proxy is None else None
        if connection is None:
            return None
        begun = self._begin(connection, request, timeout_seconds)
        return None if isinstance(begun, NoResponse) else begun

    def begin(self, request: Request, *, timeout_seconds: float) -> "Exchange | NoResponse":
        """Connect unless a connection is idle, and write a request. Not through a proxy."""
        connection = self._idle_connection() or self._new()
        return self._begin(connection, request, timeout_seconds)

    @property
    def is_direct(self) -> bool:
        """Whether ``begin`` may be used: there is no proxy."""
        return self._by_proxy is None

    def _begin(
        self, connection: _Connection, request: Request, seconds: float
    ) -> "Exchange | NoResponse":
        try:
            written = self._written(request)
        except ValueError:
            self._keep(connection)
            return _BAD_HEADER
        if connection.sock is None:
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                return _not_connected(_reason(error))
        exchange = Exchange(
            connection, request.method, seconds, self._max_response_bytes, self._keep
        )
        exchange.write(written)
        return exchange

    def _idle_connection(self) -> _Connection | None:
        """Return an idle connection that is still open."""
        while self._idle:
            try:
                since, connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if time.monotonic() - since < _KEEP_ALIVE_SECONDS and _is_quiet(connection.sock):
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        if connection.sock is not None and not self._closed and len(self._idle) < _MAX_IDLE:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()

    def _written(self, request: Request) -> bytes:
        """Return the request as bytes, in one piece: one packet if it fits."""
        lines = [f"{request.method} {self._path}{request.target} HTTP/1.1", self._fixed]
        for name, value in request.headers.items():
            line = f"{name}: {value}"
            if _FIELD.fullmatch(line) is None:
                raise ValueError
            lines.append(line)
        body = request.body
        if body is not None or request.method in _WITH_BODY:
            lines.append(f"Content-Length: {len(body or b'')}")
        if _TARGET.fullmatch(request.target) is None:
            raise ValueError
        return "\r\n".join([*lines, "", ""]).encode("ascii") + (body or b"")


class Exchange:
    """One request that is written to a connection, and its response."""

    def __init__(
        self,
        connection: _Connection,
        method: str,
        seconds: float,
        max_bytes: int,
        keep: Callable[[_Connection], None],
    ) -> None:
        self._connection = connection
        self._method = method
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._keep = keep
        self._failure: NoResponse | None = None
        self._deadline = 0.0

    def write(self, written: bytes) -> None:
        """Write the request. The time for the response begins when it is written."""
        try:
            self._connection.sock.settimeout(self._seconds)
            self._connection.sock.sendall(written)
        except TimeoutError:
            self._failure = _TOO_LONG
        except OSError:
            self._failure = _BROKE
        self._deadline = time.monotonic() + self._seconds

    def is_ready(self, seconds: float) -> bool:
        """Wait for the beginning of the response; returns whether it has come."""
        return self._failure is not None or not _is_quiet(self._connection.sock, seconds)

    def finish(self) -> Response | NoResponse:
        """Read the response; the connection is kept for others if that is possible."""
        reusable = False
        try:
            if self._failure is not None:
                return self._failure
            response, reusable = self._exchange(_Reading(self._deadline))
        finally:
            if reusable:
                self._keep(self._connection)
            else:
                self._connection.close()
        return response

    def abandon(self) -> None:
        """End the connection: a thread that waits in ``finish`` gets no response. Thread-safe."""
        sock = self._connection.sock
        if sock is not None:
            with suppress(OSError):
                # Not SSLSocket.shutdown, which changes what the other thread is using.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def _exchange(self, reading: "_Reading") -> tuple[Response | NoResponse, bool]:
        """Read; also returns whether the connection can be reused."""
        try:
            response = _TimedResponse(self._connection.sock, reading, self._method)
            response.begin()
            while response.status in _INFORMATIONAL:
                response.headers = response.msg = None  # type: ignore[assignment]
                response.begin()
            if reading.has_ended:
                return _CLOSED, False  # within the headers, which http.client would accept
            return self._read(response), response.isclosed() and not response.will_close
        except (http.client.HTTPException, EOFError):
            return _CLOSED, False
        except TimeoutError:
            return _TOO_SLOW if reading.has_begun else _TOO_LONG, False
        except (OSError, ValueError):  # ValueError: closed by another thread
            return _BROKE, False

    def _read(self, response: http.client.HTTPResponse) -> Response:
        most = self._max_bytes
        body = response.read(most + 1)
        if response.length and len(body) <= most:
            raise EOFError  # less came than Content-Length said
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Response(response.status, headers, body[:most], len(body) > most)


class _Reading:
    """Progress of reading one response: its deadline, and whether it has begun or ended."""

    __slots__ = ("deadline", "has_begun", "has_ended")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.has_begun = self.has_ended = False


class _TimedResponse(http.client.HTTPResponse):
    """A response that has to be complete by a deadline, however slowly it comes."""

    def __init__(self, sock: socket.socket, reading: _Reading, method: str) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, reading))


class _Timed(io.RawIOBase):
    """A socket's bytes, each read given only the time that is left."""

    def __init__(self, sock: socket.socket, reading: _Reading) -> None:
        self._sock = sock
        # Keeps the socket open until the response is read, also with `Connection: close`.
        self._raw = sock.makefile("rb", buffering=0)
        self._reading = reading

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._reading.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        size = self._raw.readinto(buffer)
        if size:
            self._reading.has_begun = True
        else:
            self._reading.has_ended = True
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


def _connector(
    url: ServerUrl, connect_seconds: float, tls: ssl.SSLContext | None
) -> Callable[[], _Connection]:
    if url.scheme == "http":
        return partial(_Connection, url.host, url.port, timeout=connect_seconds)
    context = tls or _verifying()
    return partial(
        http.client.HTTPSConnection,
        url.host,
        url.port,
        timeout=connect_seconds,
        context=context,
    )


def _verifying() -> ssl.SSLContext:
    """Return a verifying context, with certifi's authorities unless the environment names others.

    ``ssl`` reads ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` by itself. Without certifi it is the
    system's own store, which not every Python has.
    """
    if "SSL_CERT_FILE" in os.environ or "SSL_CERT_DIR" in os.environ:
        return ssl.create_default_context()
    try:
        import certifi  # noqa: PLC0415 - comes with httpx, and is needed for TLS only
    except ImportError:
        return ssl.create_default_context()
    return ssl.create_default_context(cafile=certifi.where())


def _is_quiet(sock: socket.socket | None, seconds: float = 0.0) -> bool:
    """Return whether nothing arrives in this time: no end, and no data."""
    if sock is None:
        return False
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(int(seconds * 1000))
    return not select.select([sock], [], [], seconds)[0]


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is not valid: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "the server took too long"
    return error.strerror or type(error).__name__


class HttpxTransport(_ServerTransport):
    """Sends to one server with httpx: through a proxy, or with any transport of httpx.

    It keeps the same rules as ``HttpTransport``, which is faster and the default without a proxy.
    """

    def __init__(
        self,
        server: str,
        *,
        timeout_seconds: float = 30.0,
        connect_seconds: float = 10.0,
        max_response_bytes: int = _MAX_RESPONSE_BYTES,
        tls: ssl.SSLContext | None = None,
        transport: "httpx.BaseTransport | None" = None,
        allow_http: bool = False,
    ) -> None:
        """See ``HttpTransport``; ``transport`` is one of httpx's transports."""
        with needs_extra("", "onceward-outbox"):
            import httpx  # noqa: PLC0415 - an optional dependency

        url = ServerUrl.parse(server, allow_http=allow_http)
        super().__init__(url, timeout_seconds, max_response_bytes)
        self._connect_seconds = connect_seconds
        self._http = httpx.Client(
            verify=tls if tls is not None else True,
            timeout=httpx.Timeout(timeout_seconds, connect=min(connect_seconds, timeout_seconds)),
            follow_redirects=False,
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS),
            transport=transport,
        )
        self._http.headers = httpx.Headers(_HEADERS)

    def close(self) -> None:
        self._http.close()

    def send(  # noqa: PLR0911 - one for each error
        self, request: Request, *, timeout_seconds: float | None = None
    ) -> Response | NoResponse:
        """Send a request once."""
        import httpx  # noqa: PLC0415 - an optional dependency

        seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        try:
            built = self._http.build_request(
                request.method,
                self.base_url + request.target,
                headers=request.headers,
                content=request.body,
                timeout=httpx.Timeout(seconds, connect=min(self._connect_seconds, seconds)),
            )
            response = self._http.send(built, stream=True)
            try:
                return self._read(response, deadline)
            finally:
                response.close()
                # A cookie of one user must not be sent with another's request.
                self._http.cookies.clear()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            return _not_connected(str(error) or type(error).__name__)
        except (httpx.ProxyError, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            return _not_connected(type(error).__name__)
        except httpx.LocalProtocolError:
            return _BAD_HEADER
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            return _TOO_LONG
        except (httpx.ReadError, httpx.WriteError):
            return _BROKE
        except httpx.RemoteProtocolError:
            return _CLOSED
        except httpx.TransportError as error:
            return NoResponse(f"no response: {type(error).__name__}")

    def _read(self, response: "httpx.Response", deadline: float) -> Response | NoResponse:
        most, body = self._max_response_bytes, bytearray()
        # Responses of httpx's mock transports have been read already.
        stream = [response.content] if response.is_stream_consumed else response.iter_raw()
        for part in stream:
            body += part
            if len(body) > most:
                break
            if time.monotonic() > deadline:
                return _TOO_SLOW
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Response(response.status_code, headers, bytes(body[:most]), len(body) > most)
