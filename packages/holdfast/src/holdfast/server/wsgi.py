"""WSGI middleware for Flask, Bottle or any WSGI app. Nothing is sent before the commit.

::

    app = Flask(__name__)
    guard = WsgiGuard(app.wsgi_app, Holdfast("sqlite:///shop.db"))
    guard.holdfast.guard_path("POST", "/orders")
    app.wsgi_app = guard

    @app.post("/orders")
    def order():
        guard.transaction.execute("INSERT …", {…})
"""

import io
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, Final

from holdfast.core.idempotency_record import Response
from holdfast.errors import ResponseTooLargeError
from holdfast.server.app import Holdfast
from holdfast.server.asgi import SCOPE_KEY
from holdfast.server.route_table import SAFE_METHODS, Match
from holdfast.server.sync_bridge import Bridge, SyncExecution, SyncTransaction

__all__ = ["WsgiGuard", "split_header"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]

_ENVIRON: Final = "holdfast.environ"


class WsgiGuard:
    """Guards the operations of a WSGI app that were named with ``holdfast.guard_path``."""

    def __init__(self, app: WsgiApp, holdfast: Holdfast) -> None:
        """Wrap an app. The store is opened at the first guarded request of each process."""
        self.holdfast = holdfast
        self._app = app
        self._bridge = Bridge(holdfast)
        self._middleware = holdfast.middleware(self._inner)

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served: caller, ids, ``enqueue``."""
        return self._bridge.execution

    @property
    def transaction(self) -> SyncTransaction:
        """The transaction the guarded handler must write in. It commits with the response."""
        return self.execution.transaction

    def close(self) -> None:
        """Close the store. Call it when the process ends."""
        self._bridge.close()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one WSGI request."""
        method, path = environ["REQUEST_METHOD"], _path(environ)
        match = None if method in SAFE_METHODS else self.holdfast.table().find(method, path)
        if match is None:
            return self._app(environ, start_response)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
            "headers": _headers(environ),
            _ENVIRON: environ,
        }
        status, headers, body = self._bridge.serve(
            self._middleware, scope, _read_body(environ, match)
        )
        start_response(
            f"{status} {_reason(status)}",
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers],
        )
        return [body]

    async def _inner(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the WSGI app in the request's thread; the app inside the ASGI middleware."""
        message = await receive()
        environ, body = scope[_ENVIRON], message["body"]
        execution = scope[SCOPE_KEY]
        max_bytes = execution.request.policy.max_response_bytes

        def handle() -> Response:
            return _collect(self._app, environ, body, max_bytes)

        await self._bridge.run_handler(execution, handle, send)


def _collect(app: WsgiApp, environ: Environ, body: bytes, max_bytes: int) -> Response:
    """Run the app and return its complete response."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if exc_info is not None:
            started.clear()
        started.append((status, headers))
        return written.append

    environ = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    chunks = app(environ, start_response)
    try:
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if size > max_bytes:
                raise ResponseTooLargeError(
                    f"the response has more than {max_bytes} bytes, too many to store for a replay"
                )
            written.append(chunk)
    finally:
        close = getattr(chunks, "close", None)
        if close is not None:
            close()
    status, headers = started[-1]
    pairs = tuple((n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers)
    return Response(int(status.split(" ", 1)[0]), pairs, b"".join(written))


def _read_body(environ: Environ, match: Match) -> bytes:
    """Read at most one byte over the limit; the middleware then responds with 413."""
    limit = match.policy.max_body_bytes
    source = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or ""
    if length.isdigit():
        return bytes(source.read(min(int(length), limit + 1)))
    if environ.get("wsgi.input_terminated") or "HTTP_TRANSFER_ENCODING" in environ:
        return bytes(source.read(limit + 1))
    return b""


def _headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """Restore the names of the headers. WSGI has joined equal ones with a comma."""
    found = []
    for name, value in environ.items():
        if name.startswith("HTTP_"):
            field = name[5:]
        elif name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            field = name
        else:
            continue
        if value != "":
            header = field.replace("_", "-").lower().encode("latin-1")
            found += [(header, part) for part in split_header(header, str(value))]
    return found


def split_header(name: bytes, value: str) -> list[bytes]:
    """Split the keys that WSGI has joined: two keys in one request must not become a third.

    So a bare key cannot contain a comma here; a quoted one can.
    """
    if name == b"idempotency-key" and not value.lstrip().startswith('"'):
        return [part.strip().encode("latin-1") for part in value.split(",")]
    return [value.encode("latin-1", "replace")]


def _path(environ: Environ) -> str:
    """Return the path as UTF-8: WSGI passes its bytes as latin-1."""
    raw = environ.get("PATH_INFO", "") or "/"
    return str(raw).encode("latin-1").decode("utf-8", "replace")


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
