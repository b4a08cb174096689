"""Guards sync functions: a view, or a whole WSGI app. Runs batches of their requests.

The pipeline is the same as for ASGI; only the thread differs. Stores that work in the request's
thread, such as Django's, need no event loop. For other stores the pipeline runs on an event loop in
its own thread, and the function runs in the request's thread, where the framework expects it.

::

    request thread  ──request───▶  loop: Pipeline ──▶ claim
         view       ◀──run───────  loop
                    ──response──▶  loop ──▶ commit
                    ◀──reply─────  loop

Each item of a batch is a request to the whole app, with its own transaction and record, in the
thread of the batch.
"""

import asyncio
import inspect
import io
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar, Unpack

from onceward.app import Onceward
from onceward.batch.endpoint import BatchEndpoint
from onceward.batch.options import BatchOptions
from onceward.batch.run import FindRoute, ItemCall, ItemRequest
from onceward.errors import (
    ConfigurationError,
    NoTransactionError,
    RequestError,
    StoreUnavailableError,
)
from onceward.guard.execution import Exchange, Execution, executing, find_execution
from onceward.guard.idempotency import Idempotency
from onceward.guard.pipeline import Reply, complete, log_outage, render
from onceward.guard.request import (
    SHARED_PRINCIPAL,
    GuardedRequest,
    Headers,
    Identify,
    Principal,
    RequestHead,
)
from onceward.guard.request_body import WholeBody
from onceward.guard.request_thread import (
    DirectThread,
    QueueThread,
    RequestThread,
    has_request_thread,
    run_in_request_thread,
    serving_in,
    serving_thread,
)
from onceward.guard.route_table import Match
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.records import Response
from onceward.stores.sessions.gate import end_visit
from onceward.stores.threads import SyncTransaction
from onceward_protocol.keys import KEY_HEADER, split_joined_keys

__all__ = ["Bridge", "Served", "SyncBatch", "SyncExecution", "SyncRequest", "batch_options"]

T = TypeVar("T")

_CLOSE_SECONDS: Final = 30.0
# Frameworks keep what they have read of the request of the batch under these names.
_OF_FRAMEWORKS: Final = ("werkzeug.", "flask.", "HTTP_", "CONTENT_")
_OF_SERVER: Final = ("REQUEST_URI", "RAW_URI", "wsgi.file_wrapper", "wsgi.input_terminated")

Environ = dict[str, Any]


class SyncRequest(NamedTuple):
    """A guarded request of a sync framework, and what to run for it."""

    head: RequestHead
    match: Match
    # The body, or a function that reads it after the sign-in.
    body: bytes | Callable[[], bytes]
    # Runs the view.
    handle: Callable[[], Response]
    # Returns the caller. None: ``Onceward.identify`` does, from the head.
    principal: Callable[[], Principal] | None = None
    # Headers that every response to it has.
    added_headers: Headers = ()


class Served(NamedTuple):
    """The reply to send; ``is_own`` says that the handler made it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_own: bool


class SyncExecution:
    """The ``Execution`` of a sync handler."""

    def __init__(self, bridge: "Bridge", execution: Execution) -> None:
        self._bridge = bridge
        self._execution = execution

    @property
    def transaction(self) -> Any:
        """The transaction to write in: the app's own session, where the store has a sync one."""
        if self._execution.unit.is_sync:
            return self._execution.transaction
        return SyncTransaction(self._bridge.wait, self._execution.statements)

    @property
    def request(self) -> GuardedRequest:
        """The request: caller, key, ids."""
        return self._execution.request

    def describe(self, *, resource: str | None = None, version: int | None = None) -> None:
        """Name the changed resource and its version in the audit event."""
        self._execution.describe(resource=resource, version=version)

    def keep_writes_on_error(self) -> None:
        """Commit the handler's writes even if the response is a 4xx."""
        self._execution.keep_writes_on_error()

    def no_store(self) -> None:
        """Do not store this response: the key is free again. The handler must not have written."""
        self._execution.no_store()

    def store_for(self, ttl: timedelta) -> None:
        """Store this response for this long, in place of the TTL of the policy."""
        self._execution.store_for(ttl)

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call this after the commit. It must not block: other requests wait for it."""
        self._execution.after_commit(callback)

    def refuse_lost_connection(self) -> None:
        """Raise ``StoreUnavailableError`` if the handler has lost its connection."""
        if self._execution.unit.is_lost:
            raise StoreUnavailableError("the connection to the database was lost in the handler")

    def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue a job in this transaction. Takes the options of ``Onceward.enqueue``."""
        return self._bridge.enqueue(self._execution, job_type, payload, options)


class Bridge:
    """Guards functions of the sync apps of one process."""

    def __init__(self, onceward: Onceward) -> None:
        # The loop starts at the first request: servers fork after the app is loaded.
        self.onceward = onceward
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._starting = threading.Lock()
        # Whether all the async code can run in the request's thread. Caches and limiters cannot.
        self._is_direct = (
            onceward.store.runs_in_request_thread
            and onceward.runtime.idempotency.cache is None
            and onceward.runtime.config.limiter is None
        )
        store = onceward.store
        # Limits how many requests use the app's connection pool at once.
        self.gate = store.thread_gate
        # For all requests: it holds its lock for each step of the async code.
        self._direct = DirectThread(threading.RLock())
        self._is_open = False
        self._opening = threading.Lock()
        self.pipeline = onceward.runtime.pipeline(ready=self.ready, identify=self.identify)

    @property
    def execution(self) -> SyncExecution:
        """The execution of the handler that runs in this thread."""
        found = find_execution()
        if found is None or not has_request_thread():
            raise NoTransactionError("there is no guarded request here: guard the operation first")
        return SyncExecution(self, found)

    @property
    def is_serving(self) -> bool:
        """Whether a guarded handler runs in this thread."""
        # Below the guard of an ASGI app, the execution is that app's.
        return has_request_thread() and find_execution() is not None

    def serve(self, request: SyncRequest) -> Served:
        """Replay, refuse or run one request. Raises what its handler raises."""
        call = _SyncCall(self, request)
        exchange = call.exchange
        if self.gate is not None:
            self.gate.begin()
        try:
            thread = self.new_thread()
            with serving_in(thread):
                reply = thread.wait(self._serve(exchange, call))
        finally:
            call.body.release()
            end_visit()  # of the gate for threads
        assert reply is not None  # noqa: S101 - the body is there, and a view does not send
        own = call.response
        is_own = (
            own is not None
            and (own.status, own.body) == (reply.status, reply.body)
            and not exchange.is_replay
        )
        return served(reply, is_own=is_own)

    async def _serve(self, exchange: Exchange, call: "_SyncCall") -> Reply | None:
        try:
            return await self.pipeline.serve(exchange, call)
        finally:
            end_visit()  # of the gate for tasks

    def refuse(self, error: RequestError | StoreUnavailableError, head: RequestHead) -> Served:
        """Return the reply to an error of a view that is not guarded."""
        exchange = Exchange(
            head, None, self.pipeline, error_format=self.onceward.runtime.config.error_format
        )
        if isinstance(error, StoreUnavailableError):
            log_outage(error, exchange)
        return served(complete(render(error, exchange), exchange))

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine to its end. Call it in the thread of a guarded request."""

        async def done() -> T:
            return await work

        return serving_thread().wait(done())

    def enqueue(
        self, execution: Execution, job_type: str, payload: Any, options: EnqueueOptions
    ) -> EnqueueOutcome:
        """Enqueue a job in the transaction of an execution."""
        return self.wait(self.onceward.runtime.enqueue(execution, job_type, payload, **options))

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

    # -- callers ------------------------------------------------------------------------------

    def identify(self, head: RequestHead) -> Principal | Awaitable[Principal]:
        """Identify the caller of any request by ``Onceward.identify``, in the request's thread."""
        return self.identify_by(None, head)

    def identify_by(
        self, chosen: Callable[[], Principal] | None, head: RequestHead
    ) -> Principal | Awaitable[Principal]:
        """Identify the caller in the request's thread, where the app's sign-in has its data.

        ``chosen`` returns the caller; None: ``Onceward.identify`` does.
        """
        if chosen is None and self.onceward.runtime.callers.is_single_tenant:
            return SHARED_PRINCIPAL

        def identify() -> Principal:
            found: Any = (
                self.onceward.runtime.callers.identify(head) if chosen is None else chosen()
            )
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

    # -- threads ------------------------------------------------------------------------------

    def new_thread(self) -> RequestThread:
        """Return the ``RequestThread`` that runs the async code for a request of this thread."""
        if self._is_direct:
            return self._direct
        return QueueThread(self.loop)

    async def ready(self) -> Idempotency:
        """Return the ``Idempotency``, opened. Call it on behalf of a request."""
        if self._must_open():
            # The opening takes a connection; all requests until then wait for it.
            await self.onceward.runtime.idempotency.duplicates.release_connection()
            if self._is_direct:
                await run_in_request_thread(self._open)
        if not self._is_direct:
            idempotency = await self.onceward.runtime.ready()
            self._is_open = True
            return idempotency
        return self.onceward.runtime.idempotency

    def _open(self) -> None:
        """Open Onceward once per process, on the loop: its sweep runs there."""
        with self._opening:
            if self._must_open():
                thread = QueueThread(self.loop)
                with serving_in(thread):
                    thread.wait(self.onceward.open())
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
    """A guarded request to a sync function, and its response."""

    # A response is complete when it is returned.
    misuse = None

    def __init__(self, bridge: Bridge, request: SyncRequest) -> None:
        policy = request.match.policy
        head = _with_split_keys(request.head, policy.key_header)
        self._request = request
        self.exchange = Exchange(
            head,
            request.match,
            bridge.pipeline,
            error_format=bridge.onceward.runtime.config.error_format,
            added_headers=request.added_headers,
        )
        # Not a method: the exchange would refer to what refers to it.
        self.exchange.identify = lambda head: bridge.identify_by(request.principal, head)
        self.body = WholeBody(request.body, head, policy, bridge.onceward.runtime.bodies)
        self.response: Response | None = None

    async def run(self, exchange: Exchange, content: bytes) -> Response:  # noqa: ARG002
        """Run the handler in the request's thread."""
        execution = exchange.outcome
        assert isinstance(execution, Execution)  # noqa: S101 - claimed before

        def run() -> Response:
            with executing(execution):
                return self._request.handle()

        response = self.response = await run_in_request_thread(run)
        return response


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
        exchange = Exchange(
            head, None, bridge.pipeline, error_format=onceward.runtime.config.error_format
        )
        body = endpoint.whole_body_of(lambda: read(self.options.max_bytes), head)

        async def run_item(call: ItemCall) -> None:
            item = _item_environ(environ, call.request, prefix)
            call.complete(await run_in_request_thread(lambda: run(item)))

        thread = QueueThread(bridge.loop)
        try:
            with serving_in(thread):
                reply, _ = thread.wait(
                    endpoint.serve(
                        exchange, body, root=prefix, has_prefix=prefix != "", items=run_item
                    )
                )
        finally:
            body.release()
        assert reply is not None  # noqa: S101 - the body is there
        return served(reply)


def served(reply: Reply, *, is_own: bool = False) -> Served:
    """Return a reply for a framework to send."""
    return Served(reply.status, reply.headers, reply.body, is_own)


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


def _with_split_keys(head: RequestHead, key_header: str) -> RequestHead:
    """Split the values of a policy's own key header, which WSGI has joined with a comma."""
    if key_header == KEY_HEADER:  # ``head_of`` has split that one
        return head
    wanted = key_header.lower().encode("latin-1")
    headers = [
        (name, part)
        for name, value in head.headers
        for part in (split_joined_keys(value) if name == wanted else (value,))
    ]
    return RequestHead(head.method, head.path, head.query, headers)


async def _result(work: Awaitable[T]) -> T:
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
