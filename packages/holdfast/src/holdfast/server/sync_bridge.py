"""Runs the ASGI middleware for sync frameworks: on its own event loop, the handler in its thread.

The checks, the claim and the commit are the same code as for ASGI. The request's thread passes the
request to the loop and waits; when the middleware calls the handler, it runs in that thread, where
the framework expects it, and the loop waits.

::

    request thread  ──scope─────▶  loop: GuardMiddleware ──▶ claim
         handler    ◀──run───────  loop
                    ──response──▶  loop ──▶ commit
                    ◀──response──  loop
"""

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from holdfast.core.idempotency_record import Response
from holdfast.errors import NoTransactionError
from holdfast.ports import Params, Row, Transaction
from holdfast.server.app import Holdfast
from holdfast.server.execution import Execution
from holdfast.server.guarded_request import GuardedRequest
from holdfast.server.response_buffer import Send

__all__ = ["Bridge", "RequestThread", "SyncExecution", "SyncTransaction", "run_in_request_thread"]

T = TypeVar("T")

_CLOSE_SECONDS: Final = 30.0

# The thread of the request being served; set in that thread and in its tasks on the loop.
_request_thread: ContextVar["RequestThread"] = ContextVar("holdfast_request_thread")
# The execution of the handler that runs in this thread.
_sync_execution: ContextVar["SyncExecution"] = ContextVar("holdfast_sync_execution")


async def run_in_request_thread(work: Callable[[], T]) -> T:
    """Run a function in the thread of the request being served, or in a pool without one.

    For stores whose connections belong to that thread.
    """
    thread = _request_thread.get(None)
    return await (asyncio.to_thread(work) if thread is None else thread.run(work))


class SyncTransaction:
    """A ``Transaction`` without ``await``, for sync handlers."""

    def __init__(self, bridge: "Bridge", transaction: Transaction) -> None:
        self._bridge = bridge
        self._transaction = transaction

    def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        return self._bridge.wait(self._transaction.execute(sql, params))

    def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        return self._bridge.wait(self._transaction.fetch_all(sql, params))

    def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        return self._bridge.wait(self._transaction.fetch_one(sql, params))


class SyncExecution:
    """The ``Execution`` of a sync handler."""

    def __init__(self, bridge: "Bridge", execution: Execution) -> None:
        self._bridge = bridge
        self._execution = execution
        self.transaction = SyncTransaction(bridge, execution.statements)

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

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call this after the commit, in the thread of the event loop."""
        self._execution.after_commit(callback)

    def enqueue(self, job_type: str, payload: Any = None, **options: Any) -> Any:
        """Enqueue a job in this transaction. Takes the options of ``Holdfast.enqueue``."""
        return self._bridge.enqueue(self._execution, job_type, payload, options)


class RequestThread:
    """The thread of one request: runs the functions that the loop sends it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function in the request's thread. Call it on the loop."""
        done: Future[T] = Future()
        self._work.put((work, done))
        return await asyncio.wrap_future(done)

    def serve_until(self, finished: Future[Any]) -> None:
        """Run what the loop sends until the future is done. Call it in the thread."""
        finished.add_done_callback(lambda _: self._work.put(None))
        while (item := self._work.get()) is not None:
            work, done = item
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised again on the loop
                done.set_exception(error)


class Bridge:
    """One loop on one thread, for all requests of a process."""

    def __init__(self, holdfast: Holdfast) -> None:
        # The loop starts at the first request: servers fork after the app is loaded.
        self.holdfast = holdfast
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._starting = threading.Lock()

    @property
    def execution(self) -> SyncExecution:
        """The execution of the handler that runs in this thread."""
        try:
            return _sync_execution.get()
        except LookupError:
            raise NoTransactionError(
                "there is no guarded request here: guard the operation first"
            ) from None

    def serve(
        self,
        middleware: Callable[..., Awaitable[None]],
        scope: dict[str, Any],
        body: bytes,
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Serve one request; the app inside the middleware has to call ``run_handler``."""
        thread = RequestThread()
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        async def served() -> None:
            await middleware(scope, receive, send)

        # The task on the loop copies the context it was created in.
        token = _request_thread.set(thread)
        try:
            finished = asyncio.run_coroutine_threadsafe(served(), self.loop())
            thread.serve_until(finished)
            finished.result()
        finally:
            _request_thread.reset(token)
        start = messages[0]
        content = b"".join(message.get("body", b"") for message in messages[1:])
        return start["status"], list(start["headers"]), content

    async def run_handler(
        self, execution: Execution, handler: Callable[[], Response], send: Send
    ) -> None:
        """Run a sync handler in the request's thread and send its response."""

        def run() -> Response:
            token = _sync_execution.set(SyncExecution(self, execution))
            try:
                return handler()
            finally:
                _sync_execution.reset(token)

        response = await _request_thread.get().run(run)
        start = {"status": response.status, "headers": response.headers}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": response.body})

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the loop and wait for it in the request's thread."""

        async def done() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(done(), self.loop())
        # The store may need this thread for the coroutine, so it goes on running functions.
        _request_thread.get().serve_until(future)
        return future.result()

    def enqueue(
        self, execution: Execution, job_type: str, payload: Any, options: dict[str, Any]
    ) -> Any:
        """Enqueue a job in the transaction of an execution."""
        return self.wait(self.holdfast.enqueue_in(execution, job_type, payload, **options))

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of this process, starting it if needed."""
        if self._loop is None or self._pid != os.getpid():
            with self._starting:
                if self._loop is None or self._pid != os.getpid():
                    self._loop, self._thread = _start_loop()
                    self._pid = os.getpid()
        return self._loop

    def close(self) -> None:
        """Close the store, stop the loop and wait for its thread."""
        loop, self._loop = self._loop, None
        thread, self._thread = self._thread, None
        if loop is None or thread is None or self._pid != os.getpid():
            return
        try:
            asyncio.run_coroutine_threadsafe(self.holdfast.close(), loop).result(_CLOSE_SECONDS)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_CLOSE_SECONDS)


def _start_loop() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    loop = asyncio.new_event_loop()

    def run() -> None:
        # When the loop has been stopped, the runner cancels what is left and waits for it.
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.get_loop().run_forever()

    thread = threading.Thread(target=run, name="holdfast-loop", daemon=True)
    thread.start()
    return loop, thread
