"""Group commit: requests write one at a time, and several share one fsync.

SQLite has one write transaction at a time and needs one fsync per commit. While requests queue for
the write turn, a finished one does not commit: the next one runs in the same transaction, after a
savepoint, and one COMMIT covers them all. No response is sent before that COMMIT. A request that
fails is rolled back to its savepoint and affects no other.

::

    BEGIN IMMEDIATE · a … · SAVEPOINT · b … · SAVEPOINT · c … · COMMIT → respond to a, b, c

The chunk of a batch holds the turn for several requests. Single requests are served before waiting
chunks, and chunks end early while one waits. A group with a single request commits before the next
chunk begins. So a request waits for a few others, not for batches.

A statement that takes microseconds, such as inserting one row, runs on the event loop: passing it
to a thread costs more than the statement, because both threads compete for the GIL around every
call into SQLite. Statements that may wait (for a lock of another process) or take long (searches,
and the fsync of COMMIT) run on the connection's thread.

``ConnectionThread`` is a connection on a thread of its own, so that the event loop never waits for
a disk.
"""

import asyncio
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from onceward.errors import StoreUnavailableError
from onceward.stores.errors import is_sqlite_busy

T = TypeVar("T")

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

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the thread. Cancelling the caller does not stop it."""
        if self._loop is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        future: asyncio.Future[object] = self._loop.create_future()
        self.pending += 1
        self._jobs.put((work, future))
        return await future  # type: ignore[return-value]

    def run_here(self, work: Callable[[sqlite3.Connection], T]) -> T:
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


# A group commits when no request waits for the turn, when it has this many members, or when its
# first member has waited this long.
_GROUP_MEMBERS: Final = 16
_GROUP_SECONDS: Final = 0.005
# After so many single requests it is a chunk's turn, if one waits.
_BEFORE_CHUNK: Final = 16
# After a COMMIT that violated a deferred constraint, requests commit one by one for a while, so
# that only the faulty one fails.
_ALONE_SECONDS: Final = 1.0
# How many quick statements run in a row before other tasks of the event loop.
_IN_A_ROW: Final = 8
# After a wait for another process has timed out, later waits are this short until a BEGIN succeeds:
# while a process is stuck, requests fail soon instead of one after the other.
_SHORT_WAIT_SECONDS: Final = 0.1
# The prefix of savepoint names; handlers use other names.
_SAVEPOINT: Final = "onceward_unit"

Work = Callable[[sqlite3.Connection], Any]


class Writer:
    """Grants the write turn and commits groups. Call it from the event loop only."""

    def __init__(self, thread: ConnectionThread, *, busy_seconds: float) -> None:
        self._thread = thread
        self._busy_seconds = busy_seconds
        self._has_timed_out = False
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waiting_chunks: deque[asyncio.Future[None]] = deque()
        # Single requests that were served while a chunk has waited.
        self._before_chunk = 0
        self._group: list[asyncio.Future[None]] = []
        self._group_since = 0.0
        # A single request is in the group.
        self._has_single = False
        self._alone_until = 0.0
        self._in_a_row = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def has_waiting_single(self) -> bool:
        """True while a request that is not in a chunk waits for the turn."""
        return _has_waiting(self._waiting)

    async def take_turn(self, *, is_chunk: bool = False) -> None:
        """Wait for the write turn. Raises if the lock cannot be acquired.

        Single requests come first, each kind in order of arrival.
        """
        if not self._taken:
            self._taken = True
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._waiting_chunks if is_chunk else self._waiting).append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._pass_turn()  # granted at the same time
            raise

    async def begin(self, work: Work, *, is_quick: bool, waits: bool = True) -> Any:
        """Begin the transaction or set a savepoint, then run the first function of a request.

        Without ``waits`` it raises at once if another process writes, and no other request fails.
        """
        savepoint = self._savepoint()

        def begin_at_once(db: sqlite3.Connection) -> Any:
            _open(db, savepoint)
            self._has_timed_out = False
            return work(db)

        seconds = self._busy_seconds
        if self._has_timed_out:
            seconds = min(seconds, _SHORT_WAIT_SECONDS)

        def begin_after_wait(db: sqlite3.Connection) -> Any:
            # Set on the thread: a cancelled caller would not see the result.
            try:
                _wait_and_open(db, savepoint, seconds)
            except _BusyError:
                self._has_timed_out = True
                raise
            self._has_timed_out = False
            return work(db)

        if not waits:
            try:
                return await self._run(begin_at_once)
            except _BusyError:
                raise _lock_timeout() from None
        if is_quick and not self._thread.pending:
            try:
                return self._run_here(begin_at_once)
            except _BusyError:  # another process writes: wait on the thread
                pass
        try:
            return await self._run(begin_after_wait)
        except _BusyError:
            self._refuse_waiting()
            raise _lock_timeout() from None

    async def run(self, work: Work, *, is_quick: bool) -> Any:
        """Run a further function of the request that has the turn."""

        def work_inside(db: sqlite3.Connection) -> Any:
            _require_transaction(db)
            return work(db)

        if is_quick and not self._thread.pending:
            self._in_a_row += 1
            if self._in_a_row % _IN_A_ROW == 0:
                await asyncio.sleep(0)  # a handler may insert in a loop
            return self._run_here(work_inside)
        return await self._run(work_inside)

    async def commit(self, work: Work, *, is_chunk: bool = False) -> None:
        """Run the last function, release the turn, and wait for the commit of the group.

        If it raises, the request was rolled back and the turn released. If the caller is
        cancelled, the group still commits; the caller must not end the transaction again.
        """
        try:
            await self.run(work, is_quick=True)
        except BaseException:
            await self.rollback()
            raise
        loop = asyncio.get_running_loop()
        committed: asyncio.Future[None] = loop.create_future()
        if not self._group:
            self._group_since = loop.time()
        self._group.append(committed)
        self._has_single = self._has_single or not is_chunk
        if self._should_close(loop.time()):
            self._run_to_end(self._close_group())
        else:
            self._pass_turn()
        await committed

    async def rollback(self) -> None:
        """Roll back the request that has the turn, and only that one. Releases the turn."""
        await asyncio.shield(self._run_to_end(self._rollback()))

    # -- not cancellable, or the turn would be lost -----------------------------------------------

    def _run_to_end(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close_group(self) -> None:
        with suppress(Exception):  # raised in every member
            await self._run(_commit_all, commits=True)
        self._pass_turn()

    async def _rollback(self) -> None:
        savepoint = self._savepoint()

        def undo(db: sqlite3.Connection) -> None:
            if not db.in_transaction:
                return
            if savepoint is None:
                db.execute("ROLLBACK")
                return
            try:
                db.execute(f"ROLLBACK TO {savepoint}")
                db.execute(f"RELEASE {savepoint}")
            except sqlite3.OperationalError:
                # The handler has ended the savepoint: its rows cannot be separated from those of
                # the group, so all of them are rolled back.
                db.execute("ROLLBACK")

        with suppress(Exception):
            await self._run(undo)
        self._pass_turn()

    def _pass_turn(self) -> None:
        """Pass the turn to the next request; if none joins the open group, commit it first."""
        if self._group and not self._has_joining():
            self._run_to_end(self._close_group())
            return
        has_chunk, has_single = _has_waiting(self._waiting_chunks), self.has_waiting_single
        if has_chunk and (not has_single or self._before_chunk >= _BEFORE_CHUNK):
            self._before_chunk = 0
            self._waiting_chunks.popleft().set_result(None)
        elif has_single:
            self._before_chunk += has_chunk
            self._waiting.popleft().set_result(None)
        else:
            self._taken = False

    def _refuse_waiting(self) -> None:
        """Fail all waiting requests: each would wait for the same process for as long again."""
        for waiting in (self._waiting, self._waiting_chunks):
            while _has_waiting(waiting):
                waiting.popleft().set_exception(_lock_timeout())

    # -- groups -----------------------------------------------------------------------------

    def _has_joining(self) -> bool:
        """Return whether the next request joins the open group."""
        if self.has_waiting_single:
            return True
        # A single request in the group would wait for all requests of the chunk.
        return not self._has_single and _has_waiting(self._waiting_chunks)

    def _savepoint(self) -> str | None:
        """Return the name for the current request's savepoint; the first of a group has none."""
        return f"{_SAVEPOINT}_{len(self._group)}" if self._group else None

    def _should_close(self, now: float) -> bool:
        return (
            not self._has_joining()
            or len(self._group) >= _GROUP_MEMBERS
            or now - self._group_since >= _GROUP_SECONDS
            or now < self._alone_until
        )

    async def _run(self, work: Work, *, commits: bool = False) -> Any:
        """Run on the thread; if that ended the transaction, resolve the group."""

        def checked(db: sqlite3.Connection) -> tuple[Any, BaseException | None, bool]:
            try:
                return work(db), None, db.in_transaction
            except BaseException as error:  # noqa: BLE001 - raised again on the loop
                return None, error, db.in_transaction

        try:
            result, error, is_open = await self._thread.run(checked)
        except StoreUnavailableError as closed:  # closing the file rolls back
            self._resolve_group(closed)
            raise
        if self._group and not is_open:
            ended = error
            if ended is None and not commits:
                ended = StoreUnavailableError("the transaction was ended by a handler")
            self._resolve_group(ended)
        if error is not None:
            raise error
        return result

    def _run_here(self, work: Work) -> Any:
        def checked(db: sqlite3.Connection) -> Any:
            try:
                return work(db)
            except sqlite3.Error as error:
                if self._group and not db.in_transaction:
                    self._resolve_group(error)
                raise

        return self._thread.run_here(checked)

    def _resolve_group(self, error: BaseException | None) -> None:
        group, self._group = self._group, []
        self._has_single = False
        if isinstance(error, sqlite3.IntegrityError):
            self._alone_until = asyncio.get_running_loop().time() + _ALONE_SECONDS
        for member in group:
            if member.done():
                continue
            if error is None:
                member.set_result(None)
            else:
                member.set_exception(StoreUnavailableError(f"SQLite could not commit: {error}"))


def _has_waiting(tickets: deque[asyncio.Future[None]]) -> bool:
    while tickets and tickets[0].done():  # cancelled
        tickets.popleft()
    return bool(tickets)


class _BusyError(Exception):
    """Another process holds the write lock."""


def _open(db: sqlite3.Connection, savepoint: str | None) -> None:
    """Begin, or set a savepoint in the group's transaction. Does not wait."""
    if savepoint is not None:
        _require_transaction(db)
        db.execute(f"SAVEPOINT {savepoint}")
        return
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if is_sqlite_busy(error):
            raise _BusyError from error
        raise


def _wait_and_open(db: sqlite3.Connection, savepoint: str | None, busy_seconds: float) -> None:
    """Begin after waiting for other processes; on the thread only."""
    db.execute(f"PRAGMA busy_timeout={int(busy_seconds * 1000)}")
    try:
        _open(db, savepoint)
    finally:
        db.execute("PRAGMA busy_timeout=0")


def _lock_timeout() -> StoreUnavailableError:
    return StoreUnavailableError(
        "SQLite: database is locked: timed out waiting for another process"
    )


def _require_transaction(db: sqlite3.Connection) -> None:
    if not db.in_transaction:  # SQLite ends it e.g. when the disk is full
        raise StoreUnavailableError("SQLite has rolled the transaction back")


def _commit_all(db: sqlite3.Connection) -> None:
    try:
        db.execute("COMMIT")
    except BaseException:
        # A failed COMMIT leaves the transaction open.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
