"""WSGI middleware for any WSGI app, by method and path. Nothing is sent before the commit.

::

    onceward = Onceward("sqlite:///shop.db", identify=…)
    onceward.guard_path("POST", "/orders")
    guard = WsgiGuard(app, onceward)     # serve this one

The caller is identified from the request's head. Flask and Django have their own integrations,
which decide after the app's sign-in: ``onceward.flask`` and ``onceward.django``.
"""

import hashlib
import io
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from http import HTTPStatus
from typing import IO, Any

import msgspec

from onceward.app import Onceward
from onceward.batch.options import BatchOptions
from onceward.errors import BodyInvalidError, ResponseTooLargeError
from onceward.frameworks.sync_bridge import (
    Bridge,
    Served,
    SyncBatch,
    SyncExecution,
    SyncRequest,
    batch_options,
)
from onceward.frameworks.views import no_caller
from onceward.guard.request import RequestHead
from onceward.guard.route_table import SAFE_METHODS
from onceward.records import Response
from onceward_protocol.keys import split_joined_keys

__all__ = [
    "WsgiGuard",
    "collect",
    "head_of",
    "incomplete_body",
    "parsed_form",
    "read_body",
    "send_served",
    "with_content_type",
]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]


class WsgiGuard:
    """Guards the operations of a WSGI app that were named with ``onceward.guard_path``."""

    def __init__(
        self, app: WsgiApp, onceward: Onceward, *, batch: str | BatchOptions | None = None
    ) -> None:
        """Wrap an app. The store is opened at the first guarded request of each process.

        ``batch`` is the path of an endpoint that takes many guarded requests in one, or its
        options. Each request of a batch has its own transaction.
        Raises ``ConfigurationError`` if the Onceward has neither ``identify`` nor ``tenants``.
        """
        if not onceward.runtime.callers.has_identify:
            raise no_caller(
                "WsgiGuard(app, onceward) guards an app",
                "Onceward(…, identify=…) with a function of the request's head that returns "
                "Principal(tenant=…, actor=…)",
                "Onceward(…, tenants=SINGLE_TENANT)",
            )
        # The object that was given.
        self.onceward = onceward
        self._app = app
        self._bridge = Bridge(onceward)
        options = batch_options(batch)
        self._batch = (
            None
            if options is None
            else SyncBatch(self._bridge, options, identify=self._bridge.identify)
        )

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served: caller, ids, ``enqueue``."""
        return self._bridge.execution

    @property
    def transaction(self) -> Any:
        """The transaction the guarded handler must write in. It commits with the response."""
        return self.execution.transaction

    def close(self) -> None:
        """Close the store. Call it when the process ends."""
        self._bridge.close()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one WSGI request."""
        # Apps convert the method to upper case, and would run ``post`` as POST.
        method, path = environ["REQUEST_METHOD"].upper(), _path(environ)
        if self._batch is not None and (method, path) == ("POST", self._batch.options.path):
            return self._serve_batch(self._batch, environ, start_response)
        match = (
            None
            if method in SAFE_METHODS
            else self.onceward.runtime.routes.table().find(method, path)
        )
        if match is None:
            return self._app(environ, start_response)
        batch, prefix = self._batch, environ.get("SCRIPT_NAME", "")
        # Read after the sign-in, in this thread, and once more by the app.
        body = cache(lambda: read_body(environ, match.policy.max_body_bytes))
        served = self._bridge.serve(
            SyncRequest(
                head=head_of(environ, method, path),
                match=match,
                body=body,
                handle=lambda: self._handle(environ, body(), match.policy.max_response_bytes),
                added_headers=() if batch is None else (batch.options.header(prefix),),
            )
        )
        return send_served(served, start_response)

    def _handle(self, environ: Environ, body: bytes, max_bytes: int) -> Response:
        """Run the app. A 500 after its connection was lost is an outage: apps hide the error."""
        response = _collect(self._app, environ, body, max_bytes)
        if response.status == HTTPStatus.INTERNAL_SERVER_ERROR:
            self.execution.refuse_lost_connection()
        return response

    def _serve_batch(
        self, batch: SyncBatch, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        served = batch.serve(
            head_of(environ, "POST", batch.options.path),
            environ,
            read=lambda limit: read_body(environ, limit),
            find=self.onceward.runtime.routes.table().find,
            run=lambda item: collect(self, item),
        )
        return send_served(served, start_response)


def send_served(served: Served, start_response: StartResponse) -> list[bytes]:
    """Send a response to the WSGI server."""
    start_response(
        f"{served.status} {_reason(served.status)}",
        [(name.decode("latin-1"), value.decode("latin-1")) for name, value in served.headers],
    )
    return [served.body]


def _collect(app: WsgiApp, environ: Environ, body: bytes, max_bytes: int) -> Response:
    """Run the app with a body that was read, and return its complete response."""
    environ = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    # A file that the server would send, e.g. by its path, could not be stored.
    environ.pop("wsgi.file_wrapper", None)
    return collect(app, environ, max_bytes)


def collect(app: WsgiApp, environ: Environ, max_bytes: int | None = None) -> Response:
    """Run an app and return its complete response. Raises ``ResponseTooLargeError``."""
    started: list[tuple[str, list[tuple[str, str]]]] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Any:
        if exc_info is not None:
            started.clear()
        started.append((status, headers))
        return written.append

    chunks = app(environ, start_response)
    try:
        size = 0
        for chunk in chunks:
            size += len(chunk)
            if max_bytes is not None and size > max_bytes:
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


def read_body(environ: Environ, limit: int) -> bytes:
    """Read at most one byte over the limit; the middleware then responds with 413.

    Raises ``BodyInvalidError`` if the client disconnects before the body is complete.
    """
    source = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or ""
    if length.isdigit():
        wanted = min(int(length), limit + 1)
        body = bytearray()
        while len(body) < wanted and (part := source.read(wanted - len(body))):
            body += part
        if len(body) < wanted:
            raise incomplete_body(len(body), wanted)
        return bytes(body)
    if environ.get("wsgi.input_terminated") or "HTTP_TRANSFER_ENCODING" in environ:
        return bytes(source.read(limit + 1))
    return b""


def incomplete_body(received: int, declared: int) -> BodyInvalidError:
    """Return the error for a body that broke off."""
    return BodyInvalidError(
        f"the body ended after {received} bytes, before its Content-Length of {declared}"
    )


def head_of(environ: Environ, method: str, path: str) -> RequestHead:
    """Return the head of a WSGI request."""
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    return RequestHead(method, path, query, _headers(environ))


def parsed_form(
    fields: Iterable[tuple[str, str]], files: Iterable[tuple[str, str, IO[bytes]]]
) -> bytes:
    """Return one form as bytes to hash, where the framework has read the body already.

    Files are triples of field, file name and content; the content is read from its start.
    """
    digests = []
    for field, name, content in files:
        content.seek(0)
        digest = hashlib.sha256()
        while chunk := content.read(64 * 1024):
            digest.update(chunk)
        content.seek(0)
        digests.append((field, name, digest.hexdigest()))
    return msgspec.json.encode([list(fields), digests])


def with_content_type(head: RequestHead, content_type: bytes) -> RequestHead:
    """Return a head with another content type, in place of one with a random boundary."""
    headers = [pair for pair in head.headers if pair[0] != b"content-type"]
    headers.append((b"content-type", content_type))
    return RequestHead(head.method, head.path, head.query, headers)


def _headers(environ: Environ) -> list[tuple[bytes, bytes]]:
    """Restore the names of the headers. WSGI has joined equal ones with a comma."""
    found: list[tuple[bytes, bytes]] = []
    for name, value in environ.items():
        if name[:5] == "HTTP_":
            # An empty one was sent, too: an empty key is refused, not taken for no key.
            if name == "HTTP_IDEMPOTENCY_KEY":
                raw = str(value).encode("latin-1", "replace")
                found += [(b"idempotency-key", part) for part in split_joined_keys(raw)]
            else:
                found.append((_field(name[5:]), str(value).encode("latin-1", "replace")))
        elif name in ("CONTENT_TYPE", "CONTENT_LENGTH") and value != "":
            # Servers set these two to "" when the client sent none.
            found.append((_field(name), str(value).encode("latin-1", "replace")))
    return found


@lru_cache(maxsize=256)
def _field(name: str) -> bytes:
    return name.replace("_", "-").lower().encode("latin-1")


def _path(environ: Environ) -> str:
    """Return the path as UTF-8: WSGI passes its bytes as latin-1."""
    raw = environ.get("PATH_INFO", "") or "/"
    return str(raw).encode("latin-1").decode("utf-8", "replace")


def _reason(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
