"""WSGI middleware, and what guards sync functions: the views of Flask and Django, whole WSGI apps.

::

    onceward = Onceward("sqlite:///shop.db", identify=…)
    onceward.guard_path("POST", "/orders")
    guard = WsgiGuard(app, onceward)     # serve this one

``WsgiGuard`` identifies the caller from the request's head. Flask and Django have their own
integrations, which decide after the app's sign-in: ``onceward.flask`` and ``onceward.django``.

The pipeline is the same as for ASGI; only the thread differs. Stores that work in the request's
thread, such as Django's, need no event loop. For other stores the pipeline runs on an event loop in
its own thread, and the function runs in the request's thread, where the framework expects it.

::

    request thread  ──request───▶  loop: Pipeline ──▶ claim
         view       ◀──run───────  loop
                    ──response──▶  loop ──▶ commit
                    ◀──reply─────  loop

Each item of a batch is a request to the whole app, with its own transaction and record, in the
thread of the batch. Nothing is sent before the commit.
"""

import asyncio
import hashlib
import inspect
import io
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from http import HTTPStatus
from http.client import responses
from typing import IO, Any, Final, NamedTuple, Unpack

import msgspec

from onceward.app import Onceward
from onceward.batch.endpoint import BatchEndpoint
from onceward.batch.options import BatchOptions
from onceward.batch.run import FindRoute, ItemCall, ItemRequest
from onceward.errors import (
    BodyInvalidError,
    ConfigurationError,
    LengthRequiredError,
    NoTransactionError,
    RequestError,
    ResponseTooLargeError,
    StoreUnavailableError,
    StreamingResponseError,
)
from onceward.frameworks.views import no_caller
from onceward.guard.execution import Exchange, Execution, executing, find_execution
from onceward.guard.idempotency import Idempotency
from onceward.guard.pipeline import ADDED_HEADERS, Reply, complete, log_outage, render
from onceward.guard.policy import Policy
from onceward.guard.request import (
    SHARED_PRINCIPAL,
    Headers,
    Identify,
    Principal,
    RequestHead,
)
from onceward.guard.request_body import WholeBody
from onceward.guard.request_thread import (
    DirectThread,
    QueueThread,
    has_request_thread,
    run_in_request_thread,
    wait_in_request_thread,
)
from onceward.guard.route_table import SAFE_METHODS, Guard, Match
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.records import Response
from onceward.stores.sessions.gate import end_visit
from onceward.stores.threads import SyncTransaction
from onceward_protocol.keys import split_joined_keys

__all__ = ["WsgiGuard"]

Environ = dict[str, Any]
_StartResponse = Callable[..., Any]
_WsgiApp = Callable[[Environ, _StartResponse], Iterable[bytes]]

NO_POLICY: Final = Policy()
"""In the guard of a view without a policy: the default of its Onceward counts."""

_CLOSE_SECONDS: Final = 30.0
# Frameworks keep what they have read of the request of the batch under these names.
_OF_FRAMEWORKS: Final = ("werkzeug.", "flask.", "HTTP_", "CONTENT_")
_OF_SERVER: Final = ("REQUEST_URI", "RAW_URI", "wsgi.file_wrapper", "wsgi.input_terminated")

# Servers that raise where a body in chunks breaks off. Others may end it there, as Granian does.
_RAISE_AT_A_BREAK: Final = ("gunicorn", "werkzeug")

# Runs the view; returns its response, and the object of the framework that it was made from.
Handle = Callable[[], tuple[Response, Any]]


class Served(NamedTuple):
    """A reply, for a framework to send."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    # The view's own object, if the reply is its response: it may have callbacks, and extensions
    # look at its type. ``add_to_own`` gives it the headers of the guard.
    own: Any = None

    @property
    def text_headers(self) -> list[tuple[str, str]]:
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers]

    def add_to_own(self) -> Any:
        """Add the headers of the guard to the view's own response, and return it."""
        for name, value in self.headers:
            if name in ADDED_HEADERS:
                self.own.headers[name.decode("latin-1")] = value.decode("latin-1")
        return self.own

    def send(self, start_response: _StartResponse) -> list[bytes]:
        """Send the reply to the WSGI server."""
        reason = responses.get(self.status, "Unknown")
        start_response(f"{self.status} {reason}", self.text_headers)
        return [self.body]


class SyncExecution:
    """The ``Execution`` of a sync handler. What does not wait is that of the ``Execution``."""

    def __init__(self, onceward: Onceward, execution: Execution) -> None:
        self._onceward = onceward
        self._execution = execution
        self.request = execution.request
        self.describe = execution.describe
        self.keep_writes_on_error = execution.keep_writes_on_error
        self.no_store = execution.no_store
        self.store_for = execution.store_for
        # The callback must not block: other requests wait for it.
        self.after_commit = execution.after_commit

    @property
    def transaction(self) -> Any:
        """The transaction to write in: the app's own session, where the store has a sync one."""
        if self._execution.unit.is_sync:
            return self._execution.transaction
        return SyncTransaction(wait_in_request_thread, self._execution.statements)

    def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue a job in this transaction. Takes the options of ``Onceward.enqueue``."""
        enqueue = self._onceward.runtime.enqueue
        return wait_in_request_thread(enqueue(self._execution, job_type, payload, **options))


class Bridge:
    """Guards functions of the sync apps of one process."""

    def __init__(
        self, onceward: Onceward, principal: Callable[..., Principal] | None = None
    ) -> None:
        """``principal`` returns the caller. None: ``Onceward.identify``, or the framework's user.

        The loop starts at the first request: servers fork after the app is loaded.
        """
        if principal is not None and onceward.runtime.callers.is_single_tenant:
            raise ConfigurationError(
                "principal says who callers are, but tenants=SINGLE_TENANT that they are not kept "
                "apart: give one of them"
            )
        # ``onceward worker --app`` looks for this name.
        self.onceward = onceward
        self.principal = principal
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._starting = threading.Lock()
        store = onceward.store
        # Whether all the async code can run in the request's thread. Caches and limiters cannot.
        self._is_direct = (
            store.runs_in_request_thread
            and onceward.runtime.idempotency.cache is None
            and onceward.runtime.config.limiter is None
        )
        # Limits how many requests use the app's connection pool at once.
        self.gate = store.thread_gate
        # For all requests: it holds its lock for each step of the async code.
        self._direct = DirectThread(threading.RLock())
        self._is_open = False
        self._opening = threading.Lock()
        # By the ids of those given.
        self._guards: dict[int, tuple[Guard, Guard]] = {}
        self.error_format = onceward.runtime.config.error_format
        self.pipeline = onceward.runtime.pipeline(ready=self.ready, identify=self.identify)

    @property
    def execution(self) -> SyncExecution:
        """The execution of the handler that runs in this thread."""
        found = find_execution()
        if found is None or not has_request_thread():
            raise NoTransactionError("there is no guarded request here: guard the operation first")
        return SyncExecution(self.onceward, found)

    @property
    def is_serving(self) -> bool:
        """Whether a guarded handler runs in this thread."""
        # Below the guard of an ASGI app, the execution is that app's.
        return has_request_thread() and find_execution() is not None

    def guard_for(self, given: Guard, view: str) -> Guard:
        """Return the guard of a view, with the default policy if it has none.

        Raises ``ConfigurationError`` for a rate limit that nothing would count.
        """
        found = self._guards.get(id(given))
        if found is None:
            runtime = self.onceward.runtime
            policy = runtime.policy_or_default(None if given.policy is NO_POLICY else given.policy)
            if policy.rate_limit is not None:
                if runtime.config.limiter is None:
                    raise ConfigurationError(
                        f"{view} has a rate limit but no limiter is configured: give Onceward "
                        "one, e.g. limiter=LimitsRateLimiter() of onceward.guard.rate_limits"
                    )
                runtime.config.limiter.check(policy.rate_limit)
            # With the given one: its id must not be that of another.
            found = self._guards[id(given)] = given, Guard(policy, given.endpoint)
        return found[1]

    def serve(
        self,
        head: RequestHead,
        match: Match,
        body: bytes | Callable[[], bytes],
        handle: Handle,
        *,
        principal: Callable[[], Principal] | None = None,
        added_headers: Headers = (),
    ) -> Served:
        """Replay, refuse or run one request. Raises what its handler raises.

        ``body`` may be a function that reads it after the sign-in. ``principal`` returns the
        caller; None: ``Onceward.identify`` does, from the head. Every response has
        ``added_headers``.
        """
        head = _with_split_keys(head, match.policy.key_header.lower().encode("latin-1"))
        exchange = Exchange(
            head,
            match,
            self.pipeline,
            error_format=self.error_format,
            added_headers=added_headers,
        )
        # Not a method: the exchange would refer to what refers to it.
        exchange.identify = lambda head: self.identify(head, principal)
        whole = WholeBody(body, head, match.policy, self.onceward.runtime.bodies)
        call = _SyncCall(whole, handle)
        if self.gate is not None:
            self.gate.begin()
        try:
            thread = self._direct if self._is_direct else QueueThread(self.loop)
            reply = thread.wait(self._serve(exchange, call))
        finally:
            whole.release()
            end_visit()  # of the gate for threads
        assert reply is not None  # noqa: S101 - the body is there, and a view does not send
        made = call.response
        is_own = (
            made is not None
            and (made.status, made.body) == (reply.status, reply.body)
            and not exchange.is_replay
        )
        return _served(reply, call.own if is_own else None)

    async def _serve(self, exchange: Exchange, call: "_SyncCall") -> Reply | None:
        try:
            return await self.pipeline.serve(exchange, call)
        finally:
            end_visit()  # of the gate for tasks

    def refuse(self, error: RequestError | StoreUnavailableError, head: RequestHead) -> Served:
        """Return the reply to an error of a view that is not guarded."""
        exchange = Exchange(head, None, self.pipeline, error_format=self.error_format)
        if isinstance(error, StoreUnavailableError):
            log_outage(error, exchange)
        return _served(complete(render(error, exchange), exchange))

    def close(self) -> None:
        """Close the store, stop the loop and wait for its thread."""
        self._is_open = False
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        try:
            asyncio.run_coroutine_threadsafe(self.onceward.close(), loop).result(_CLOSE_SECONDS)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_CLOSE_SECONDS)

    def identify(
        self, head: RequestHead, chosen: Callable[[], Principal] | None = None
    ) -> Principal | Awaitable[Principal]:
        """Identify the caller in the request's thread, where the app's sign-in has its data.

        ``chosen`` returns the caller; None: ``Onceward.identify`` does.
        """
        callers = self.onceward.runtime.callers
        if chosen is None and callers.is_single_tenant:
            return SHARED_PRINCIPAL

        def identify() -> Principal:
            found: Any = callers.identify(head) if chosen is None else chosen()
            if isinstance(found, Principal):
                return found
            if inspect.isawaitable(found):
                found = asyncio.run_coroutine_threadsafe(_result(found), self.loop()).result()
            if not isinstance(found, Principal):
                raise ConfigurationError(
                    f"the caller must be a Principal(tenant=…, actor=…), not {found!r}"
                )
            return found

        return run_in_request_thread(identify)

    async def ready(self) -> Idempotency:
        """Return the ``Idempotency``, opened. Call it on behalf of a request."""
        runtime = self.onceward.runtime
        if self._must_open():
            # The opening takes a connection; all requests until then wait for it.
            await runtime.idempotency.duplicates.release_connection()
            if self._is_direct:
                await run_in_request_thread(self._open)
        if self._is_direct:
            return runtime.idempotency
        idempotency = await runtime.ready()
        self._is_open = True
        return idempotency

    def _open(self) -> None:
        """Open Onceward once per process, on the loop: its sweep runs there."""
        with self._opening:
            if self._must_open():
                QueueThread(self.loop).wait(self.onceward.open())
                self._is_open = True

    def _must_open(self) -> bool:
        is_open = self._is_open and self.onceward.store.schema.is_complete
        return not is_open or self._pid != os.getpid()

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of this process, starting it if needed."""
        if self._loop is None or self._pid != os.getpid():
            with self._starting:
                if self._loop is None or self._pid != os.getpid():
                    self._loop, self._thread = _start_loop()
                    self._pid = os.getpid()
        return self._loop


class _SyncCall:
    """The body and the handler of a guarded request, and its response."""

    # A response is complete when it is returned.
    misuse = None

    def __init__(self, body: WholeBody, handle: Handle) -> None:
        self.body = body
        self._handle = handle
        self.response: Response | None = None
        # The object of the framework that the response was made from.
        self.own: Any = None

    async def run(self, exchange: Exchange, content: bytes) -> Response:  # noqa: ARG002
        """Run the handler in the request's thread."""
        execution = exchange.outcome
        assert isinstance(execution, Execution)  # noqa: S101 - claimed before

        def run() -> tuple[Response, Any]:
            with executing(execution):
                return self._handle()

        response, self.own = await run_in_request_thread(run)
        self.response = response
        return response


# -- batches ---------------------------------------------------------------------------------------


class SyncBatch:
    """Serves batches of one app."""

    def __init__(
        self, bridge: Bridge, options: BatchOptions, *, identify: Identify | None = None
    ) -> None:
        """``identify`` is None if only the app knows the caller, in the request of each item."""
        self._bridge = bridge
        self._identify = identify
        # The response of a sync request ends its thread's work: it cannot wait for a shared commit.
        self.options = replace(options, chunk_items=1)

    def is_for(self, environ: Environ) -> bool:
        """Return whether a request is a batch."""
        # Apps convert the method to upper case, and would run ``post`` as POST.
        is_post = environ["REQUEST_METHOD"].upper() == "POST"
        return is_post and _path_of(environ) == self.options.path

    def serve_wsgi(
        self, environ: Environ, start_response: _StartResponse, app: _WsgiApp, find: FindRoute
    ) -> list[bytes]:
        """Serve a batch, whose items ``app`` serves."""
        return self.serve(
            head_of(environ, "POST", self.options.path),
            environ,
            read=lambda limit: _read_body(environ, limit),
            find=find,
            run=lambda item: _collect(app, item),
        ).send(start_response)

    def serve(
        self,
        head: RequestHead,
        environ: Environ,
        *,
        read: Callable[[int], bytes],
        find: FindRoute,
        run: Callable[[Environ], Response],
    ) -> Served:
        """Run a batch, whose head is ``head`` and ``environ``.

        ``read`` returns its body, up to a limit. ``run`` serves the request of an item. Both are
        called in this thread.
        """
        bridge, onceward = self._bridge, self._bridge.onceward
        prefix = environ.get("SCRIPT_NAME", "").rstrip("/")
        endpoint = BatchEndpoint(
            replace(self.options, path=head.path),
            ready=bridge.ready,
            find=find,
            identify=self._identify,
            clock=onceward.clock,
            bodies=onceward.runtime.bodies,
        )
        exchange = Exchange(head, None, bridge.pipeline, error_format=bridge.error_format)
        body = endpoint.whole_body_of(lambda: read(self.options.max_bytes), head)

        async def run_item(call: ItemCall) -> None:
            item = _item_environ(environ, call.request, prefix)
            call.complete(await run_in_request_thread(lambda: run(item)))

        try:
            reply, _ = QueueThread(bridge.loop).wait(
                endpoint.serve(exchange, body, root=prefix, has_prefix=prefix != "", items=run_item)
            )
        finally:
            body.release()
        assert reply is not None  # noqa: S101 - the body is there
        return _served(reply)


def batch_options(batch: str | BatchOptions | None) -> BatchOptions | None:
    """Return the options of a batch endpoint; a text is its path."""
    if batch is None or isinstance(batch, BatchOptions):
        return batch
    if isinstance(batch, str):
        return BatchOptions(batch)
    raise ConfigurationError(f'batch must be a path such as "/batch", or BatchOptions, not {batch}')


def _item_environ(environ: Environ, request: ItemRequest, prefix: str) -> Environ:
    """Return the environ of an item: that of the batch with another request in it."""
    item = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_FRAMEWORKS) and name not in _OF_SERVER
    }
    for raw, value in request.headers:
        name = raw.decode("latin-1").upper().replace("-", "_")
        if not name.startswith("CONTENT_"):
            name = f"HTTP_{name}"
        text = value.decode("latin-1")
        item[name] = f"{item[name]},{text}" if name in item else text
    return item | {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": environ.get("SCRIPT_NAME", ""),
        "PATH_INFO": request.path.removeprefix(prefix).encode().decode("latin-1"),
        "QUERY_STRING": request.query.decode("latin-1"),
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.input": io.BytesIO(request.body),
    }


# -- WSGI ------------------------------------------------------------------------------------------


class WsgiGuard:
    """Guards the operations of a WSGI app that were named with ``onceward.guard_path``."""

    def __init__(
        self, app: _WsgiApp, onceward: Onceward, *, batch: str | BatchOptions | None = None
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
        self._bridge = bridge = Bridge(onceward)
        options = batch_options(batch)
        self._batch = (
            None if options is None else SyncBatch(bridge, options, identify=bridge.identify)
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

    def __call__(self, environ: Environ, start_response: _StartResponse) -> Iterable[bytes]:
        """Serve one WSGI request."""
        batch, routes = self._batch, self.onceward.runtime.routes
        if batch is not None and batch.is_for(environ):
            return batch.serve_wsgi(environ, start_response, self, routes.table().find)
        # Apps convert the method to upper case, and would run ``post`` as POST.
        method, path = environ["REQUEST_METHOD"].upper(), _path_of(environ)
        match = None if method in SAFE_METHODS else routes.table().find(method, path)
        if match is None:
            return self._app(environ, start_response)
        policy, prefix = match.policy, environ.get("SCRIPT_NAME", "")
        # Read after the sign-in, in this thread, and once more by the app.
        body = cache(lambda: _read_body(environ, policy.max_body_bytes))
        return self._bridge.serve(
            head_of(environ, method, path),
            match,
            body,
            lambda: (self._handle(environ, body(), policy.max_response_bytes), None),
            added_headers=() if batch is None else (batch.options.header(prefix),),
        ).send(start_response)

    def _handle(self, environ: Environ, body: bytes, max_bytes: int) -> Response:
        """Run the app with a body that was read."""
        environ = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        # A file that the server would send, e.g. by its path, could not be stored.
        environ.pop("wsgi.file_wrapper", None)
        response = _collect(self._app, environ, max_bytes)
        execution = find_execution()
        is_lost = execution is not None and execution.unit.is_lost
        if is_lost and response.status == HTTPStatus.INTERNAL_SERVER_ERROR:  # apps hide the error
            raise StoreUnavailableError("the connection to the database was lost in the handler")
        return response


def _path_of(environ: Environ) -> str:
    """Return the path as UTF-8: WSGI passes its bytes as latin-1."""
    raw = environ.get("PATH_INFO", "") or "/"
    return str(raw).encode("latin-1").decode("utf-8", "replace")


def head_of(environ: Environ, method: str, path: str) -> RequestHead:
    """Return the head of a WSGI request."""
    headers = [
        (_field(name.removeprefix("HTTP_")), str(value).encode("latin-1", "replace"))
        for name, value in environ.items()
        # An empty one was sent, too: an empty key is refused, not taken for no key. But servers set
        # these two to "" when the client sent none.
        if name[:5] == "HTTP_" or (name in ("CONTENT_TYPE", "CONTENT_LENGTH") and value != "")
    ]
    return RequestHead(method, path, environ.get("QUERY_STRING", "").encode("latin-1"), headers)


@lru_cache(maxsize=256)
def _field(name: str) -> bytes:
    return name.replace("_", "-").lower().encode("latin-1")


def _with_split_keys(head: RequestHead, key_header: bytes) -> RequestHead:
    """Split the keys that WSGI has joined with a comma."""
    if not any(name == key_header and b"," in value for name, value in head.headers):
        return head
    headers = [
        (name, part)
        for name, value in head.headers
        for part in (split_joined_keys(value) if name == key_header else (value,))
    ]
    return RequestHead(head.method, head.path, head.query, headers)


def _read_body(environ: Environ, limit: int) -> bytes:
    """Read at most one byte over the limit; the guard then responds with 413.

    Raises ``BodyInvalidError`` if the client disconnects before the body is complete.
    """
    source = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH") or ""
    wanted = limit + 1
    if length.isdigit():
        wanted = min(int(length), wanted)
    elif not (environ.get("wsgi.input_terminated") or "HTTP_TRANSFER_ENCODING" in environ):
        return b""
    check_end(environ)
    body = bytearray()
    try:
        while len(body) < wanted and (part := source.read(wanted - len(body))):
            body += part
    except Exception as error:  # servers have errors of their own for it
        raise broken_off(repr(error)) from error
    if length and len(body) < wanted:
        raise broken_off(f"{len(body)} of {wanted} bytes")
    return bytes(body)


def check_end(environ: Environ) -> None:
    """Raise ``LengthRequiredError`` if nothing would tell that the body has broken off."""
    software = environ.get("SERVER_SOFTWARE", "").lower()
    is_known = not software or software.startswith(_RAISE_AT_A_BREAK)
    if "HTTP_TRANSFER_ENCODING" in environ and not environ.get("CONTENT_LENGTH") and not is_known:
        raise LengthRequiredError("this server needs a Content-Length: bodies in chunks may be cut")


class ChunkedInput:
    """The input of a body in chunks. Where it has broken off, each further read raises, too."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, size: int = -1) -> bytes:
        """Read from the server. Raises ``OSError`` for its errors, which are of its own."""
        if self._error is None:
            try:
                return bytes(self._source.read(size))
            except Exception as error:  # noqa: BLE001 - raised below
                self._error = error
        raise OSError(repr(self._error)) from self._error


def broken_off(how: object) -> BodyInvalidError:
    """Return the error for a body that is not complete."""
    return BodyInvalidError(f"the body broke off before its end: {how}")


def refused_body(error: RequestError) -> Callable[[], bytes]:
    """Return a body that raises an error when the guard reads it."""

    def read() -> bytes:
        raise error

    return read


def parsed_form(
    head: RequestHead,
    fields: Iterable[tuple[str, str]],
    files: Iterable[tuple[str, str, IO[bytes]]],
) -> tuple[RequestHead, bytes]:
    """Return head and body of a form that the framework has read: one form as bytes to hash.

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
    # In place of a content type with a random boundary.
    head = with_header(head, b"content-type", b"application/x-www-form-urlencoded")
    return head, msgspec.json.encode([list(fields), digests])


def with_header(head: RequestHead, name: bytes, value: bytes) -> RequestHead:
    """Return a head with another value of a header."""
    headers = [pair for pair in head.headers if pair[0] != name]
    return RequestHead(head.method, head.path, head.query, [*headers, (name, value)])


def encoded_headers(headers: Iterable[tuple[str, str]]) -> tuple[tuple[bytes, bytes], ...]:
    """Return headers as they are stored."""
    return tuple([(n.lower().encode("latin-1"), v.encode("latin-1")) for n, v in headers])


def check_file(
    length: int | None, max_bytes: int, view: str, close_file: Callable[[], Any]
) -> None:
    """Raise for a response that streams, or sends a file with too many bytes to be stored."""
    if length is not None and length <= max_bytes:
        return
    close_file()
    if length is None:
        raise StreamingResponseError(
            f"the guarded view {view} streams its response, which is stored with the transaction "
            "and must be complete: return a plain response"
        )
    raise ResponseTooLargeError(
        f"the guarded view {view} sent a file of more than {max_bytes} bytes, which cannot be "
        "stored for a replay: respond with a link to it"
    )


def _collect(app: _WsgiApp, environ: Environ, max_bytes: int | None = None) -> Response:
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
    return Response(int(status.split(" ", 1)[0]), encoded_headers(headers), b"".join(written))


def _served(reply: Reply, own: Any = None) -> Served:
    return Served(reply.status, reply.headers, reply.body, own)


async def _result(work: Awaitable[Any]) -> Any:
    return await work


def _start_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()

    def run() -> None:
        # When the loop has been stopped, the runner cancels what is left and waits for it.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()

    thread = threading.Thread(target=run, name="onceward-loop", daemon=True)
    thread.start()
    return loop, thread
