"""The one writer: takes turns fairly, and lets several requests share one fsync.

SQLite has one write transaction at a time and pays one fsync per commit. While requests queue for
their turn, a finished one does not commit by itself: the next one runs in the same transaction,
behind a savepoint, and one COMMIT covers them all. Nobody is answered before that COMMIT. A
request that fails is rolled back to its own savepoint and touches nobody else.

::

    BEGIN IMMEDIATE · a … · SAVEPOINT · b … · SAVEPOINT · c … · COMMIT → answer a, b, c

A statement that takes microseconds, such as inserting one row, runs right on the event loop: to
hand it to a thread and back costs more than the statement, since both threads then fight for the
GIL around every call into SQLite. What may wait (a lock of another process) or may take long (any
statement that searches, and the fsync of COMMIT) goes to the connection's own thread.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import StoreUnavailableError
from holdfast.stores.sqlite.connection_thread import ConnectionThread
from holdfast.stores.sqlite.rows import is_busy

__all__ = ["Writer"]

# A group closes when nobody waits for a turn, when it is this large, or when its first member has
# waited this long: whoever is done is not held up for more than a few others.
_GROUP_MEMBERS: Final = 16
_GROUP_SECONDS: Final = 0.005
# After a COMMIT that broke a deferred constraint everyone commits alone for a while, so that the
# one at fault fails by itself.
_ALONE_SECONDS: Final = 1.0
# So many quick statements run without letting the event loop do anything else.
_IN_A_ROW: Final = 8
# Once a whole wait for another process was in vain, nobody waits longer than this until a BEGIN
# succeeds: those who come while a process is stuck hear of it soon, and not one after the other.
_IMPATIENT_SECONDS: Final = 0.1
# Not a name that a handler would give a savepoint of its own.
_MARK: Final = "holdfast_unit"

Work = Callable[[sqlite3.Connection], Any]


class Writer:
    """Turns and groups. All methods belong to the event loop; ``work`` may run on the thread."""

    def __init__(self, thread: ConnectionThread, *, busy_seconds: float) -> None:
        """Write through a connection and its thread."""
        self._thread = thread
        self._busy_seconds = busy_seconds
        self._waits_in_vain = False
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._group: list[asyncio.Future[None]] = []
        self._group_since = 0.0
        self._alone_until = 0.0
        self._in_a_row = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_turn(self) -> None:
        """Wait for the turn, first come, first served. Raises if nobody can have it."""
        if not self._taken:
            self._taken = True
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self._give_turn()  # it was ours just as we left
            raise

    async def begin(self, work: Work, *, is_quick: bool) -> Any:
        """Run the first piece of work of the one whose turn it is."""
        mark = self._mark()

        def begin_here(db: sqlite3.Connection) -> Any:
            _open(db, mark)
            self._waits_in_vain = False
            return work(db)

        seconds = self._busy_seconds
        if self._waits_in_vain:
            seconds = min(seconds, _IMPATIENT_SECONDS)

        def begin_patiently(db: sqlite3.Connection) -> Any:
            # Noted here and not on the loop, where a caller that was cancelled hears of neither.
            try:
                _wait_and_open(db, mark, seconds)
            except _BusyError:
                self._waits_in_vain = True
                raise
            self._waits_in_vain = False
            return work(db)

        if is_quick and not self._thread.pending:
            try:
                return self._run_here(begin_here)
            except _BusyError:  # another process writes: wait for it, but not here
                pass
        try:
            return await self._run(begin_patiently)
        except _BusyError:
            self._refuse_waiting()
            raise _locked() from None

    async def run(self, work: Work, *, is_quick: bool) -> Any:
        """Run a further piece of work of the one whose turn it is."""

        def work_inside(db: sqlite3.Connection) -> Any:
            _require_transaction(db)
            return work(db)

        if is_quick and not self._thread.pending:
            self._in_a_row += 1
            if self._in_a_row % _IN_A_ROW == 0:
                await asyncio.sleep(0)  # a handler that inserts in a loop lets others breathe
            return self._run_here(work_inside)
        return await self._run(work_inside)

    async def commit(self, work: Work) -> None:
        """Run the last piece of work, give the turn back, and wait until all is on the disk.

        When it raises, everything was undone and the turn given back already. So it is when the
        caller is cancelled: the group commits by itself, and nobody may end it a second time.
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
        if self._should_close(loop.time()):
            self._finish_whatever_happens(self._close_group())
        else:
            self._give_turn()
        await committed

    async def rollback(self) -> None:
        """Undo the one whose turn it is, and only that one. Gives the turn back."""
        await asyncio.shield(self._finish_whatever_happens(self._rollback()))

    # -- endings: never cut short, or the turn would be lost -----------------------------------

    def _finish_whatever_happens(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _close_group(self) -> None:
        with suppress(Exception):  # the members are told
            await self._run(_commit_all, commits=True)
        self._give_turn()

    async def _rollback(self) -> None:
        mark = self._mark()

        def undo(db: sqlite3.Connection) -> None:
            if not db.in_transaction:
                return
            if mark is None:
                db.execute("ROLLBACK")
                return
            try:
                db.execute(f"ROLLBACK TO {mark}")
                db.execute(f"RELEASE {mark}")
            except sqlite3.OperationalError:
                # The handler ended our savepoint: its rows can no longer be told apart from the
                # group's, so nothing may stay.
                db.execute("ROLLBACK")

        with suppress(Exception):
            await self._run(undo)
        self._give_turn()

    def _give_turn(self) -> None:
        """Give the turn to the next; with nobody waiting, commit what is still open."""
        if self._has_waiting():
            self._waiting.popleft().set_result(None)
        elif self._group:
            self._finish_whatever_happens(self._close_group())
        else:
            self._taken = False

    def _refuse_waiting(self) -> None:
        """Tell everyone in the queue that the lock cannot be had.

        They would wait for the same process, each as long again: the last of n for n times that.
        """
        while self._has_waiting():
            self._waiting.popleft().set_exception(_locked())

    # -- groups -----------------------------------------------------------------------------

    def _has_waiting(self) -> bool:
        while self._waiting and self._waiting[0].done():  # left before its turn came
            self._waiting.popleft()
        return bool(self._waiting)

    def _mark(self) -> str | None:
        """Return the savepoint of the one whose turn it is; the first of a group needs none."""
        return f"{_MARK}_{len(self._group)}" if self._group else None

    def _should_close(self, now: float) -> bool:
        return (
            not self._has_waiting()
            or len(self._group) >= _GROUP_MEMBERS
            or now - self._group_since >= _GROUP_SECONDS
            or now < self._alone_until
        )

    async def _run(self, work: Work, *, commits: bool = False) -> Any:
        """Run on the thread; when the transaction is over after it, tell the group how."""

        def watched(db: sqlite3.Connection) -> tuple[Any, BaseException | None, bool]:
            try:
                return work(db), None, db.in_transaction
            except BaseException as error:  # noqa: BLE001 - raised again on the loop
                return None, error, db.in_transaction

        try:
            result, error, is_open = await self._thread.run(watched)
        except StoreUnavailableError as closed:  # closing the file undoes what is open
            self._tell_group(closed)
            raise
        if self._group and not is_open:
            ended = StoreUnavailableError("the transaction was ended by a handler")
            self._tell_group(error or (None if commits else ended))
        if error is not None:
            raise error
        return result

    def _run_here(self, work: Work) -> Any:
        def watched(db: sqlite3.Connection) -> Any:
            try:
                return work(db)
            except sqlite3.Error as error:
                if self._group and not db.in_transaction:
                    self._tell_group(error)
                raise

        return self._thread.run_here(watched)

    def _tell_group(self, error: BaseException | None) -> None:
        group, self._group = self._group, []
        if isinstance(error, sqlite3.IntegrityError):
            self._alone_until = asyncio.get_running_loop().time() + _ALONE_SECONDS
        for member in group:
            if member.done():
                continue
            if error is None:
                member.set_result(None)
            else:
                member.set_exception(StoreUnavailableError(f"SQLite could not commit: {error}"))


class _BusyError(Exception):
    """Another process holds the write lock."""


def _open(db: sqlite3.Connection, mark: str | None) -> None:
    """Begin, or set a mark in the transaction the group has open. Waits for nobody."""
    if mark is not None:
        _require_transaction(db)
        db.execute(f"SAVEPOINT {mark}")
        return
    try:
        db.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if is_busy(error):
            raise _BusyError from error
        raise


def _wait_and_open(db: sqlite3.Connection, mark: str | None, busy_seconds: float) -> None:
    """Begin, waiting for another process if need be: on the thread only."""
    db.execute(f"PRAGMA busy_timeout={int(busy_seconds * 1000)}")
    try:
        _open(db, mark)
    finally:
        db.execute("PRAGMA busy_timeout=0")


def _locked() -> StoreUnavailableError:
    return StoreUnavailableError(
        "SQLite: database is locked, another process does not stop writing"
    )


def _require_transaction(db: sqlite3.Connection) -> None:
    if not db.in_transaction:  # SQLite ends it by itself, e.g. when the disk is full
        raise StoreUnavailableError("SQLite rolled the transaction back")


def _commit_all(db: sqlite3.Connection) -> None:
    try:
        db.execute("COMMIT")
    except BaseException:
        # A COMMIT that fails leaves its transaction open: nothing in it may stay.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
