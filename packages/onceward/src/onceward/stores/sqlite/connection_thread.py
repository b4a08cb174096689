"""One SQLite connection on its own thread, so that the event loop never waits for a disk."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable
from typing import TypeVar

from onceward.errors import StoreUnavailableError

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]

__all__ = ["ConnectionThread"]

_Job = tuple[Callable[[sqlite3.Connection], object], asyncio.Future[object]]


class ConnectionThread:
    """Runs functions with its connection, in the order in which they were submitted.

    A thread pool would cost twice as much per call, because its futures are wrapped twice.
    """

    def __init__(self, name: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: asyncio.Future[object] | None = None
        self._connection: sqlite3.Connection | None = None
        # How many functions were submitted and have not finished.
        self.pending = 0
        self._is_stopped = False

    async def start(self) -> None:
        """Open the connection; raises what ``connect`` raises."""
        self._loop = asyncio.get_running_loop()
        self._opened = self._loop.create_future()
        self._thread.start()
        await self._opened

    async def run(self, work: Work[T]) -> T:
        """Run a function on the thread. Cancelling the caller does not stop it."""
        if self._loop is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        future: asyncio.Future[object] = self._loop.create_future()
        self.pending += 1
        self._jobs.put((work, future))
        return await future  # type: ignore[return-value]

    def run_here(self, work: Work[T]) -> T:
        """Run a function on the event loop's thread.

        Only for functions that take microseconds, and only while none is pending: functions must
        run in the order in which they were submitted.
        """
        if self._connection is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        return work(self._connection)

    async def stop(self) -> None:
        """Finish submitted functions, close the connection, end the thread."""
        self._is_stopped = True
        if self._thread.is_alive():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        assert self._opened is not None  # noqa: S101
        try:
            connection = self._connect()
        except BaseException as error:  # noqa: BLE001 - raised by start()
            self._settle(self._opened, None, error)
            return
        self._connection = connection
        self._settle(self._opened, None, None)
        try:
            while (job := self._jobs.get()) is not None:
                work, future = job
                try:
                    result = work(connection)
                except BaseException as error:  # noqa: BLE001 - raised by run()
                    self._settle(future, None, error)
                else:
                    self._settle(future, result, None)
        finally:
            self._connection = None
            connection.close()

    def _settle(
        self, future: asyncio.Future[object], result: object, error: BaseException | None
    ) -> None:
        assert self._loop is not None  # noqa: S101
        try:
            self._loop.call_soon_threadsafe(self._set, future, result, error)
        except RuntimeError:  # the loop is closed
            return

    def _set(
        self, future: asyncio.Future[object], result: object, error: BaseException | None
    ) -> None:
        if future is not self._opened:
            self.pending -= 1
        if future.done():  # the caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
