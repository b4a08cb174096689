"""Carrying one request to the configured server and its answer back. Nothing is decided here.

What the transport will not do: follow a redirect, keep a cookie, read without end, log a body or a
token, or talk to a server whose certificate does not hold.

It is the standard library's ``http.client``: on a quick network most of the time of a send is the
client's own, and this one takes less than half of what httpx does. Proxies are left to httpx.
"""

import http.client
import io
import os
import re
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Self

from holdfast.outbox.exchange import Answer, NoAnswer, Request, Transport
from holdfast.outbox.server_address import ServerAddress

__all__ = ["Answer", "HttpTransport", "NoAnswer", "Request", "Transport"]

_MAX_ANSWER_BYTES: Final = 4_194_304
"""More than any answer to one entry: what is longer is not read to its end."""

_KEEP_ALIVE_SECONDS: Final = 2.0
"""Shorter than servers keep an idle connection. On one that the server has just closed a send gets
no answer, and then nobody knows what became of it."""

_MOST_IDLE: Final = 8
"""Connections that are kept: more threads than this do not send for one outbox."""

_INFORMATIONAL: Final = range(100, 200)
_TOO_LONG: Final = NoAnswer("no answer: the server took too long")
_TOO_SLOW: Final = NoAnswer("no answer: it came too slowly")
_CLOSED: Final = NoAnswer("no answer: the connection was closed")
_BROKE: Final = NoAnswer("no answer: the connection broke")

# Not compressed: a small answer could turn into a very large one.
_HEADERS: Final = "Accept: application/json\r\nAccept-Encoding: identity\r\nUser-Agent: holdfast"
_FIELD: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [\t\x20-\x7e]*")
_TARGET: Final = re.compile(r"/[\x21-\x7e]*")
_WITH_BODY: Final = frozenset({"POST", "PUT", "PATCH"})

_Connection = http.client.HTTPConnection


class HttpTransport:
    """Sends to one server over HTTP."""

    def __init__(
        self,
        server: str,
        *,
        timeout_seconds: float = 30.0,
        connect_seconds: float = 10.0,
        max_answer_bytes: int = _MAX_ANSWER_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Take the server's address, such as ``https://api.example`` (a path may follow).

        ``timeout_seconds`` is for the whole of an answer. ``tls`` is for private certificate
        authorities; there is no way to turn verification off by a flag. Where the environment
        names a proxy (``HTTPS_PROXY`` and its kin), requests go through it, with httpx.
        """
        address = ServerAddress.parse(server)
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        self.origin = f"{address.scheme}://{address.authority}"
        self._path = address.path
        self._fixed = f"Host: {address.authority}\r\n{_HEADERS}"
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._new = _connector(address, min(connect_seconds, timeout_seconds), tls)
        self._closed = False
        self._by_proxy: Any = None
        if address.is_proxied:
            from holdfast.outbox.httpx_transport import HttpxTransport  # noqa: PLC0415 - see above

            self._by_proxy = HttpxTransport(
                server,
                timeout_seconds=timeout_seconds,
                connect_seconds=connect_seconds,
                max_answer_bytes=max_answer_bytes,
                tls=tls,
            )

    def __enter__(self) -> Self:
        """Open with a ``with``."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        while self._idle:
            self._idle.pop()[1].close()
        if self._by_proxy is not None:
            self._by_proxy.close()

    def send(self, request: Request) -> Answer | NoAnswer:
        """Send a request once."""
        if self._by_proxy is not None:
            return self._by_proxy.send(request)  # type: ignore[no-any-return]
        deadline = time.monotonic() + self._timeout_seconds
        try:
            written = self._written(request)
        except ValueError:
            # The error's own text would repeat the header that it is about.
            return NoAnswer("the request has a header that cannot be sent", left=False)
        connection = self._connection()
        if connection.sock is None:
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                return NoAnswer(f"could not connect: {_reason(error)}", left=False)
        reusable = False
        try:
            answer, reusable = self._exchange(connection.sock, request.method, written, deadline)
        finally:
            if reusable and not self._closed and len(self._idle) < _MOST_IDLE:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()
        return answer

    def _connection(self) -> _Connection:
        """Return a connection that is open and quiet, or a new one."""
        while self._idle:
            try:
                since, connection = self._idle.pop()
            except IndexError:  # another thread took the last one
                break
            if time.monotonic() - since < _KEEP_ALIVE_SECONDS and _is_quiet(connection.sock):
                return connection
            connection.close()
        return self._new()

    def _written(self, request: Request) -> bytes:
        """Return the request as bytes: in one piece, so that it is one packet if it fits."""
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

    def _exchange(
        self, sock: socket.socket, method: str, written: bytes, deadline: float
    ) -> tuple[Answer | NoAnswer, bool]:
        """Send and read; returns too whether the connection can be used again."""
        reading = _Reading(deadline)
        try:
            sock.settimeout(self._timeout_seconds)
            sock.sendall(written)
            response = _Response(sock, reading, method)
            response.begin()
            while response.status in _INFORMATIONAL:
                response.headers = response.msg = None  # type: ignore[assignment]
                response.begin()
            if reading.has_ended:
                return _CLOSED, False  # within the head, which http.client would take as it is
            return self._read(response), response.isclosed() and not response.will_close
        except (http.client.HTTPException, EOFError):
            return _CLOSED, False
        except TimeoutError:
            return _TOO_SLOW if reading.has_begun else _TOO_LONG, False
        except OSError:
            return _BROKE, False

    def _read(self, response: http.client.HTTPResponse) -> Answer:
        most = self._max_answer_bytes
        body = response.read(most + 1)
        if response.length and len(body) <= most:
            raise EOFError  # less came than was promised
        headers = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, headers, body[:most], len(body) > most)


class _Reading:
    """How one answer comes in: until when it may, and whether it has begun or ended."""

    __slots__ = ("deadline", "has_begun", "has_ended")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.has_begun = self.has_ended = False


class _Response(http.client.HTTPResponse):
    """An answer that has to be complete by a certain time, however slowly it trickles in."""

    def __init__(self, sock: socket.socket, reading: _Reading, method: str) -> None:
        super().__init__(sock, method=method)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, reading))


class _Timed(io.RawIOBase):
    """A socket's bytes, each read given only the time that is left."""

    def __init__(self, sock: socket.socket, reading: _Reading) -> None:
        self._sock = sock
        # Keeps the socket open until the answer is read, also if the server said to close it.
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
    address: ServerAddress, connect_seconds: float, tls: ssl.SSLContext | None
) -> Callable[[], _Connection]:
    if address.scheme == "http":
        return partial(_Connection, address.host, address.port, timeout=connect_seconds)
    context = tls or _verifying()
    return partial(
        http.client.HTTPSConnection,
        address.host,
        address.port,
        timeout=connect_seconds,
        context=context,
    )


def _verifying() -> ssl.SSLContext:
    """Return what verifies certificates, by certifi's authorities unless the system names others.

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


def _is_quiet(sock: socket.socket | None) -> bool:
    """Say whether nothing has come while it was idle: no end, and no word nobody asked for."""
    if sock is None:
        return False
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return not poll.poll(0)
    return not select.select([sock], [], [], 0)[0]


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate does not hold: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "the server took too long"
    return error.strerror or type(error).__name__
