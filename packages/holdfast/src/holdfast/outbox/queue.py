"""The durable queue: every operation on it, each one transaction. It sends nothing.

Who wants to change an entry's status comes through here: the table in ``core/entry.py`` decides
whether it may, the change and all that follows from it (the turn in its lane, those that wait for
it, the mapping of its id) commit together with ``synchronous=FULL``, and only then is it told to
the listeners and returned to the caller.

One queue object may be used from several threads, several processes may each open the same file.

Opening, transactions, events and adding are here; the rest is in one file per kind of caller:
``looking`` (anybody), ``holding`` (who sends), ``by_hand`` (people) and ``housekeeping``.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import random
from types import TracebackType
from typing import Self

from holdfast.core.outbox_entry import Entry, NewEntry
from holdfast.errors import FileDamagedError, OutboxFileError, WrongPassphraseError
from holdfast.outbox import adding
from holdfast.outbox.by_hand import ByHand
from holdfast.outbox.database import AppConnection, Database, Driver, open_database
from holdfast.outbox.events import Event, Events, Listener
from holdfast.outbox.holding import Holding
from holdfast.outbox.housekeeping import Housekeeping
from holdfast.outbox.looking import Looking
from holdfast.outbox.payload_migration import PayloadMigration, migrate_payloads
from holdfast.outbox.profile import Profile, ProfileRegistry
from holdfast.outbox.rekeying import rekey
from holdfast.outbox.schema import prepare_schema
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.transactions import Transactions
from holdfast.outbox.upkeep import adopt_default_profile
from holdfast.outbox.world import FaultPoints, SystemDeviceClock
from holdfast.ports import Clock

__all__ = ["OutboxQueue"]


class OutboxQueue(Holding, Looking, ByHand, Housekeeping):
    """A device's queue of mutations in one SQLite file.

    Made by ``OutboxQueue.open``; a context manager that closes it. Every operation raises an
    ``OutboxError`` of a class that says what is wrong, and has then changed nothing. File errors
    (``OutboxFileError``) can come out of any of them.
    """

    def __init__(
        self,
        database: Database,
        *,
        settings: QueueSettings,
        clock: Clock,
        events: Events,
        profiles: ProfileRegistry,
        fault_points: FaultPoints | None,
        chance: Callable[[], float],
        worker: str,
        passphrase: str | bytes | None,
    ) -> None:
        """Take over an open database; ``open`` is the way in."""
        transactions = Transactions(database, clock, events, profiles, fault_points)
        super().__init__(transactions, settings, worker=worker, chance=chance)
        self._events = events
        self.profiles = profiles
        self._passphrase = passphrase
        self._room = adding.Room(settings.max_entries)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        passphrase: str | bytes | None = None,
        settings: QueueSettings | None = None,
        clock: Clock | None = None,
        listeners: Iterable[Listener] = (),
        payloads: PayloadMigration | None = None,
        profiles: Iterable[Profile] = (),
        fault_points: FaultPoints | None = None,
        chance: Callable[[], float] = random,
        driver: Driver = "auto",
        vfs: str | None = None,
        create: bool = True,
    ) -> Self:
        """Open the file, or make it, and bring its schema up to date.

        With ``create=False`` a file that is not there, or has no outbox in it, is refused.

        ``passphrase``: text is stretched into a key as SQLCipher 4 does (a few tenths of a second);
        32 bytes are the key itself, for apps that keep one in the system's key store. Without one
        the file is plain.

        ``driver``: plain files go through the standard library's ``sqlite3``, encrypted ones
        through ``apsw``; ``"apsw"`` takes it for both. Two copies of SQLite in one process must
        never have the same file open, so an app that opens the file itself uses the same driver.

        ``profiles`` are looked up before installed ones; see ``Profile``.

        Raises ``WrongPassphraseError``, ``NewerFileError``, ``FileDamagedError``,
        ``FileReadOnlyError``, ``DiskFullError`` or ``FileBusyError``, and leaves the file as it is.
        """
        chosen = settings or QueueSettings()

        def prepared() -> Database:
            database = open_database(
                Path(path),
                passphrase=passphrase,
                driver=driver,
                vfs=vfs,
                busy_seconds=chosen.busy_seconds,
            )
            try:
                prepare_schema(database, busy_seconds=chosen.busy_seconds, create=create)
            except BaseException:
                database.close()
                raise
            return database

        is_new = not Path(path).exists() or Path(path).stat().st_size == 0
        if is_new and not create:
            raise OutboxFileError(f"there is no outbox in {path}")
        try:
            database = prepared()
        except (WrongPassphraseError, FileDamagedError):
            if not is_new or passphrase is None:
                raise
            # Another process has made the file meanwhile. Whoever opens an empty one makes a salt
            # for it, and the key that was made with ours does not fit the other's.
            database = prepared()
        try:
            queue = cls(
                database,
                settings=chosen,
                clock=clock or SystemDeviceClock(),
                events=Events(listeners),
                profiles=ProfileRegistry(profiles),
                fault_points=fault_points,
                chance=chance,
                worker=f"{os.getpid()}",
                passphrase=passphrase,
            )
            with queue._write("keep_time") as unit:
                adopt_default_profile(unit)
            if payloads is not None:
                migrate_payloads(queue._write, payloads)
        except BaseException:
            database.close()
            raise
        return queue

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._transactions.close()

    def __enter__(self) -> Self:
        """Return the queue."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    @property
    def settings(self) -> QueueSettings:
        """What the queue was opened with."""
        return self._settings

    # ------------------------------------------------------------------ transactions and events

    @contextmanager
    def transaction(self, *, savepoints: bool = True) -> Iterator[AppConnection]:
        """Make everything inside one commit: all of it happens, or none.

        Two uses. The app writes rows of its own in the same file, on the connection it is given,
        and queues what belongs to them. The drain ends one claim and takes the next with one wait
        for the disk. Operations inside that raise undo only themselves; an exception that leaves
        the block undoes all. Other threads wait outside. Do not commit on the connection.

        ``savepoints=False`` spares two statements per operation. It is for blocks that let every
        exception out, but for ``ClaimLostError``, which has never changed anything.

        Events come after the commit.
        """
        with self._transactions.group(savepoints=savepoints) as connection:
            yield connection

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on; returns what ends that.

        It is called after the commit, in the order of commits, on whichever thread made one, and
        should be quick. What other processes do to the file is not heard here.
        """
        return self._events.subscribe(listener)

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens to events."""
        return self._events.listening

    def emit(self, event: Event) -> None:
        """Tell the listeners something that is no change of the queue, such as ``drained``."""
        self._events.put([event])
        self._events.deliver()

    # ------------------------------------------------------------------ users

    def add_user(self, user_id: str) -> None:
        """Make a user known; entries are queued for known users only. Idempotent."""
        with self._write("add_user") as unit:
            adding.add_user(unit, user_id)

    def users(self) -> list[str]:
        """Return the known users, sorted."""
        with self._read() as unit:
            return [str(row[0]) for row in unit.rows("users")]

    # ------------------------------------------------------------------ adding

    def enqueue(
        self,
        new: NewEntry,
        *,
        coalesce: bool = False,
        connection: AppConnection | None = None,
    ) -> Entry:
        """Queue one mutation durably, and return it as it is queued.

        When this returns, a power cut does not lose the entry. The idempotency key is made here,
        unless one is given, and stays for every send. A key that is queued already gives the entry
        that has it, and nothing is written; if that one is another request,
        ``EntryInvalidError``.

        ``coalesce``: a pending ``update`` or ``patch`` of the same entity that was never claimed
        takes the new one's payload instead of a new entry (the returned entry is the earlier one);
        a ``delete`` after a ``create`` that was never claimed discards both (the returned entry is
        the discarded create). Where that could reorder anything, the entry is queued as usual.

        ``connection``: the app's own connection *to the same file*, with a transaction open in it
        and of the same driver as the queue's. The entry is then part of that transaction, and
        ``announce`` tells the listeners once the app has committed. See also ``transaction``.

        A parent that is failed, discarded or expired makes the new entry ``failed`` with reason
        ``dependency`` at once; it is revived with its parent.

        Raises ``EntryInvalidError`` (its ``rule`` names what was broken) or ``QueueFullError``.
        """
        draft = adding.check(new, self._settings, self.profiles)
        with self._write("enqueue", connection) as unit:
            return adding.add(unit, draft, self._room, coalesce=coalesce)

    def enqueue_many(
        self,
        news: Iterable[NewEntry],
        *,
        coalesce: bool = False,
        connection: AppConnection | None = None,
    ) -> list[Entry]:
        """Queue several mutations in one commit, in this order: all of them or none.

        They may depend on each other, by the ``id`` or ``local_id`` given to them, also on later
        ones; a cycle is refused, and so is a dependency on what can only come later in the same
        lane.
        """
        drafts = adding.check_all(news, self._settings, self.profiles)
        with self._write("enqueue_many", connection) as unit:
            return adding.add_many(unit, drafts, self._room, coalesce=coalesce)

    def announce(self, entries: Iterable[Entry]) -> None:
        """Tell the listeners of entries queued on the app's ``connection``, after its commit."""
        with self._read() as unit:
            events = [adding.announcement(unit, entry) for entry in entries]
        self._events.put(events)
        self._events.deliver()

    # ------------------------------------------------------------------ the file

    def change_passphrase(self, passphrase: str | bytes) -> None:
        """Encrypt the file under another passphrase; a plain file opened with ``apsw`` too.

        Nobody else may have the file open: ``FileBusyError`` otherwise. A crash in the middle
        leaves the old passphrase or the new one, never a mixture. Needs as much room on the disk
        again while it works.
        """
        with self._transactions.alone() as database:
            rekey(database, self._passphrase, passphrase)
            self._passphrase = passphrase

    def check_integrity(self) -> None:
        """Read the whole file and raise ``FileDamagedError`` if a part of it does not hold."""
        self._transactions.check_integrity()
