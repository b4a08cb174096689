"""Transactions: one writer at a time, one commit per operation or per group, events after it."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from threading import RLock, get_ident
from types import TracebackType

from holdfast.errors import FileBusyError, FileDamagedError, OutboxFileError, UsageError
from holdfast.outbox.database import AppConnection, Database
from holdfast.outbox.events import Events
from holdfast.outbox.profile import ProfileRegistry
from holdfast.outbox.unit import Unit
from holdfast.outbox.world import FaultPoints, device_clock
from holdfast.ports import Clock

__all__ = ["Transactions"]


class Transactions:
    """Hands out units of work on one connection, to one thread at a time."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        events: Events,
        profiles: ProfileRegistry,
        fault_points: FaultPoints | None,
    ) -> None:
        """Work on this connection, with this clock."""
        self._database = database
        self._clock = device_clock(clock)
        self._events = events
        self._profiles = profiles
        self._fault_points = fault_points
        self._lock = RLock()
        self._pid = os.getpid()
        # The thread that has a group open, the group's unit, and whether operations in it can be
        # undone one by one.
        self._group_thread: int | None = None
        self._group: Unit | None = None
        self._savepoints = True
        self._closed = False

    def write(
        self, operation: str, connection: AppConnection | None = None
    ) -> AbstractContextManager[Unit]:
        """Give a unit whose work commits when the block ends, and is undone if it raises."""
        if connection is not None:
            return self._write_as_guest(connection)
        if self.in_group():
            return self._write_in_group(operation)
        return _Write(self, operation)

    def in_group(self) -> bool:
        """Say whether this thread has a group open."""
        return self._group_thread == get_ident()

    @contextmanager
    def _write_as_guest(self, connection: AppConnection) -> Iterator[Unit]:
        with self._held(), _savepoint(self._database.guest(connection)) as guest:
            yield self._unit(guest)
        # The app commits, and then announces.

    @contextmanager
    def _write_in_group(self, operation: str) -> Iterator[Unit]:
        with self._held(), self._undoable() as unit:
            yield unit
            self._reach(f"{operation}.before_commit")

    @contextmanager
    def group(self, *, savepoints: bool = True) -> Iterator[AppConnection]:
        """Make all operations inside one commit; a group within a group joins it.

        The time is that of its beginning for all of them.
        """
        if self.in_group():
            outside, self._savepoints = self._savepoints, True
            try:
                with self._held(), self._undoable():
                    self._savepoints = savepoints
                    yield self._database.connection
            finally:
                self._savepoints = outside
            return
        unit = self.begin()
        self._group_thread, self._group, self._savepoints = get_ident(), unit, savepoints
        undo = True
        try:
            yield self._database.connection
            undo = False
        finally:
            self._group_thread = self._group = None
            self.end("transaction", unit, undo=undo)

    @contextmanager
    def _undoable(self) -> Iterator[Unit]:
        """Give the group's unit; what is done in the block and told of it goes if it raises."""
        unit = self._group
        assert unit is not None  # noqa: S101 - asked for inside a group only
        if not self._savepoints:
            yield unit
            return
        before = len(unit.events)
        try:
            with _savepoint(self._database):
                yield unit
        except BaseException:
            del unit.events[before:]
            unit.forget_time()
            raise

    def begin(self) -> Unit:
        """Take the lock, open a transaction and read the time; ``end`` must follow."""
        self._acquire()
        try:
            self._database.rows("BEGIN IMMEDIATE")
            unit = self._unit(self._database)
            unit.keep_time()
        except BaseException:
            self._database.rollback()
            self._lock.release()
            raise
        return unit

    def end(self, operation: str, unit: Unit, *, undo: bool) -> None:
        """Commit and tell, or undo; either way the lock is free again."""
        try:
            if undo:
                self._database.rollback()
                return
            try:
                self._reach(f"{operation}.before_commit")
                self._database.rows("COMMIT")
            except BaseException:
                self._database.rollback()
                raise
            self._events.put(unit.events)
            self._reach(f"{operation}.after_commit")
        finally:
            self._lock.release()
        self._events.deliver()

    @contextmanager
    def read(self) -> Iterator[Unit]:
        """Give a unit for looking only."""
        with self._held():
            yield self._unit(self._database)

    def close(self) -> None:
        """Let go of the file, after what is running."""
        with self._lock:
            if self._closed:
                return
            if self._pid == os.getpid():
                with suppress(OutboxFileError):
                    self.keep_time()
            self._closed = True
            self._database.close()

    def keep_time(self) -> None:
        """Have the file know what time it is, if it does not."""
        self.end("keep_time", self.begin(), undo=False)

    def checkpoint(self) -> None:
        """Move the log into the file and empty it, unless somebody reads from it just now."""
        with self._held():
            if not self.in_group():
                with suppress(FileBusyError):
                    self._database.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def alone(self) -> Iterator[Database]:
        """Give the connection itself, outside any transaction."""
        with self._held():
            if self.in_group():
                raise UsageError("this cannot be done inside a transaction")
            yield self._database

    def check_integrity(self) -> None:
        """Raise unless every page and every index holds."""
        with self._held():
            found = self._database.rows("PRAGMA integrity_check(1)")
            if found != [("ok",)]:
                raise FileDamagedError(f"{self._database.path} is damaged: {found[0][0]}")

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("an outbox cannot be used across fork(): open it in each process")
        self._lock.acquire()
        if self._closed:
            self._lock.release()
            raise UsageError("the outbox is closed")

    def _unit(self, database: Database) -> Unit:
        return Unit(database, self._clock, self._profiles, listening=self._events.listening)

    def _reach(self, point: str) -> None:
        if self._fault_points is not None:
            self._fault_points.reach(point)


class _Write:
    """One operation as a transaction. Not a generator: enqueueing is quick enough to notice."""

    __slots__ = ("_operation", "_owner", "_unit")

    def __init__(self, owner: Transactions, operation: str) -> None:
        self._owner = owner
        self._operation = operation

    def __enter__(self) -> Unit:
        self._unit = self._owner.begin()
        return self._unit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._owner.end(self._operation, self._unit, undo=error is not None)


@contextmanager
def _savepoint(database: Database) -> Iterator[Database]:
    database.rows("SAVEPOINT operation")
    try:
        yield database
    except BaseException:
        # An error such as a full disk may have ended the whole transaction already.
        if database.connection.in_transaction:
            database.rows("ROLLBACK TO operation")
            database.rows("RELEASE operation")
        raise
    database.rows("RELEASE operation")
