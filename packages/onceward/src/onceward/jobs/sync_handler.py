"""Handlers that are plain functions: each attempt runs in a thread, with a context for it.

The transaction stays on the event loop. A call in the thread, such as ``execute``, runs there and
returns when it has ended.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar, Unpack, cast

from onceward.errors import NoTransactionError, UsageError
from onceward.jobs.context import JobAttributes, JobContext
from onceward.jobs.job import EnqueueOptions, EnqueueOutcome
from onceward.stores.threads import SyncTransaction

__all__ = ["SyncJobContext", "run_in_thread"]

T = TypeVar("T")


class SyncJobContext(JobAttributes):
    """``JobContext`` without ``await``: what a handler that is a plain function gets."""

    __slots__ = ("_calls", "_context")

    def __init__(self, context: JobContext, calls: "_Calls") -> None:
        super().__init__(context.leased_job, context.payload)
        self._context = context
        self._calls = calls

    @property
    def transaction(self) -> SyncTransaction:
        """The job's transaction. It begins with the first statement."""
        return SyncTransaction(self._calls.wait, self._context.transaction)

    def begin(self) -> Any:
        """Return the store's own transaction, e.g. a sync ``Session`` of SQLAlchemy."""
        return self._calls.wait(self._context.begin())

    def step(self, name: str, action: Callable[[str], T]) -> T:
        """Call another service once; as ``JobContext.step``, with a plain function."""
        if self._calls.is_on_loop:
            return cast("T", self._context.step(name, cast("Any", action)))
        recorded = self._calls.wait(self._context.find_step(name))
        if recorded is not None:
            return cast("T", recorded[0])
        result = action(self.step_key(name))
        if inspect.iscoroutine(result):
            result.close()
            raise UsageError(
                f"the action of step {name!r} is a coroutine function, but the handler is a plain "
                "function: make both async, or none"
            )
        self._calls.wait(self._context.record_step(name, result))
        return result

    def enqueue(
        self, job_type: str, payload: Any = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueueOutcome:
        """Enqueue another job in this one's transaction. Raises ``UsageError``."""
        return self._calls.wait(self._context.enqueue(job_type, payload, **options))


async def run_in_thread(handler: Callable[[SyncJobContext], Any], context: JobContext) -> Any:
    """Run a handler in a new thread and return its result.

    A thread cannot be cancelled. If the caller is, the call that it waits for is cancelled and all
    later ones are refused; then this waits for the thread, until it is cancelled once more.
    """
    calls = _Calls()
    ended: asyncio.Future[Any] = calls.loop.create_future()
    ended.add_done_callback(asyncio.Future.exception)  # not reported if the caller is gone
    run = copy_context().run

    def run_handler() -> None:
        outcome: Future[Any] = Future()
        try:
            outcome.set_result(run(handler, SyncJobContext(context, calls)))
        except BaseException as error:  # noqa: BLE001 - raised again on the loop
            outcome.set_exception(_raisable(error))
        with suppress(RuntimeError):  # the loop is closed: the process ends
            calls.loop.call_soon_threadsafe(_copy, outcome, ended)

    # Not of a pool: a handler that hangs would keep its thread from others, and the process from
    # ending.
    threading.Thread(target=run_handler, name=f"onceward-job-{context.type}", daemon=True).start()
    try:
        result = await asyncio.shield(ended)
    except asyncio.CancelledError:
        await calls.stop()
        await asyncio.wait([ended])
        raise
    # A plain function that calls a coroutine function, e.g. a decorator: it goes on here, where
    # the methods of its context return coroutines.
    return await result if inspect.isawaitable(result) else result


class _Calls:
    """The calls of one handler's thread, each a task on the event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopped = False

    @property
    def is_on_loop(self) -> bool:
        """Whether this is called by a coroutine, not in the handler's thread."""
        return threading.get_ident() == self._loop_thread

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and wait for it in this thread."""
        if self.is_on_loop:
            return cast("T", work)
        done: Future[T] = Future()

        def start() -> None:
            if self._is_stopped:
                work.close()
                done.set_exception(_ended())
                return
            task = self.loop.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(finish)

        def finish(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if task.cancelled():
                done.set_exception(_ended())
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        try:
            self.loop.call_soon_threadsafe(start)
        except RuntimeError:  # the loop is closed
            work.close()
            raise _ended() from None
        return done.result()

    async def stop(self) -> None:
        """Refuse further calls, and cancel the one that runs. A rollback may follow."""
        self._is_stopped = True
        if self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


def _copy(outcome: Future[Any], ended: "asyncio.Future[Any]") -> None:
    error = outcome.exception()
    if error is None:
        ended.set_result(outcome.result())
    else:
        ended.set_exception(error)


def _raisable(error: BaseException) -> BaseException:
    """Return an error that fails the job and not the worker."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    failed = RuntimeError(f"the handler raised {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _ended() -> NoTransactionError:
    return NoTransactionError("this attempt has ended: it was cancelled")
