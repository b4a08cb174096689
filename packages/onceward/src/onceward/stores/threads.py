"""Runs the blocking calls of a store with a sync driver outside the event loop.

A sync framework has a thread for each request, in which its handler runs. The store's calls for
that request are made in it. Where there is no such thread, they are made in a pool of the store.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, Protocol, TypeVar

from onceward.errors import StoreUnavailableError
from onceward.ports import Params, Row, Transaction

T = TypeVar("T")


class RequestThread(Protocol):
    """The thread of the request being served."""

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        """Run a function in the request's thread and return its result."""


# Set in the thread of a request of a sync framework, and in the async code that serves it.
request_thread: ContextVar[Any] = ContextVar("onceward_request_thread")


class StoreThreads:
    """Threads for as many connections as a store may use at once.

    Callers on an event loop first take a slot, one for each connection. So a thread never waits
    for a connection that another caller could only return with the help of a thread.
    """

    def __init__(
        self,
        count: int,
        *,
        wait_seconds: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Nothing is started. ``wait_seconds`` limits the wait for a slot.

        ``on_wait`` gets the seconds of each wait, served or not.
        """
        self.count = count
        self._wait_seconds = wait_seconds
        self._on_wait = on_wait
        self._slots = asyncio.Semaphore(count)
        self._taken = 0
        self._pool: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Start anew, for the running event loop."""
        self._slots = asyncio.Semaphore(self.count)
        self._taken = 0
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="onceward-store")

    async def close(self, timeout_seconds: float) -> None:
        """Give no more slots away, wait for those that are taken, and stop the threads."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        while self._taken and clock() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pool.shutdown(wait=False)

    async def take_slot(self, wait_seconds: float | None = None) -> bool:
        """Wait for a slot; return False in the thread of a request, which needs none.

        Raises ``StoreUnavailableError`` if none is free in time, or if the threads are closed.
        """
        if request_thread.get(None) is not None:
            return False
        slots = self._slots
        if slots.locked():
            seconds = self._wait_seconds if wait_seconds is None else wait_seconds
            started = time.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    await slots.acquire()
            except TimeoutError:
                raise StoreUnavailableError(
                    f"no connection was free within {seconds:g} seconds"
                ) from None
            finally:
                if self._on_wait is not None:
                    self._on_wait(time.monotonic() - started)
        else:
            await slots.acquire()
        if self._pool is None:
            slots.release()
            raise StoreUnavailableError("the store is not open")
        self._taken += 1
        return True

    def free_slot(self) -> None:
        self._taken -= 1
        self._slots.release()

    def run(
        self, work: Callable[[], T], *, cancel: Callable[[], None] | None = None
    ) -> Awaitable[T]:
        """Run a function in the thread of the request, or in the pool if there is none.

        In the pool it runs to its end, even if the caller is cancelled; ``cancel`` is then called,
        in another thread, to hasten it. After ``close``, what is still open ends elsewhere.
        """
        thread: RequestThread | None = request_thread.get(None)
        if thread is not None:
            return thread.run(work)
        return self._run_in_pool(work, cancel)

    async def _run_in_pool(self, work: Callable[[], T], cancel: Callable[[], None] | None) -> T:
        loop = asyncio.get_running_loop()
        running: asyncio.Future[T] = loop.run_in_executor(self._pool, copy_context().run, work)
        return await _to_its_end(running, cancel)

    async def run_with_slot(self, work: Callable[[], T]) -> T:
        """Take a slot for the duration of one call."""
        has_slot = await self.take_slot()
        try:
            return await self.run(work)
        finally:
            if has_slot:
                self.free_slot()


async def _to_its_end(work: "asyncio.Future[T]", cancel: Callable[[], None] | None) -> T:
    """Wait for a future. If cancelled, wait for it nevertheless, then raise ``CancelledError``.

    A thread cannot be cancelled: what it uses must not be used by another one before it ends.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        pending: set[asyncio.Future[Any]] = {work}
        if cancel is not None and not work.done():
            # Waited for as well: a late one would cancel the connection's next statement.
            pending.add(asyncio.get_running_loop().run_in_executor(None, cancel))
        while not all(future.done() for future in pending):
            with suppress(asyncio.CancelledError):
                await asyncio.wait(pending)
        if not work.cancelled():
            work.exception()  # not reported as never retrieved
        raise


class SyncTransaction:
    """The statements of a ``Transaction``; each returns when it has run."""

    def __init__(self, wait: Callable[[Any], Any], transaction: Transaction) -> None:
        """``wait`` runs a coroutine to its end and returns its result."""
        self._wait = wait
        self._transaction = transaction

    def execute(self, sql: str, params: Params = None) -> int:
        changed: int = self._wait(self._transaction.execute(sql, params))
        return changed

    def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        rows: Sequence[Row] = self._wait(self._transaction.fetch_all(sql, params))
        return rows

    def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        row: Row | None = self._wait(self._transaction.fetch_one(sql, params))
        return row
