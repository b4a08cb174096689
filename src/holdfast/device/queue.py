"""The durable queue: every operation on it, each one transaction. It sends nothing.

Who wants to change an entry's status comes through here: the table in ``core/entry.py`` decides
whether it may, the change and all that follows from it (the turn in its lane, those that wait for
it, the mapping of its id) commit together with ``synchronous=FULL``, and only then is it told to
the listeners and returned to the caller.

One queue object may be used from several threads, several processes may each open the same file.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from random import random
from types import TracebackType
from typing import Any, Self

from msgspec import UNSET, UnsetType

from holdfast.core.entry import Attempt, Claimed, Entry, NewEntry, Reason, Resolution, Status
from holdfast.core.retry import QUEUE, RetryPolicy
from holdfast.device import adding, claiming, hands, reading, upkeep
from holdfast.device.database import AppConnection, Database, Driver, open_database
from holdfast.device.events import Event, Events, Listener
from holdfast.device.payload_migration import PayloadMigration, migrate_payloads
from holdfast.device.rekeying import rekey
from holdfast.device.schema import prepare_schema
from holdfast.device.settings import QueueSettings
from holdfast.device.transactions import Transactions
from holdfast.device.upkeep import Stats
from holdfast.device.world import FaultPoints, SystemDeviceClock
from holdfast.errors import FileDamagedError, WrongPassphraseError
from holdfast.ports import Clock

__all__ = ["OutboxQueue"]


class OutboxQueue:
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
        fault_points: FaultPoints | None,
        chance: Callable[[], float],
        worker: str,
        passphrase: str | bytes | None,
    ) -> None:
        """Take over an open database; ``open`` is the way in."""
        self._settings = settings
        self._events = events
        self._chance = chance
        self._worker = worker
        self._passphrase = passphrase
        self._room = adding.Room(settings.max_entries)
        self._transactions = Transactions(database, clock, events, fault_points)
        self._write = self._transactions.write
        self._read = self._transactions.read

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
        fault_points: FaultPoints | None = None,
        chance: Callable[[], float] = random,
        driver: Driver = "auto",
        vfs: str | None = None,
    ) -> Self:
        """Open the file, or make it, and bring its schema up to date.

        ``passphrase``: text is stretched into a key as SQLCipher 4 does (a few tenths of a second);
        32 bytes are the key itself, for apps that keep one in the system's key store. Without one
        the file is plain.

        ``driver``: plain files go through the standard library's ``sqlite3``, encrypted ones
        through ``apsw``; ``"apsw"`` takes it for both. Two copies of SQLite in one process must
        never have the same file open, so an app that opens the file itself uses the same driver.

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
                prepare_schema(database)
            except BaseException:
                database.close()
                raise
            return database

        is_new = not Path(path).exists() or Path(path).stat().st_size == 0
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
                fault_points=fault_points,
                chance=chance,
                worker=f"{os.getpid()}",
                passphrase=passphrase,
            )
            queue._transactions.keep_time()
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
        draft = adding.check(new, self._settings)
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
        drafts = adding.check_all(news, self._settings)
        with self._write("enqueue_many", connection) as unit:
            return adding.add_many(unit, drafts, self._room, coalesce=coalesce)

    def announce(self, entries: Iterable[Entry]) -> None:
        """Tell the listeners of entries queued on the app's ``connection``, after its commit."""
        with self._read() as unit:
            events = [adding.announcement(unit, entry) for entry in entries]
        self._events.put(events)
        self._events.deliver()

    # ------------------------------------------------------------------ looking

    def get(self, entry_id: str) -> Entry:
        """Return one entry, or raise ``EntryNotFoundError``."""
        with self._read() as unit:
            return unit.entry(entry_id)

    def by_key(self, key: str) -> Entry | None:
        """Return the entry with this idempotency key."""
        with self._read() as unit:
            return unit.one("by_key", key=key)

    def by_local_id(self, local_id: str) -> list[Entry]:
        """Return all entries about the entity with this local id, in order."""
        with self._read() as unit:
            return unit.entries("by_local_id", local_id=local_id)

    def entries(
        self,
        user_id: str | None = None,
        *,
        status: Status | Iterable[Status] | None = None,
        entity_type: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Entry]:
        """List entries in the order in which they were queued, a page at a time.

        ``after`` is the id of the last entry seen.
        """
        with self._read() as unit:
            return reading.entries(
                unit, user_id, status=status, entity_type=entity_type, limit=limit, after=after
            )

    def next_eligible(self, user_id: str) -> Entry | None:
        """Return what ``claim`` would take now, without taking it."""
        with self._read() as unit:
            return unit.one("next_eligible", user_id=user_id, ms=unit.ms)

    def eligible_users(self) -> list[str]:
        """Return the users for whom something can be claimed now."""
        with self._read() as unit:
            return [str(row[0]) for row in unit.rows("eligible_users", ms=unit.ms)]

    def next_due_seconds(self, user_id: str) -> float | None:
        """Return how long until the user's first waiting retry is due; None if none waits."""
        with self._read() as unit:
            return claiming.next_due_seconds(unit, user_id)

    def blocked_by(self, user_id: str, lane: str | None = None) -> list[Entry]:
        """Return the ``failed`` and ``conflict`` entries whose lanes stand still, for a person.

        Entries that are parked because of another (reason ``dependency``) are left out: the one
        to look at is the other.
        """
        with self._read() as unit:
            return reading.blocked_by(unit, user_id, lane)

    def dependents(self, entry_id: str, *, transitive: bool = False) -> list[Entry]:
        """Return the entries that depend on this one, or on the entity it creates."""
        with self._read() as unit:
            return reading.dependents(unit, entry_id, transitive=transitive)

    def attempts(self, entry_id: str) -> list[Attempt]:
        """Return the history of an entry's sends, oldest first."""
        with self._read() as unit:
            return reading.attempts(unit, entry_id)

    def mappings(self, user_id: str, local_ids: Iterable[str]) -> dict[str, str | int]:
        """Return the server ids of those local ids that have one."""
        with self._read() as unit:
            return claiming.mappings(unit, user_id, local_ids)

    def stats(self, user_id: str | None = None) -> Stats:
        """Count what is there, for one user or for all."""
        with self._read() as unit:
            return upkeep.stats(unit, user_id)

    # ------------------------------------------------------------------ claims and their outcomes

    def claim(self, user_id: str, *, lease_seconds: float | None = None) -> Claimed | None:
        """Take the user's next entry for sending, atomically among threads and processes.

        Next is, among those that have the turn in their lane, wait for nothing and are due: the
        highest priority, then the lowest sequence number. So there is one in flight per lane; the
        ``walk`` profile has one lane for all. None if there is nothing to send now.

        The claim holds until the lease runs out (2 minutes unless said otherwise); ``renew`` holds
        it longer. ``attempt_count`` of the returned entry counts this send.
        """
        with self._write("claim") as unit:
            return claiming.claim(
                unit,
                user_id,
                lease_seconds=lease_seconds or self._settings.lease_seconds,
                worker=self._worker,
            )

    def claim_some(
        self, user_id: str, limit: int, *, lease_seconds: float | None = None
    ) -> list[Claimed]:
        """Take up to ``limit`` entries at once, in the order in which to send them.

        Several may be of one lane. Of those the next may be sent only after the one before has
        succeeded, recorded or not; otherwise it has to be given back with ``release``. Whoever
        sends one after the other saves commits so, and the order stays what it is with ``claim``.
        """
        with self._write("claim") as unit:
            return claiming.claim_some(
                unit,
                user_id,
                limit=limit,
                lease_seconds=lease_seconds or self._settings.lease_seconds,
                worker=self._worker,
            )

    def renew(self, claimed: Claimed) -> None:
        """Start the lease anew, for a send that takes long. Raises ``ClaimLostError``."""
        with self._write("renew") as unit:
            claiming.renew(unit, claimed)

    def succeed(
        self,
        claimed: Claimed,
        *,
        server_id: str | int | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that it has happened on the server.

        For a ``create`` with a local id, ``server_id`` is mapped in the same commit, and entries
        that refer to the local id are freed. (Without a ``server_id`` those stay blocked until
        ``map_local_id``.) Raises ``ClaimLostError``.
        """
        with self._write("succeed") as unit:
            return claiming.succeed(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, None),
                server_id=server_id,
            )

    def schedule_retry(
        self,
        claimed: Claimed,
        *,
        delay_seconds: float | None = None,
        retry_after_seconds: float | None = None,
        policy: RetryPolicy = QUEUE,
        give_up: bool = True,
        outcome_unknown: bool = False,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Send it back into the queue after a failure that may pass by itself.

        Without ``delay_seconds`` the policy and the number of attempts say how long it waits;
        ``retry_after_seconds`` is a floor in either case. With ``give_up``, an entry that has had
        ``max_attempts`` becomes ``failed`` instead (reason ``attempts``), and its dependents are
        parked: look at the status of what is returned.

        ``outcome_unknown``: no answer came, so it may have happened. Such an entry is not edited,
        cancelled or expired until an answer is known; it is sent again with the same key and body.
        Raises ``ClaimLostError``.
        """
        with self._write("schedule_retry") as unit:
            return claiming.retry_later(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, error),
                claiming.Pause(
                    delay_seconds, retry_after_seconds, policy, self._chance(), give_up=give_up
                ),
                outcome_unknown=outcome_unknown,
            )

    def release(self, claimed: Claimed, *, sent: bool = False, error: str | None = None) -> Entry:
        """Give a claim back as if it had not been taken: no attempt is counted, no wait is set.

        For a stop between claim and send, for a token that is not accepted (401), for local ids
        that are not known yet. ``sent`` says whether there was a send worth a line in the history;
        it had an answer, so the outcome is known. Raises ``ClaimLostError``.
        """
        with self._write("release") as unit:
            return claiming.release(
                unit, claimed, claiming.Answer(None, None, None, error), sent=sent
            )

    def fail(
        self,
        claimed: Claimed,
        *,
        reason: Reason = Reason.ANSWER,
        outcome_unknown: bool = False,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that the server will not do it as it stands. Dependents are parked.

        The lane stands still until a person retries, edits or discards it. Raises
        ``ClaimLostError``.
        """
        with self._write("fail") as unit:
            return claiming.fail(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, error),
                reason=reason,
                outcome_unknown=outcome_unknown,
            )

    def conflict(
        self,
        claimed: Claimed,
        *,
        theirs: Any = UNSET,
        theirs_version: str | None = None,
        error: str | None = None,
        http_status: int | None = 409,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that the entity has moved on; the lane waits for ``resolve``.

        ``theirs`` is the server's side as a JSON value, if it is known. Dependents wait. Raises
        ``ClaimLostError``.
        """
        with self._write("conflict") as unit:
            return claiming.conflict(
                unit,
                claimed,
                claiming.Answer(http_status, code, request_id, error),
                theirs=theirs,
                theirs_version=theirs_version,
            )

    def expire(
        self,
        claimed: Claimed,
        *,
        error: str | None = None,
        http_status: int | None = None,
        code: str | None = None,
        request_id: str | None = None,
    ) -> Entry:
        """Record that the server finds it too old. Dependents are parked, the lane goes on.

        Raises ``ClaimLostError``.
        """
        with self._write("expire") as unit:
            return claiming.expire(
                unit, claimed, claiming.Answer(http_status, code, request_id, error)
            )

    def map_local_id(
        self, user_id: str, local_id: str, server_id: str | int, *, entity_type: str
    ) -> None:
        """Record a server id that the app learnt by other means, and free what waits for it.

        A mapping is never changed: one that is there stays.
        """
        with self._write("map_local_id") as unit:
            claiming.map_local_id(unit, user_id, local_id, server_id, entity_type=entity_type)

    # ------------------------------------------------------------------ by hand

    def resolve(
        self,
        entry_id: str,
        how: Resolution,
        *,
        payload: Any = UNSET,
        headers: Mapping[str, str] | UnsetType = UNSET,
    ) -> Entry:
        """End a conflict.

        ``THEIRS`` discards the entry, ``GIVE_UP`` makes it ``failed``; both park its dependents.
        ``MINE`` sends it once more, ``forced`` and with a new key. ``MERGED`` sends ``payload``
        with a new key, and takes the server's side as its base. Both may come with new ``headers``,
        for example another ``If-Match``. Raises ``TransitionError`` unless it is in ``conflict``.
        """
        changes = hands.Changes(payload, headers)
        with self._write("resolve") as unit:
            return hands.resolve(unit, entry_id, how, changes, self._settings)

    def edit_payload(
        self,
        entry_id: str,
        payload: Any = UNSET,
        *,
        headers: Mapping[str, str] | UnsetType = UNSET,
        endpoint: str | UnsetType = UNSET,
        depends_on: Sequence[str] | UnsetType = UNSET,
        force: bool = False,
    ) -> Entry:
        """Replace what a pending, failed or conflicting entry will send; it gets a new key.

        The entry keeps its place in the order and becomes ``pending`` with all its attempts; parked
        dependents are revived. What is not given stays. Raises ``TransitionError``,
        ``EntryInvalidError``, and ``OutcomeUnknownError`` if it was sent without an answer (with
        ``force`` it is edited all the same, and may then happen twice).
        """
        changes = hands.Changes(payload, headers, endpoint, depends_on)
        with self._write("edit_payload") as unit:
            return hands.edit(unit, entry_id, changes, self._settings, force=force)

    def retry(self, entry_id: str) -> Entry:
        """Send a failed entry again: same key, all its attempts, and its dependents revived.

        Raises ``TransitionError`` unless it is ``failed``, or while something it depends on is
        failed, discarded or expired: that has to come back first.
        """
        with self._write("retry") as unit:
            return hands.retry(unit, entry_id)

    def cancel(
        self, entry_id: str, *, reason: Reason = Reason.PERSON, force: bool = False
    ) -> Entry:
        """Undo an entry while it is pending: it is discarded, and its dependents are parked.

        Raises ``TransitionError`` if it is not pending any more, ``OutcomeUnknownError`` if it was
        sent without an answer: it may have happened. ``force`` cancels it all the same.
        """
        with self._write("cancel") as unit:
            return hands.cancel(unit, entry_id, reason=reason, force=force)

    def discard(
        self,
        entry_id: str,
        *,
        reason: Reason = Reason.PERSON,
        with_dependents: bool = False,
    ) -> Entry:
        """Give a failed or conflicting entry up; its lane goes on.

        Dependents stay parked, or are discarded with it. Raises ``TransitionError``.
        """
        with self._write("discard") as unit:
            return hands.discard(unit, entry_id, reason=reason, with_dependents=with_dependents)

    def park(self, entry_id: str, *, reason: Reason, error: str | None = None) -> Entry:
        """Make a pending entry ``failed`` without sending it, and park its dependents.

        For a rebuild that finds no place for it. Raises ``TransitionError``.
        """
        with self._write("park") as unit:
            return hands.park(unit, entry_id, reason=reason, error=error)

    # ------------------------------------------------------------------ upkeep

    def watchdog(self) -> list[Entry]:
        """Bring back what was claimed and whose lease is over, because its process died.

        The entries are ``pending`` again, with the same key, their outcome unknown and no attempt
        counted: that a process died is not the entry's fault. A claim that is renewed is left
        alone.
        """
        with self._write("watchdog") as unit:
            return claiming.watchdog(unit)

    def expire_stale(self, user_id: str) -> list[Entry]:
        """Expire what has been pending for longer than the cap (7 days), and park its dependents.

        Age is time that has certainly passed: measured by a clock that cannot be set while the
        device is on, and by the server's ``Date`` (``learn_server_time``) across the times when it
        was off. The device's wall clock has no say. Entries whose outcome is unknown are left: only
        the server can tell what became of them.
        """
        with self._write("expire_stale") as unit:
            return upkeep.expire_stale(unit, user_id, self._settings.stale_after)

    def learn_server_time(self, server_now: datetime) -> None:
        """Take the ``Date`` of a response from the configured server, just received.

        Cheap to call with every answer: it is written only when it says something new.
        """
        with self._read() as unit:
            news = upkeep.is_news(unit, server_now)
        if news:
            with self._write("learn_server_time") as unit:
                upkeep.learn_server_time(unit, server_now)

    def server_now(self) -> datetime:
        """Return the server's time as far as it is known, otherwise the device's."""
        with self._read() as unit:
            return unit.server_now()

    def prune(self, *, limit: int | None = None) -> int:
        """Remove what succeeded 7 days ago and what was otherwise settled 30 days ago.

        Mappings stay. Works in small transactions; ``limit`` bounds how many entries go in all.
        Returns how many went.
        """
        removed = 0
        batch = upkeep.PRUNE_BATCH
        place = upkeep.Place()
        while not place.done and (limit is None or removed < limit):
            size = batch if limit is None else min(batch, limit - removed)
            with self._write("prune") as unit:
                removed += upkeep.prune(unit, self._settings, place, size)
        return removed

    def purge_user(self, user_id: str, *, force: bool = False) -> int:
        """Remove a user with all entries, attempts and mappings, as at logout.

        Raises ``UnsentEntriesError`` while anything is not settled, unless ``force``. The pages
        are overwritten. Returns how many entries went.
        """
        with self._write("purge_user") as unit:
            removed = upkeep.purge_user(unit, user_id, force=force)
        self._transactions.checkpoint()
        return removed

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
