"""Transactions on the outbox's file: one writer at a time, events delivered after the commit."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from threading import RLock, get_ident
from typing import Any, Final, Unpack

import msgspec

from onceward_outbox.clock import (
    ClockReading,
    ClockRow,
    DeviceClock,
    as_device_clock,
    read_clock,
    server_time,
)
from onceward_outbox.database import AppConnection, Database
from onceward_outbox.entry import Entry, entry_of, instant, statement
from onceward_outbox.errors import (
    EntryNotFoundError,
    FileBusyError,
    FileDamagedError,
    OutboxFileError,
    UsageError,
)
from onceward_outbox.events import Event, EventFacts, EventKind, Events
from onceward_outbox.profile import ProfileRegistry, failure_cause
from onceward_protocol.clock import Clock
from onceward_protocol.fault_points import SyncFaultPoints

_MILLISECOND: Final = timedelta(milliseconds=1)
_CLOSED: Final = "the outbox is closed"


class Transaction:
    """One open transaction: statements by name, the time it began, and events to deliver."""

    __slots__ = (
        "_clock",
        "_database",
        "_now_text",
        "_reading",
        "events",
        "has_listeners",
        "profiles",
    )

    def __init__(
        self,
        database: Database,
        clock: DeviceClock,
        profiles: ProfileRegistry,
        *,
        has_listeners: bool,
    ) -> None:
        self._database = database
        self._clock = clock
        # Whether events are delivered to anyone.
        self.has_listeners = has_listeners
        self._reading: ClockReading | None = None
        self._now_text: str | None = None
        self.profiles = profiles
        self.events: list[Event] = []

    def rows(self, name: str, **params: Any) -> list[Any]:
        """Run a statement to its end and return its rows."""
        return self._database.rows(statement(name), params)

    def query(self, sql: str, params: dict[str, Any]) -> list[Any]:
        """Run SQL that was built at run time. It must consist of constants."""
        return self._database.rows(sql, params)

    def many(self, name: str, rows: list[tuple[Any, ...]]) -> None:
        """Run a statement without results once for each row of parameters."""
        self._database.many(statement(name), rows)

    def run(self, name: str, params: tuple[Any, ...]) -> None:
        """Run a statement without results."""
        self._database.rows(statement(name), params)

    def one(self, name: str, **params: Any) -> Entry | None:
        """Run a statement that returns at most one entry."""
        found = self._database.rows(statement(name), params)
        return entry_of(found[0]) if found else None

    def entries(self, name: str, **params: Any) -> list[Entry]:
        """Run a statement that returns entries."""
        return [entry_of(row) for row in self._database.rows(statement(name), params)]

    def entry(self, entry_id: str) -> Entry:
        """Return the entry with this id, or raise ``EntryNotFoundError``."""
        found = self.one("get", id=entry_id)
        if found is None:
            raise EntryNotFoundError(f"there is no entry {entry_id} in the queue")
        return found

    def changed(self, name: str, **params: Any) -> Entry:
        """Run a statement that changes one existing entry, and return it."""
        return entry_of(self._database.rows(statement(name), params)[0])

    def file_bytes(self) -> int:
        """Return the size of the file and its log."""
        return self._database.file_bytes()

    # ------------------------------------------------------------------ time

    @property
    def clock(self) -> ClockReading:
        """All clocks, read once per transaction."""
        if self._reading is None:
            found = self.rows("clock")
            row = ClockRow(*found[0]) if found else None
            clock = self._clock
            boot_id, boot_seconds, wall = clock.boot_id(), clock.monotonic(), clock.now()
            reading = read_clock(row, boot_id, boot_seconds, wall)
            if reading.restarted:
                newest = self.rows("newest_ms")
                reading = read_clock(
                    row, boot_id, boot_seconds, wall, newest[0][0] if newest else None
                )
            self._reading = reading
        return self._reading

    @property
    def now(self) -> datetime:
        """The device's wall clock, for people. For decisions only where a restart left a gap."""
        return self.clock.wall

    @property
    def now_text(self) -> str:
        """``now`` as it is stored."""
        if self._now_text is None:
            self._now_text = instant(self.clock.wall)
        return self._now_text

    @property
    def ms(self) -> int:
        """Elapsed time of this file in ms. Decisions use it, not the wall clock (see ``now``)."""
        return self.clock.ms

    def ago(self, span: timedelta) -> int:
        """Return the value of ``ms`` this long ago."""
        return self.ms - span // _MILLISECOND

    def server_now(self) -> datetime:
        """Return the server's time as far as it is known."""
        return server_time(self.clock)

    def save_clock(self) -> None:
        """Write the clock if a restart was seen or the last write is old."""
        reading = self.clock
        if reading.save:
            self.set_clock(reading.row)
        if reading.restarted:
            # Before the leases end: their holders may have sent. Where several restarts have left
            # one gap, the time off may have been after any of them.
            self.rows("clamp_maybe", ms=reading.row.gap_ms)
            self.rows("end_leases")
            self.rows("wake_due", now=self.now_text)

    def set_clock(self, row: ClockRow) -> None:
        """Write the clock."""
        self.rows("set_clock", **msgspec.structs.asdict(row))
        self.reset_clock()

    def reset_clock(self) -> None:
        """Read the clocks again at the next use."""
        self._reading = self._now_text = None

    # ------------------------------------------------------------------ events

    def emit(self, kind: EventKind, entry: Entry, **facts: Unpack[EventFacts]) -> None:
        """Deliver an event about an entry after the commit."""
        if self.has_listeners:
            self.events.append(self.event(kind, entry, **facts))

    def event(self, kind: EventKind, entry: Entry, **facts: Unpack[EventFacts]) -> Event:
        """Return an event about an entry as it is now.

        ``http_status`` and ``code`` are those of its last error, unless the response is given.
        """
        facts.setdefault("http_status", entry.last_error_code)
        facts.setdefault("code", entry.last_code)
        return Event(
            kind=kind,
            at=self.now,
            user_id=entry.user_id,
            entry_id=entry.id,
            entity_type=entry.entity_type,
            operation=entry.operation,
            local_id=entry.local_id,
            server_id=entry.server_id,
            status=entry.status,
            reason=entry.reason,
            attempt=entry.attempt_count,
            endpoint=entry.endpoint,
            cause=self.cause_of(entry) if kind is EventKind.FAILED else None,
            age_seconds=max(0, self.ms - entry.enqueued_ms) / 1000,
            **facts,
        )

    def cause_of(self, entry: Entry) -> str:
        """Return the class of cause of a failed entry."""
        profile = self.profiles.find(entry.profile)
        causes = {} if profile is None else profile.causes
        return failure_cause(entry.reason, entry.last_code, entry.last_error_code, causes)


Write = Callable[[str], AbstractContextManager[Transaction]]
"""Begins a transaction of its own for the named operation."""


class Transactions:
    """Opens transactions on one connection, for one thread at a time."""

    def __init__(
        self,
        database: Database,
        clock: Clock,
        events: Events,
        profiles: ProfileRegistry,
        fault_points: SyncFaultPoints | None,
    ) -> None:
        self._database = database
        self._clock = as_device_clock(clock)
        self._events = events
        self._profiles = profiles
        self._fault_points = fault_points
        self._lock = RLock()
        self._pid = os.getpid()
        # The thread that has a group open, the group's transaction, and whether operations in it
        # have savepoints.
        self._group_thread: int | None = None
        self._group: Transaction | None = None
        self._savepoints = True
        self._closed = False

    def write(
        self, operation: str, connection: AppConnection | None = None
    ) -> AbstractContextManager[Transaction]:
        """Return a context whose work commits at its end and is rolled back if it raises.

        Inside a group it is part of the group's commit. With the app's ``connection`` it is part
        of the app's transaction.
        """
        if connection is not None:
            return self._write_on(connection)
        if self.in_group():
            return self._in_group(operation)
        return _Write(self, operation)

    def in_group(self) -> bool:
        """Return whether this thread has a group open."""
        return self._group_thread == get_ident()

    @contextmanager
    def _write_on(self, connection: AppConnection) -> Iterator[Transaction]:
        with self._locked(), _savepoint(self._database.guest(connection)) as guest:
            yield self._transaction(guest)

    @contextmanager
    def group(self, *, savepoints: bool = True) -> Iterator[AppConnection]:
        """Make all operations inside one commit; a nested group joins the outer one.

        All of them have the time at which the group began.
        """
        if self.in_group():
            outside, self._savepoints = self._savepoints, True
            try:
                with self._in_group():
                    self._savepoints = savepoints
                    yield self._database.connection
            finally:
                self._savepoints = outside
            return
        tx = self.begin()
        self._group_thread, self._group, self._savepoints = get_ident(), tx, savepoints
        undo = True
        try:
            yield self._database.connection
            undo = False
        finally:
            self._group_thread = self._group = None
            self.end("transaction", tx, undo=undo)

    @contextmanager
    def _in_group(self, operation: str | None = None) -> Iterator[Transaction]:
        """Yield the group's transaction; with savepoints the block is undone if it raises.

        This thread has the lock already: the group holds it.
        """
        self._check_usable()
        tx, is_undoable = self._group, self._savepoints
        assert tx is not None  # noqa: S101 - called inside a group only
        before = len(tx.events)
        try:
            with _savepoint(self._database) if is_undoable else nullcontext():
                yield tx
                if operation is not None:
                    self._reach(f"{operation}.before_commit")
        except BaseException:
            if is_undoable:
                del tx.events[before:]
                tx.reset_clock()
            raise

    def begin(self) -> Transaction:
        """Acquire the lock, open a transaction and save the clock; ``end`` must follow."""
        self._acquire()
        try:
            self._database.rows("BEGIN IMMEDIATE")
            tx = self._transaction(self._database)
            tx.save_clock()
        except BaseException:
            self._database.rollback()
            self._lock.release()
            raise
        return tx

    def end(self, operation: str, tx: Transaction, *, undo: bool) -> None:
        """Commit and deliver events, or roll back; releases the lock either way."""
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
            self._events.put(tx.events)
            self._reach(f"{operation}.after_commit")
        finally:
            self._lock.release()
        self._events.deliver()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Return a context with a transaction that only reads."""
        with self._locked():
            yield self._transaction(self._database)

    def close(self) -> None:
        """Close the file after running operations. Idempotent."""
        with self._lock:
            if self._closed:
                return
            if self._pid == os.getpid():
                with suppress(OutboxFileError):
                    self.end("save_clock", self.begin(), undo=False)
            self._closed = True
            self._database.close()

    def checkpoint(self) -> None:
        """Move the log into the file and empty it, unless another connection reads from it."""
        with self._locked():
            if not self.in_group():
                with suppress(FileBusyError):
                    self._database.rows("PRAGMA wal_checkpoint(TRUNCATE)")

    @contextmanager
    def exclusive(self) -> Iterator[Database]:
        """Return a context with the connection itself, outside any transaction."""
        with self._locked():
            if self.in_group():
                raise UsageError("this cannot be done inside a transaction")
            yield self._database

    def check_integrity(self) -> None:
        """Raise ``FileDamagedError`` unless every page and index is intact."""
        with self._locked():
            found = self._database.rows("PRAGMA integrity_check(1)")
            if found != [("ok",)]:
                raise FileDamagedError(f"{self._database.path} is damaged: {found[0][0]}")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._lock.release()

    def _acquire(self) -> None:
        self._check_usable()
        self._lock.acquire()
        if self._closed:  # while this thread waited
            self._lock.release()
            raise UsageError(_CLOSED)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("an outbox cannot be used across fork(): open it in each process")
        if self._closed:
            raise UsageError(_CLOSED)

    def _transaction(self, database: Database) -> Transaction:
        return Transaction(
            database, self._clock, self._profiles, has_listeners=self._events.has_listeners
        )

    def _reach(self, point: str) -> None:
        if self._fault_points is not None:
            self._fault_points.reach(point)


class _Write:
    """One operation as a transaction. A class, because generators slow an enqueue measurably."""

    __slots__ = ("_operation", "_owner", "_tx")

    def __init__(self, owner: Transactions, operation: str) -> None:
        self._owner = owner
        self._operation = operation

    def __enter__(self) -> Transaction:
        self._tx = self._owner.begin()
        return self._tx

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._owner.end(self._operation, self._tx, undo=error is not None)


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
