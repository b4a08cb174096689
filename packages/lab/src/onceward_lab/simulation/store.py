"""The real SQLite store, with its threads run as steps of the virtual loop.

As on a network, the connection may be lost in COMMIT: applied or not, the caller does not know.
With a standby, a record that was read is replayed only after a commit that it has confirmed.

Unsynced writes are not lost here: a kill ends a process and not the machine, so everything that
SQLite has committed is there; see ``database``. The device's file loses unsynced writes; see
``faulty_vfs``.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, cast

from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.ports import Found, KeyClaimed
from onceward.records import Record, RecordId
from onceward.stores.notifier import LocalNotifier
from onceward.stores.replication import ConfirmedCommits, ReplicationBarrier
from onceward.stores.sqlite import SqliteStore
from onceward.stores.sqlite.group_commit import Writer
from onceward.stores.sqlite.unit_of_work import SqliteChunk
from onceward_lab.simulation.database import ServerDatabase
from onceward_lab.simulation.loop import Process
from onceward_lab.simulation.standby import Standby

__all__ = ["InjectedCutError", "SimulatedStore", "StoreWorld"]

_LOCK_POLL_SECONDS: Final = 0.002
_MAX_LOCK_POLL_SECONDS: Final = 1.0
_BUSY_TIMEOUT_SECONDS: Final = 60.0


class InjectedCutError(StoreUnavailableError):
    """The connection was lost in a statement of its own transaction, on purpose."""


class StoreWorld(Protocol):
    """The parts of the world that a store uses."""

    database: ServerDatabase
    # The database has a synchronous standby; None if it has none.
    standby: Standby | None
    writers: list["SimulatedConnection"]
    notifiers: list["SimulatedNotifier"]

    def cut_commit(self) -> bool | None:
        """Return whether the next commit is applied, if its connection is lost; None if not."""

    def note_unknown_commit(self) -> None:
        """Count a commit whose outcome the caller does not know."""

    def disk_latency(self) -> float:
        """Return the seconds that the next piece of work on the database takes."""

    def notification_delay(self) -> float | None:
        """Return the seconds that a notification takes; None if it is lost."""


class SimulatedConnection:
    """Replaces the thread of a connection: work runs in order, each piece as one step."""

    def __init__(self, world: StoreWorld, process: Process, connect: Callable[[], Any]) -> None:
        self._world = world
        self._process = process
        self._connect = connect
        self._pending_work: deque[tuple[Callable[[Any], Any], asyncio.Future[Any]]] = deque()
        self._connection: sqlite3.Connection | None = None
        self._blocked_since: float | None = None
        self._retry_seconds = _LOCK_POLL_SECONDS
        self.pending = 0
        self.is_writer = False
        self._is_stopped = False

    @property
    def in_transaction(self) -> bool:
        """True while its transaction prevents others from writing."""
        connection = self._connection
        return self._process.alive and connection is not None and connection.in_transaction

    async def start(self) -> None:
        """Open the connection."""
        self._connection = self._connect()
        if self.is_writer:
            self._world.writers.append(self)

    async def run(self, work: Callable[[Any], Any]) -> Any:
        """Run a function in a later step. Cancelling the caller does not cancel the work."""
        if self._connection is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        future = asyncio.get_running_loop().create_future()
        self.pending += 1
        self._pending_work.append((work, future))
        if len(self._pending_work) == 1:
            self._schedule_next()
        return await future

    def run_here(self, work: Callable[[Any], Any]) -> Any:
        """Run a function at once, in the step of the caller."""
        if self._connection is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        return work(self._connection)

    async def stop(self) -> None:
        """Close the connection after the work that is pending."""
        self._is_stopped = True
        while self._pending_work:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(_LOCK_POLL_SECONDS)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connection and roll back its transaction, as SQLite does."""
        if self in self._world.writers:
            self._world.writers.remove(self)
        if self._connection is not None:
            self._world.database.release(self._connection)
            self._connection = None

    def _schedule_next(self) -> None:
        self._process.loop.call_later(
            self._world.disk_latency(), self._run_next, context=self._process.context.copy()
        )

    def _run_next(self) -> None:
        """Run the first piece of work; wait while another process has the write lock."""
        loop = self._process.loop
        if self.is_writer and not self.in_transaction and self._is_blocked(loop.time()):
            self._retry_seconds = min(2 * self._retry_seconds, _MAX_LOCK_POLL_SECONDS)
            loop.call_later(
                self._retry_seconds, self._run_next, context=self._process.context.copy()
            )
            return
        self._retry_seconds = _LOCK_POLL_SECONDS
        work, future = self._pending_work.popleft()
        self.pending -= 1
        try:
            result = work(self._connection)
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)
        if self._pending_work:
            self._schedule_next()

    def _is_blocked(self, now: float) -> bool:
        if not any(other.in_transaction for other in self._world.writers if other is not self):
            self._blocked_since = None
            return False
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < _BUSY_TIMEOUT_SECONDS:
            return True
        self._blocked_since = None  # now SQLite raises "database is locked"
        return False


class SimulatedWriter(Writer):
    """Commits, and sometimes loses the connection in COMMIT."""

    def __init__(self, world: StoreWorld, thread: Any) -> None:
        super().__init__(thread, busy_seconds=0.0)
        self._world = world

    async def commit(self, work: Callable[[Any], Any], *, is_chunk: bool = False) -> None:
        """Commit. Raises ``CommitUnknownError`` if it is not known whether it was."""
        is_applied = self._world.cut_commit()
        if is_applied is False:
            try:
                await self.run(work, is_quick=True)
            finally:
                await self.rollback()
        else:
            await super().commit(work, is_chunk=is_chunk)
        if is_applied is not None:
            self._world.note_unknown_commit()
            raise CommitUnknownError("the connection was lost in COMMIT")
        if self._world.standby is not None:
            try:
                await self._world.standby.wait_for_commit()
            except CommitUnknownError:
                self._world.note_unknown_commit()
                raise


class SimulatedChunk(SqliteChunk):
    """A chunk that confirms records before they are replayed, and may lack savepoints."""

    store: "SimulatedStore"
    has_savepoints = True

    async def claim(
        self, record_ids: Sequence[RecordId], now: datetime
    ) -> Sequence[KeyClaimed | Found]:
        """Look the keys up."""
        claims = await super().claim(record_ids, now)
        if any(isinstance(claim, Found) for claim in claims):
            await self.store.confirm_replicated()
        return claims

    async def end_item(self, *, is_kept: bool) -> None:
        """End the part of a request; without savepoints as on PostgreSQL."""
        if not self.has_savepoints and self._is_touched and not is_kept:
            self._is_touched = False
            self.is_broken = self.needs_savepoints = True
            return
        await super().end_item(is_kept=is_kept)


class SimulatedNotifier(LocalNotifier):
    """Notifies every process of the world, with a delay or never."""

    def __init__(self, world: StoreWorld, process: Process) -> None:
        super().__init__()
        self._world = world
        self._process = process

    async def open(self) -> None:
        """Start to receive notifications."""
        await super().open()
        self._world.notifiers.append(self)
        self._process.on_kill.append(self._remove)

    async def close(self) -> None:
        """Stop receiving notifications."""
        self._remove()

    def notify(self) -> None:
        """Notify all processes."""
        for notifier in self._world.notifiers:
            seconds = self._world.notification_delay()
            if seconds is not None:
                process = notifier._process  # noqa: SLF001
                process.loop.call_later(seconds, notifier.receive, context=process.context.copy())
        super().notify()

    def receive(self) -> None:
        """Wake the waiters of this process."""
        super().notify()

    def _remove(self) -> None:
        if self in self._world.notifiers:
            self._world.notifiers.remove(self)


class SimulatedStore(SqliteStore):
    """The store of one process, on the migrated file of the world."""

    def __init__(self, world: StoreWorld, process: Process) -> None:
        self._world = world
        self._process = process
        # No waiting in real time: waits for a lock take virtual time.
        super().__init__(world.database.path, busy_seconds=0.0)
        self._barrier: ReplicationBarrier | None = None
        if world.standby is not None:
            self._barrier = ReplicationBarrier(ConfirmedCommits(), world.standby.confirm)

    async def confirm_replicated(self) -> None:
        """Return once what was read is on the standby, if there is one; else raise."""
        if self._barrier is not None:
            await self._barrier.wait()

    async def begin_chunk(self, *, has_savepoints: bool = True) -> SqliteChunk:
        """Return a transaction for several requests."""
        chunk = await super().begin_chunk()
        confirmed = SimulatedChunk(chunk._unit, self.sql, super()._probe)  # noqa: SLF001
        confirmed.store = self
        confirmed.has_savepoints = has_savepoints
        return confirmed

    async def _probe(self, record_id: RecordId) -> Record | None:
        record = await super()._probe(record_id)
        if record is not None:
            await self.confirm_replicated()
        return record

    async def _in_transaction(self, work: Any, *, waits: bool = True) -> Any:
        try:
            return await super()._in_transaction(work, waits=waits)
        except CommitUnknownError as error:
            raise InjectedCutError(str(error), reason="outcome_unknown") from error

    def notifier(self) -> Any:
        """Return a notifier that works in virtual time."""
        return SimulatedNotifier(self._world, self._process)

    def _make_threads(self) -> None:
        writing = SimulatedConnection(self._world, self._process, self._connect_writer)
        writing.is_writer = True
        reading = SimulatedConnection(self._world, self._process, self._connect)
        # They have the methods of the threads that they replace.
        self._writing, self._reader = cast("Any", writing), cast("Any", reading)
        self._writer = SimulatedWriter(self._world, self._writing)
        self._process.on_kill += [writing.disconnect, reading.disconnect, self._release_lookup]

    def _release_lookup(self) -> None:
        if self._lookup is not None:
            self._world.database.release(self._lookup)
            self._lookup = None

    def _connect(self) -> sqlite3.Connection:
        return self._world.database.acquire(super()._connect)
