"""Transactions: one writer at a time, one commit per operation or per group, events after it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

from holdfast.device.database import AppConnection, Database
from holdfast.device.events import Event, Events
from holdfast.device.unit import Unit
from holdfast.device.world import FaultPoints
from holdfast.errors import FileBusyError, FileDamagedError, UsageError
from holdfast.ports import Clock

__all__ = ["Transactions"]


class Transactions:
    """Hands out units of work on one connection, to one thread at a time."""

    def __init__(
        self, database: Database, clock: Clock, events: Events, fault_points: FaultPoints | None
    ) -> None:
        """Work on this connection, with this clock."""
        self._database = database
        self._clock = clock
        self._events = events
        self._fault_points = fault_points
        self._lock = RLock()
        self._pid = os.getpid()
        # What the operations of an open group have to tell; None if there is no group.
        self._group: list[Event] | None = None
        self._closed = False

    @contextmanager
    def write(self, operation: str, connection: AppConnection | None = None) -> Iterator[Unit]:
        """Give a unit whose work commits when the block ends, and is undone if it raises."""
        with self._held():
            if connection is not None:
                with _savepoint(self._database.guest(connection)) as guest:
                    yield self._unit(guest)
                return  # the app commits, and then announces
            if self._group is not None:
                with _savepoint(self._database):
                    unit = self._unit(self._database)
                    yield unit
                    self._reach(f"{operation}.before_commit")
                self._group.extend(unit.events)
                return
            unit = self._begin()
            try:
                yield unit
                self._reach(f"{operation}.before_commit")
                self._database.rows("COMMIT")
            except BaseException:
                self._database.rollback()
                raise
            self._events.put(unit.events)
            self._reach(f"{operation}.after_commit")
        self._events.deliver()

    @contextmanager
    def group(self) -> Iterator[AppConnection]:
        """Make all operations inside one commit; a group within a group joins it."""
        with self._held():
            if self._group is not None:
                with _savepoint(self._database):
                    yield self._database.connection
                return
            self._begin()
            told = self._group = []
            try:
                yield self._database.connection
                self._reach("transaction.before_commit")
                self._database.rows("COMMIT")
            except BaseException:
                self._database.rollback()
                raise
            finally:
                self._group = None
            self._events.put(told)
            self._reach("transaction.after_commit")
        self._events.deliver()

    @contextmanager
    def read(self) -> Iterator[Unit]:
        """Give a unit for looking only."""
        with self._held():
            yield self._unit(self._database)

    def close(self) -> None:
        """Let go of the file, after what is running."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._database.close()

    def checkpoint(self) -> None:
        """Move the log into the file and empty it, unless somebody reads from it just now."""
        with self._held():
            if self._group is None:
                try:
                    self._database.rows("PRAGMA wal_checkpoint(TRUNCATE)")
                except FileBusyError:
                    return

    def rekey(self, passphrase: str | bytes) -> None:
        """Encrypt the file under another passphrase."""
        with self._held():
            if self._group is not None:
                raise UsageError("the passphrase cannot be changed inside a transaction")
            self._database.rekey(passphrase)

    def check_integrity(self) -> None:
        """Raise unless every page and every index holds."""
        with self._held():
            found = self._database.rows("PRAGMA integrity_check(1)")
            if found != [("ok",)]:
                raise FileDamagedError(f"{self._database.path} is damaged: {found[0][0]}")

    @contextmanager
    def _held(self) -> Iterator[None]:
        with self._lock:
            if os.getpid() != self._pid:
                raise UsageError("an outbox cannot be used across fork(): open it in each process")
            if self._closed:
                raise UsageError("the outbox is closed")
            yield

    def _begin(self) -> Unit:
        self._database.rows("BEGIN IMMEDIATE")
        unit = self._unit(self._database)
        try:
            unit.keep_time()
        except BaseException:
            self._database.rollback()
            raise
        return unit

    def _unit(self, database: Database) -> Unit:
        return Unit(database, self._clock, listening=self._events.listening)

    def _reach(self, point: str) -> None:
        if self._fault_points is not None:
            self._fault_points.reach(point)


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
