"""The thread of a request in a sync framework, and how async code runs functions in it.

Two kinds. ``DirectThread`` runs the async code itself, step by step, in the request's thread: for
stores that work in that thread, where the code never waits for an event loop. ``QueueThread`` takes
functions from a queue while the async code runs on an event loop in another thread: for all other
stores.
"""

import asyncio
import queue
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, Generic, TypeVar

from onceward.stores.threads import RequestThread
from onceward.stores.threads import request_thread as _current

T = TypeVar("T")


def run_in_request_thread(work: Callable[[], T]) -> Awaitable[T]:
    """Run a function in the thread of the request being served, or in a pool without one.

    For stores whose connections belong to that thread.
    """
    thread: RequestThread | None = _current.get(None)
    return asyncio.to_thread(work) if thread is None else thread.run(work)


def wait_in_request_thread(work: Awaitable[T]) -> T:
    """Run a coroutine to its end. Call it in the thread of a guarded request."""

    async def done() -> T:
        return await work

    thread: DirectThread | QueueThread = _current.get()
    return thread.wait(done())


def has_request_thread() -> bool:
    """Return whether this code works for a request that has a thread of its own."""
    return _current.get(None) is not None


def is_in_request_thread() -> bool:
    """Return whether this code runs in the request's own thread, without an event loop."""
    return isinstance(_current.get(None), DirectThread)


async def sleep(seconds: float) -> None:
    """Pause this task, or the request's thread where there is no event loop."""
    if is_in_request_thread():
        await run_in_request_thread(lambda: time.sleep(seconds))
    else:
        await asyncio.sleep(seconds)


class _Call(Generic[T]):
    """Passes a function to the ``DirectThread`` that runs the awaiting coroutine."""

    __slots__ = ("work",)

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work

    def __await__(self) -> Generator["_Call[T]", T, T]:
        return (yield self)


class DirectThread:
    """Runs coroutines in the request's thread.

    Each step runs under one lock of the process: like on one event loop, no two requests are in
    the async code at the same time. The functions it awaits, which are the view, statements and
    pauses, run outside the lock and in the context of the caller.
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self._lock = lock

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return _Call(work)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end. Call it in the request's thread."""
        serving = _current.set(self)
        # A copy: what the coroutine sets is not seen by the request's other code.
        run = copy_context().run
        step: Callable[[Any], Any] = work.send
        value: Any = None
        try:
            while True:
                try:
                    with self._lock:
                        call = run(step, value)
                except StopIteration as stop:
                    result: T = stop.value
                    return result
                try:
                    if not isinstance(call, _Call):
                        raise RuntimeError(f"{call!r} needs an event loop")  # noqa: TRY301, TRY004
                    step, value = work.send, call.work()
                except BaseException as error:  # noqa: BLE001 - raised again in the coroutine
                    step, value = work.throw, error
        finally:
            _current.reset(serving)


class QueueThread:
    """Runs functions that code on an event loop sends to the request's thread."""

    def __init__(self, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self._loop = loop
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )

    async def run(self, work: Callable[[], T]) -> T:
        done: Future[T] = Future()
        self._work.put((work, done))
        return await asyncio.wrap_future(done)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, and what it sends here, until it ends."""
        serving = _current.set(self)
        try:
            # The task on the loop copies the context it is created in.
            finished = asyncio.run_coroutine_threadsafe(work, self._loop())
            finished.add_done_callback(lambda _: self._work.put(None))
            while (item := self._work.get()) is not None:
                function, done = item
                if not done.set_running_or_notify_cancel():
                    continue
                try:
                    done.set_result(function())
                except BaseException as error:  # noqa: BLE001 - raised again on the loop
                    done.set_exception(error)
            return finished.result()
        finally:
            _current.reset(serving)
