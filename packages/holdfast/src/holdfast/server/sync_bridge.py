"""A bridge for sync frameworks: the intake runs on a loop of its own, the handler in its thread.

The checks, the claim, the commit and the answer are the same code as for ASGI; nothing is written
twice. A request's thread hands the request over and waits. When the intake wants the handler to
run, it runs there, in the thread where the framework expects it, and the intake waits.

::

    request thread  ──scope──▶  loop: GuardMiddleware ──▶ claim
         handler    ◀──run────  loop
                    ──reply──▶  loop ──▶ commit
         answer     ◀──reply──  loop
"""

import asyncio
import os
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, TypeVar

from holdfast.core.idempotency_record import Reply
from holdfast.errors import NoTransactionError
from holdfast.ports import Params, Row, Transaction

if TYPE_CHECKING:
    from holdfast.server.app import Holdfast
    from holdfast.server.execution import Execution

__all__ = ["Bridge", "RequestThread", "SyncExecution", "SyncTransaction", "run_in_request_thread"]

T = TypeVar("T")

# The thread whose request is being served, known in that thread and to all it hands over.
_thread_of_request: ContextVar["RequestThread"] = ContextVar("holdfast_request_thread")
# What the handler writes in, on the thread's side.
_execution_here: ContextVar["SyncExecution"] = ContextVar("holdfast_sync_execution")


def request_thread() -> "RequestThread":
    """Return the thread whose request is being served. For stores that live in that thread."""
    return _thread_of_request.get()


async def run_in_request_thread(work: Callable[[], T]) -> T:
    """Run a function in the thread of the request being served, or in a spare one."""
    thread = _thread_of_request.get(None)
    return await (asyncio.to_thread(work) if thread is None else thread.run(work))


class SyncTransaction:
    """What a sync handler writes in: a ``Transaction`` without ``await``."""

    def __init__(self, bridge: "Bridge", transaction: Transaction) -> None:
        """Wrap the transaction on the loop."""
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
    """A guarded request in its own thread: what ``Execution`` is to async handlers."""

    def __init__(self, bridge: "Bridge", execution: "Execution") -> None:
        """Wrap the execution on the loop."""
        self._bridge = bridge
        self._execution = execution
        self.transaction = SyncTransaction(bridge, execution.statements)

    @property
    def call(self) -> Any:
        """Who called, and the ids of the request."""
        return self._execution.call

    def describe(self, *, resource: str | None = None, version: int | None = None) -> None:
        """Say for the audit event what was changed."""
        self._execution.describe(resource=resource, version=version)

    def keep_writes_on_error(self) -> None:
        """Commit what was written even if the answer is a 4xx."""
        self._execution.keep_writes_on_error()

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call this once everything is committed, on the loop's thread."""
        self._execution.after_commit(callback)

    def enqueue(self, job_type: str, payload: Any = None, **wishes: Any) -> Any:
        """Enqueue a job in this transaction. Takes what ``Holdfast.enqueue`` takes."""
        return self._bridge.enqueue(self._execution, job_type, payload, wishes)


class RequestThread:
    """The thread of one request, as the loop sees it: it does what it is asked to, then answers."""

    def __init__(self) -> None:
        """Belong to the thread that makes it."""
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function in the request's thread; called on the loop."""
        done: Future[T] = Future()
        self._work.put((work, done))
        return await asyncio.wrap_future(done)

    def serve_until(self, finished: Future[Any]) -> None:
        """Do what is asked until the request is over; called in the thread."""
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

    def __init__(self, holdfast: "Holdfast") -> None:
        """Start nothing yet: servers fork after the app is loaded."""
        self.holdfast = holdfast
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._starting = threading.Lock()

    @property
    def execution(self) -> SyncExecution:
        """The guarded request being served in this thread."""
        try:
            return _execution_here.get()
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
        """Serve one request; the middleware's inner app has to be ``run_in_thread``."""
        thread = RequestThread()
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            messages.append(message)

        async def served() -> None:
            await middleware(scope, receive, send)

        # What is handed to the loop takes along the context it was handed over in.
        mark = _thread_of_request.set(thread)
        try:
            finished = asyncio.run_coroutine_threadsafe(served(), self.loop())
            thread.serve_until(finished)
            finished.result()
        finally:
            _thread_of_request.reset(mark)
        start = messages[0]
        content = b"".join(message.get("body", b"") for message in messages[1:])
        return start["status"], list(start["headers"]), content

    async def run_in_thread(self, execution: "Execution", handler: Callable[[], Reply]) -> Reply:
        """Run a sync handler where its framework expects it, with its transaction at hand."""

        def run() -> Reply:
            mark = _execution_here.set(SyncExecution(self, execution))
            try:
                return handler()
            finally:
                _execution_here.reset(mark)

        return await request_thread().run(run)

    def wait(self, work: Awaitable[T]) -> T:
        """Wait in a request's thread for something on the loop."""

        async def done() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(done(), self.loop())
        # A store may live in this very thread: it goes on doing what it is asked to.
        request_thread().serve_until(future)
        return future.result()

    def enqueue(
        self, execution: "Execution", job_type: str, payload: Any, wishes: dict[str, Any]
    ) -> Any:
        """Enqueue a job in the transaction of an execution."""
        return self.wait(self.holdfast.enqueue_in(execution, job_type, payload, **wishes))

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop, started in this process at its first request."""
        if self._loop is None or self._pid != os.getpid():
            with self._starting:
                if self._loop is None or self._pid != os.getpid():
                    self._loop = _started_loop()
                    self._pid = os.getpid()
        return self._loop

    def close(self) -> None:
        """Close the store and end the loop."""
        loop, self._loop = self._loop, None
        if loop is None or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(self.holdfast.close(), loop).result(_CLOSE_SECONDS)
        loop.call_soon_threadsafe(loop.stop)


_CLOSE_SECONDS: Final = 30.0


def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            loop.close()

    threading.Thread(target=run, name="holdfast-loop", daemon=True).start()
    return loop
