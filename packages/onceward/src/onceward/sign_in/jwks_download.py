"""Downloads a JWKS with one deadline for everything, a size limit and no redirects.

The time-outs of ``urllib`` and ``http.client`` are per read: a server that sends one byte every few
seconds would keep a download running for hours.
"""

import io
import ssl
import time
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from socket import socket
from typing import Any, Final
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

__all__ = ["MAX_BYTES", "download"]

MAX_BYTES: Final = 1024 * 1024


def download(url: str, timeout_seconds: float) -> bytes:
    """Return the body of a 200 response. Blocks, for about ``timeout_seconds`` at most.

    Raises ``OSError``, ``HTTPException`` or ``ValueError``. Proxies come from the environment.
    """
    opener = build_opener(_NoRedirect, _HttpHandler, _HttpsHandler)
    with opener.open(url, timeout=timeout_seconds) as response:
        raw: bytes = response.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes")
    return raw


class _NoRedirect(HTTPRedirectHandler):
    """Follows no redirect: urllib then raises the status as an error."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """Return None, which refuses the redirect."""


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until a deadline, however often bytes arrive."""

    def __init__(self, connection: socket, deadline: float) -> None:
        self._connection = connection
        # Keeps the socket open after the connection object is closed.
        self._file: Any = connection.makefile("rb", buffering=0)
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the download takes too long")
        self._connection.settimeout(remaining)
        read: int | None = self._file.readinto(buffer)
        return read

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket, *args: Any, deadline: float, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        with self.fp:
            self.fp = io.BufferedReader(_DeadlineReader(sock, deadline))


class _HttpConnection(HTTPConnection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_class: Any = partial(_Response, deadline=_deadline(self))


class _HttpsConnection(HTTPSConnection):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.response_class: Any = partial(_Response, deadline=_deadline(self))


class _HttpHandler(HTTPHandler):
    def http_open(self, req: Request) -> Any:
        return self.do_open(_HttpConnection, req)


class _HttpsHandler(HTTPSHandler):
    def https_open(self, req: Request) -> Any:
        return self.do_open(_HttpsConnection, req, context=ssl.create_default_context())


def _deadline(connection: HTTPConnection) -> float:
    return time.monotonic() + (connection.timeout or 0.0)
