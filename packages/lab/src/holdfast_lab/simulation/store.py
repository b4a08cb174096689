"""The real SQLite store with its threads run as steps of the loop.

The file's own durability is not tortured here: a kill takes a process, not the machine, so what
SQLite has committed is there; see ``database``. The device's file is the one that loses unsynced
writes; see ``disk``.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

from holdfast.errors import StoreUnavailableError
from holdfast.stores.notifier import LocalNotifier
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.group_commit import Writer
from holdfast_lab.simulation.database import ServerDatabase
from holdfast_lab.simulation.loop import Process

__all__ = ["SteppedStore", "StoreWorld"]

_LOOK_AGAIN_SECONDS: Final = 0.002
_PATIENT_SECONDS: Final = 1.0
_BUSY_SECONDS: Final = 60.0


class StoreWorld(Protocol):
    """What a store needs to know of the world it is in."""

    database: ServerDatabase
    writers: list["SteppedConnection"]
    notifiers: list["SteppedNotifier"]

    def disk_seconds(self) -> float:
        """Say how long this piece of work on the database takes."""

    def ring_seconds(self) -> float | None:
        """Say how long a ring of the bell takes; None if it gets lost."""


class SteppedConnection:
    """Takes the place of a connection's thread: work runs in order, each piece as one step."""

    def __init__(self, world: StoreWorld, process: Process, connect: Callable[[], Any]) -> None:
        """Open nothing yet."""
        self._world = world
        self._process = process
        self._connect = connect
        self._jobs: deque[tuple[Callable[[Any], Any], asyncio.Future[Any]]] = deque()
        self._connection: sqlite3.Connection | None = None
        self._blocked_since: float | None = None
        self._patience = _LOOK_AGAIN_SECONDS
        self.pending = 0
        self.is_writer = False
        self._is_stopped = False

    @property
    def in_transaction(self) -> bool:
        """True while it keeps others from writing."""
        connection = self._connection
        return self._process.alive and connection is not None and connection.in_transaction

    async def start(self) -> None:
        """Open the connection."""
        self._connection = self._connect()
        if self.is_writer:
            self._world.writers.append(self)

    async def run(self, work: Callable[[Any], Any]) -> Any:
        """Run a function later. Cancelling the caller does not cancel the work."""
        if self._connection is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        future = asyncio.get_running_loop().create_future()
        self.pending += 1
        self._jobs.append((work, future))
        if len(self._jobs) == 1:
            self._next()
        return await future

    def run_here(self, work: Callable[[Any], Any]) -> Any:
        """Run a function now."""
        if self._connection is None or self._is_stopped:
            raise StoreUnavailableError("the store is not open")
        return work(self._connection)

    async def stop(self) -> None:
        """Close the connection."""
        self._is_stopped = True
        while self._jobs:  # noqa: ASYNC110 - virtual time costs nothing
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)
        self.cut()

    def cut(self) -> None:
        """Close the connection with whatever is open in it: SQLite undoes that."""
        if self in self._world.writers:
            self._world.writers.remove(self)
        if self._connection is not None:
            self._world.database.give_back(self._connection)
            self._connection = None

    def _next(self) -> None:
        self._process.loop.call_later(
            self._world.disk_seconds(), self._serve, context=self._process.context.copy()
        )

    def _serve(self) -> None:
        """Run the first piece of work, unless a process beside us writes: then SQLite waits."""
        loop = self._process.loop
        if self.is_writer and not self.in_transaction and self._is_blocked(loop.time()):
            self._patience = min(2 * self._patience, _PATIENT_SECONDS)
            loop.call_later(self._patience, self._serve, context=self._process.context.copy())
            return
        self._patience = _LOOK_AGAIN_SECONDS
        work, future = self._jobs.popleft()
        self.pending -= 1
        try:
            result = work(self._connection)
        except Exception as error:  # noqa: BLE001 - handed to whoever awaits
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)
        if self._jobs:
            self._next()

    def _is_blocked(self, now: float) -> bool:
        if not any(other.in_transaction for other in self._world.writers if other is not self):
            self._blocked_since = None
            return False
        if self._blocked_since is None:
            self._blocked_since = now
        if now - self._blocked_since < _BUSY_SECONDS:
            return True
        self._blocked_since = None  # SQLite says that the database is locked
        return False


class SteppedNotifier(LocalNotifier):
    """Rings in every process of the world, a moment later or never."""

    def __init__(self, world: StoreWorld, process: Process) -> None:
        """Be silent."""
        super().__init__()
        self._world = world
        self._process = process

    async def open(self) -> None:
        """Listen."""
        await super().open()
        self._world.notifiers.append(self)
        self._process.at_death.append(self._remove)

    async def close(self) -> None:
        """Listen no more."""
        self._remove()

    def notify(self) -> None:
        """Ring everywhere."""
        for notifier in self._world.notifiers:
            seconds = self._world.ring_seconds()
            if seconds is not None:
                process = notifier._process  # noqa: SLF001
                process.loop.call_later(seconds, notifier.hear, context=process.context.copy())
        super().notify()

    def hear(self) -> None:
        """Wake who waits here."""
        super().notify()

    def _remove(self) -> None:
        if self in self._world.notifiers:
            self._world.notifiers.remove(self)


class SteppedStore(SqliteStore):
    """The store of one process."""

    def __init__(self, world: StoreWorld, process: Process) -> None:
        """Take the world's file, which is migrated already."""
        self._world = world
        self._process = process
        # Not one second of real waiting: whoever has to wait for a lock does so in virtual time.
        super().__init__(world.database.path, busy_seconds=0.0)

    def notifier(self) -> Any:
        """Return a bell that rings in virtual time."""
        return SteppedNotifier(self._world, self._process)

    def _make_threads(self) -> None:
        writing = SteppedConnection(self._world, self._process, self._connect_writer)
        writing.is_writer = True
        reading = SteppedConnection(self._world, self._process, self._connect)
        # They do what a thread does, for whoever asks no more than that.
        self._writing, self._reader = cast("Any", writing), cast("Any", reading)
        self._writer = Writer(self._writing, busy_seconds=0.0)
        self._process.at_death += [writing.cut, reading.cut, self._cut_lookup]

    def _cut_lookup(self) -> None:
        if self._lookup is not None:
            self._world.database.give_back(self._lookup)
            self._lookup = None

    def _connect(self) -> sqlite3.Connection:
        return self._world.database.take(super()._connect)
