"""Runs the ASGI middleware around a sync function: a view, or a whole WSGI app.

The checks, the claim and the commit are the same code as for ASGI; only the thread differs. Stores
that work in the request's thread, such as Django's, need no event loop. For other stores the
middleware runs on an event loop in its own thread, and the function runs in the request's thread,
where the framework expects it.

::

    request thread  ──request───▶  loop: GuardMiddleware ──▶ claim
         view       ◀──run───────  loop
                    ──response──▶  loop ──▶ commit
                    ◀──response──  loop
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeVar, Unpack

from onceward.app import Onceward
from onceward.core.idempotency_record import Response
from onceward.core.job import EnqueueOptions, EnqueueOutcome
from onceward.errors import ConfigurationError, NoTransactionError, StoreUnavailableError
from onceward.frameworks.asgi import SCOPE_KEY, GuardMiddleware
from onceward.guard.execution import Execution, executing
from onceward.guard.idempotency import Idempotency
from onceward.guard.request import SHARED_PRINCIPAL, GuardedRequest, Principal
from onceward.guard.request_head import RequestHead
from onceward.guard.request_thread import (
    DirectThread,
    QueueThread,
    RequestThread,
    run_in_request_thread,
    serving_in,
    serving_thread,
)
from onceward.guard.route_table import Match
from onceward.ports import ConnectionUnit, ThreadGatedStore
from onceward.stores.connection_gate import end_visit
from onceward.stores.sync_transaction import SyncTransaction
from onceward_protocol.keys import KEY_HEADER, split_joined_keys

__all__ = ["Bridge", "Served", "SyncExecution", "SyncRequest"]

T = TypeVar("T")

_CLOSE_SECONDS: Final = 30.0
_REPLAYED: Final = (b"idempotency-replayed", b"true")

# The execution of the handler that runs in this thread.
_sync_execution: ContextVar["SyncExecution"] = ContextVar("onceward_sync_execution")
# The request being served.
_sync_request: ContextVar["SyncRequest"] = ContextVar("onceward_sync_request")


class SyncRequest(NamedTuple):
    """A guarded request of a sync framework, and what to run for it."""

    # The ASGI scope of its head.
    scope: dict[str, Any]
    match: Match
    # The body, or a function that reads it after the sign-in.
    body: bytes | Callable[[], bytes]
    # Runs the view.
    handle: Callable[[], Response]
    # Returns the caller. None: ``Onceward.identify`` does, from the head.
    principal: Callable[[], Principal] | None = None


class Served(NamedTuple):
    """The response to send; ``is_own`` says that the handler made it."""

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
        if getattr(self._execution.unit, "is_sync", False):
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
        unit = self._execution.unit
        if isinstance(unit, ConnectionUnit) and unit.is_lost:
            raise StoreUnavailableError("the connection to the database was lost in the handler")

    def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue a job in this transaction. Takes the options of ``Onceward.enqueue``."""
        return self._bridge.enqueue(self._execution, job_type, payload, options)


class _TableOfOne:
    """The route of the request being served, which its framework has found already."""

    def find(self, method: str, path: str) -> Match | None:  # noqa: ARG002
        return _sync_request.get().match


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
            getattr(onceward.store, "runs_in_request_thread", False)
            and onceward.runtime.idempotency.cache is None
            and onceward.runtime.config.limiter is None
        )
        store = onceward.store
        # Limits how many requests use the app's connection pool at once.
        self.gate = store.thread_gate if isinstance(store, ThreadGatedStore) else None
        # For all requests: it holds its lock for each step of the async code.
        self._direct = DirectThread(threading.RLock())
        self._is_open = False
        self._opening = threading.Lock()
        table = _TableOfOne()
        self._middleware = GuardMiddleware(
            self._run_handler,
            idempotency=self.ready,
            table=lambda: table,
            identify=self._identify_caller,
            metrics=onceward.runtime.metrics,
            bodies=onceward.runtime.bodies,
            limiter=onceward.runtime.config.limiter,
            spans=onceward.runtime.config.spans,
            error_format=onceward.runtime.config.error_format,
            request_log=onceward.runtime.request_log,
        )

    @property
    def execution(self) -> SyncExecution:
        """The execution of the handler that runs in this thread."""
        try:
            return _sync_execution.get()
        except LookupError:
            raise NoTransactionError(
                "there is no guarded request here: guard the operation first"
            ) from None

    @property
    def is_serving(self) -> bool:
        """Whether a guarded handler runs in this thread."""
        return _sync_execution.get(None) is not None

    def serve(self, request: SyncRequest) -> Served:
        """Replay, refuse or run one request. Raises what its handler raises."""
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            body = request.body
            if not isinstance(body, bytes):
                body = await run_in_request_thread(body)
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        if request.match.policy.key_header != KEY_HEADER:  # ``scope_of`` has split that one
            _split_joined_header(request.scope, request.match.policy.key_header)
        token = _sync_request.set(request)
        if self.gate is not None:
            self.gate.begin()
        try:
            thread = self._new_thread()
            with serving_in(thread):
                thread.wait(self._middleware(request.scope, receive, send))
        finally:
            _sync_request.reset(token)
            end_visit()
        start = messages[0]
        content: bytes = messages[1]["body"] if len(messages) == 2 else _joined(messages)  # noqa: PLR2004
        own: Response | None = request.scope.get("onceward.own_response")
        is_own = (
            own is not None
            and (own.status, own.body) == (start["status"], content)
            and _REPLAYED not in start["headers"]
        )
        return Served(start["status"], list(start["headers"]), content, is_own)

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

    # -- inside the middleware ----------------------------------------------------------------

    async def _run_handler(self, scope: Any, _receive: Any, send: Any) -> None:
        """Run the handler in the request's thread; the app inside the middleware."""
        request = _sync_request.get()
        execution = SyncExecution(self, scope[SCOPE_KEY])

        def run() -> Response:
            token = _sync_execution.set(execution)
            try:
                with executing(scope[SCOPE_KEY]):
                    return request.handle()
            finally:
                _sync_execution.reset(token)

        response = scope["onceward.own_response"] = await run_in_request_thread(run)
        start = {"status": response.status, "headers": response.headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": response.body})

    def identify(self, head: RequestHead) -> Principal | Awaitable[Principal]:
        """Identify the caller of any request by ``Onceward.identify``, in the request's thread."""
        return self._identify_by(None, head)

    def _identify_caller(self, head: RequestHead) -> Principal | Awaitable[Principal]:
        """Identify the caller in the request's thread, where the app's sign-in has its data."""
        return self._identify_by(_sync_request.get().principal, head)

    def _identify_by(
        self, chosen: Callable[[], Principal] | None, head: RequestHead
    ) -> Principal | Awaitable[Principal]:
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

    def _new_thread(self) -> RequestThread:
        if self._is_direct:
            return self._direct
        return QueueThread(self.loop)

    async def ready(self) -> Idempotency:
        """Return the ``Idempotency``, opened. Call it on behalf of a request."""
        if self._must_open():
            # The opening takes a connection; all requests until then wait for it.
            await self.onceward.runtime.idempotency.release_connection()
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


def _split_joined_header(scope: dict[str, Any], key_header: str) -> None:
    """Split the values of a policy's own key header, which WSGI has joined with a comma."""
    wanted = key_header.lower().encode("latin-1")
    scope["headers"] = [
        (name, part)
        for name, value in scope["headers"]
        for part in (split_joined_keys(value) if name == wanted else (value,))
    ]


def _joined(messages: list[Any]) -> bytes:
    """Return the body in the messages of a response, after its start."""
    return b"".join([message.get("body", b"") for message in messages[1:]])


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
