"""The WSGI face of the intake: Flask, Bottle, any WSGI app. Nothing leaves before the commit.

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

from holdfast.core.idempotency_record import Reply
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
        """The guarded request being served: who called, its ids, ``enqueue``."""
        return self._bridge.execution

    @property
    def transaction(self) -> SyncTransaction:
        """What the guarded handler being served must write in. Commits with its answer."""
        return self.execution.transaction

    def close(self) -> None:
        """Close the store."""
        self._bridge.close()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
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
        """Run the WSGI app in its thread, as the app of the ASGI middleware."""
        message = await receive()
        environ, body = scope[_ENVIRON], message["body"]
        execution = scope[SCOPE_KEY]
        most = execution.call.policy.max_response_bytes

        def handle() -> Reply:
            return _collect(self._app, environ, body, most)

        reply = await self._bridge.run_in_thread(execution, handle)
        start = {"type": "http.response.start", "status": reply.status, "headers": reply.headers}
        await send(start)
        await send({"type": "http.response.body", "body": reply.body})


def _collect(app: WsgiApp, environ: Environ, body: bytes, most: int) -> Reply:
    """Run the app and take its whole answer."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if exc_info is not None:
            started.clear()
        started.append((status, headers))
        return written.append

    environ = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    answer = app(environ, start_response)
    try:
        size = 0
        for chunk in answer:
            size += len(chunk)
            if size > most:
                raise ResponseTooLargeError(
                    f"the answer has more than {most} bytes: that cannot be stored for a replay"
                )
            written.append(chunk)
    finally:
        close = getattr(answer, "close", None)
        if close is not None:
            close()
    status, headers = started[-1]
    pairs = tuple((n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers)
    return Reply(int(status.split(" ", 1)[0]), pairs, b"".join(written))


def _read_body(environ: Environ, match: Match) -> bytes:
    """Read no more than may be; the middleware tells the client when it was too much."""
    limit = match.policy.max_body_bytes
    source = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or ""
    if length.isdigit():
        return bytes(source.read(min(int(length), limit + 1)))
    if environ.get("wsgi.input_terminated") or "HTTP_TRANSFER_ENCODING" in environ:
        return bytes(source.read(limit + 1))
    return b""


def _headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """Give the headers back their names. WSGI joins equal ones with a comma."""
    found = []
    for name, value in environ.items():
        if name.startswith("HTTP_"):
            wire = name[5:]
        elif name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            wire = name
        else:
            continue
        if value != "":
            header = wire.replace("_", "-").lower().encode("latin-1")
            found += [(header, part) for part in split_header(header, str(value))]
    return found


def split_header(name: bytes, value: str) -> list[bytes]:
    """Take apart what WSGI has joined: two keys in one request must not become a third.

    So a bare key cannot hold a comma here; a quoted one can.
    """
    if name == b"idempotency-key" and not value.lstrip().startswith('"'):
        return [part.strip().encode("latin-1") for part in value.split(",")]
    return [value.encode("latin-1", "replace")]


def _path(environ: Environ) -> str:
    """Return the decoded path: WSGI's is latin-1, whatever it really is."""
    raw = environ.get("PATH_INFO", "") or "/"
    return str(raw).encode("latin-1").decode("utf-8", "replace")


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
