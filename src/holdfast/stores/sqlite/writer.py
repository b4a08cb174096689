"""The one writer: takes turns fairly, and lets several requests share one fsync.

SQLite has one write transaction at a time and pays one fsync per commit. While requests queue for
their turn, a finished one does not commit by itself: its savepoint is released, the next one runs
in the same transaction, and one COMMIT covers them all. Nobody is answered before that COMMIT. A
request that fails is rolled back to its own savepoint and touches nobody else.

::

    BEGIN IMMEDIATE · SAVEPOINT a … RELEASE a · SAVEPOINT b … RELEASE b · COMMIT → answer a, b
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from holdfast.errors import StoreUnavailableError
from holdfast.stores.sqlite.thread import ConnectionThread

__all__ = ["Writer"]

# A group closes when nobody waits for a turn, when it is this large, or when its first member has
# waited this long: whoever is done is not held up for more than a few others.
_GROUP_MEMBERS: Final = 16
_GROUP_SECONDS: Final = 0.005
# After a COMMIT that broke a deferred constraint everyone commits alone for a while, so that the
# one at fault fails by itself.
_ALONE_SECONDS: Final = 1.0
# Not a name that a handler would give a savepoint of its own.
_MARK: Final = "holdfast_unit"

Work = Callable[[sqlite3.Connection], Any]


class Writer:
    """Turns and groups. All methods belong to the event loop; only ``work`` runs on the thread."""

    def __init__(self, thread: ConnectionThread) -> None:
        """Write through a connection's thread."""
        self._thread = thread
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._group: list[asyncio.Future[None]] = []
        self._group_since = 0.0
        self._alone_until = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    async def take_turn(self) -> None:
        """Wait for the turn, first come, first served."""
        if not self._taken:
            self._taken = True
            return
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():  # given just as we left
                self._finish_whatever_happens(self._pass_on())
            raise

    async def begin(self, work: Work) -> Any:
        """Run the first piece of work of the one whose turn it is, in a savepoint of its own."""

        def begin_and_work(db: sqlite3.Connection) -> Any:
            if not db.in_transaction:
                db.execute("BEGIN IMMEDIATE")
            db.execute(f"SAVEPOINT {_MARK}")
            return work(db)

        return await self._run(begin_and_work)

    async def run(self, work: Work) -> Any:
        """Run a further piece of work of the one whose turn it is."""

        def work_inside(db: sqlite3.Connection) -> Any:
            _require_transaction(db)
            return work(db)

        return await self._run(work_inside)

    async def commit(self, work: Work) -> None:
        """Run the last piece of work, give the turn back, and wait until all is on the disk.

        When it raises, everything was undone and the turn given back already. So it is when the
        caller is cancelled: the ending goes on by itself, and nobody may end it a second time.
        """
        await asyncio.shield(self._finish_whatever_happens(self._commit(work)))

    async def rollback(self) -> None:
        """Undo the one whose turn it is, and only that one. Gives the turn back."""
        await asyncio.shield(self._finish_whatever_happens(self._rollback()))

    # -- endings: never cut short, or the turn would be lost -----------------------------------

    def _finish_whatever_happens(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever was waiting has got it, or has left

    async def _commit(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
        closing = self._should_close(loop.time())

        def finish(db: sqlite3.Connection) -> None:
            _require_transaction(db)
            work(db)
            db.execute(f"RELEASE {_MARK}")
            if closing:
                _commit_all(db)

        try:
            await self._run(finish, commits=closing)
        except BaseException:
            await self._rollback()
            raise
        if closing:
            await self._pass_on()
            return
        committed: asyncio.Future[None] = loop.create_future()
        if not self._group:
            self._group_since = loop.time()
        self._group.append(committed)
        await self._pass_on()
        await committed

    async def _rollback(self) -> None:
        def undo(db: sqlite3.Connection) -> None:
            if db.in_transaction:
                try:
                    db.execute(f"ROLLBACK TO {_MARK}")
                    db.execute(f"RELEASE {_MARK}")
                except sqlite3.OperationalError:
                    # The handler ended our savepoint: its rows can no longer be told apart from
                    # the group's, so nothing may stay.
                    db.execute("ROLLBACK")
                if not self._group and db.in_transaction:
                    db.execute("ROLLBACK")

        with suppress(Exception):
            await self._run(undo)
        await self._pass_on()

    async def _pass_on(self) -> None:
        """Give the turn to the next; with nobody waiting, commit what is still open."""
        if self._group and not self._has_waiting():
            with suppress(Exception):  # the members are told
                await self._run(_commit_all, commits=True)
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_result(None)
                return
        self._taken = False

    # -- groups -----------------------------------------------------------------------------

    def _has_waiting(self) -> bool:
        while self._waiting and self._waiting[0].done():  # left before its turn came
            self._waiting.popleft()
        return bool(self._waiting)

    def _should_close(self, now: float) -> bool:
        return (
            not self._has_waiting()
            or len(self._group) + 1 >= _GROUP_MEMBERS
            or (bool(self._group) and now - self._group_since >= _GROUP_SECONDS)
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
