"""The durable queue in one SQLite file: every operation on it is one transaction. Sends nothing.

A change of status is checked against the table in ``entry.py``. The change and all that
follows from it (the next entry of the lane, dependents, the mapping of its id) commit together with
``synchronous=FULL``; only then are listeners called and the method returns.

One queue object may be used from several threads; several processes may each open the same file.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from pathlib import Path
from random import random
from time import monotonic
from typing import Any, Final, Self

from msgspec import UNSET, UnsetType

from onceward_outbox import (
    bulk,
    claims,
    completion,
    enqueue,
    maintenance,
    pruning,
    resolution,
)
from onceward_outbox.backoff import StoredHold, write_holds
from onceward_outbox.batch_offer import BatchOffer, write_offer
from onceward_outbox.bulk import Filter
from onceward_outbox.claims import claim_holder
from onceward_outbox.clock import SystemDeviceClock, update_from_server
from onceward_outbox.database import (
    AppConnection,
    Database,
    Driver,
    open_database,
    rekey,
)
from onceward_outbox.enqueue import QueueQuota
from onceward_outbox.entry import (
    Claimed,
    Entry,
    NewEntry,
    Reason,
    ReasonName,
    Resolution,
    ResolutionName,
    Status,
    StatusName,
    Transition,
    after,
    member_named,
)
from onceward_outbox.errors import ClaimLostError, OutboxFileError, UsageError
from onceward_outbox.events import Event, EventKind, Events, Listener, event_about
from onceward_outbox.maintenance import PayloadMigration, migrate_payloads
from onceward_outbox.outcome import Outcome
from onceward_outbox.outcome_wait import wait_for_outcome
from onceward_outbox.passphrase import check_new_passphrase
from onceward_outbox.profile import Profile, ProfileRegistry
from onceward_outbox.queries import QueueQueries, Stats
from onceward_outbox.resolution import Rewrite
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transactions
from onceward_outbox.validation import check_new
from onceward_protocol.clock import Clock
from onceward_protocol.fault_points import SyncFaultPoints

__all__ = ["OutboxQueue", "Stats"]

_PRUNE_INTERVAL_SECONDS: Final = 3600.0

_log = logging.getLogger(__name__)


class OutboxQueue(QueueQueries):
    """A device's queue of mutations in one SQLite file.

    Opened by ``OutboxQueue.open``; a context manager that closes it. Every operation raises an
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
        fault_points: SyncFaultPoints | None,
        chance: Callable[[], float],
        worker: str,
        passphrase: str | bytes | None,
    ) -> None:
        """Take over an open database; use ``open`` instead."""
        self._transactions = Transactions(database, clock, events, profiles, fault_points)
        super().__init__(self._transactions.read)
        # Limits and times of this queue.
        self.settings = settings
        # The profiles that entries may name.
        self.profiles = profiles
        self._write = self._transactions.write
        self._events = events
        self._chance = chance
        self._worker = worker
        self._passphrase = passphrase
        self._quota = QueueQuota(settings.max_entries)
        self._prune_at = 0.0

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        passphrase: str | bytes | None = None,
        allow_weak_passphrase: bool = False,
        settings: QueueSettings | None = None,
        clock: Clock | None = None,
        listeners: Iterable[Listener] = (),
        payloads: PayloadMigration | None = None,
        profiles: Iterable[Profile] = (),
        fault_points: SyncFaultPoints | None = None,
        chance: Callable[[], float] = random,
        driver: Driver = "auto",
        vfs: str | None = None,
        create: bool = True,
    ) -> Self:
        """Open or create the file, and bring its schema up to date.

        With ``create=False`` a file that does not exist, or has no outbox in it, is refused.

        ``passphrase``: text is stretched into a key as SQLCipher 4 does (a few tenths of a second);
        32 bytes are the key itself, for apps that keep one in the system's key store. Without one
        the file is plain. A new file needs a passphrase of at least 12 characters, not in the form
        of a raw key (``x'…'`` or ``raw:…``), unless ``allow_weak_passphrase``: otherwise
        ``ConfigurationError``. An existing file with a weak one opens, and a warning is logged.

        ``driver``: plain files use the standard library's ``sqlite3``, encrypted ones ``apsw``;
        ``"apsw"`` uses it for both. Two copies of SQLite in one process must never have the same
        file open, so an app that opens the file itself uses the same driver.

        ``profiles`` are looked up before installed ones; see ``Profile``.

        Raises ``WrongPassphraseError``, ``NewerFileError``, ``FileDamagedError``,
        ``FileReadOnlyError``, ``DiskFullError`` or ``FileBusyError``, and leaves the file as it is.
        """
        chosen = settings or QueueSettings()
        database = open_database(
            Path(path),
            passphrase=passphrase,
            driver=driver,
            vfs=vfs,
            busy_seconds=chosen.busy_seconds,
            create=create,
            allow_weak_passphrase=allow_weak_passphrase,
        )
        try:
            queue = cls(
                database,
                settings=chosen,
                clock=clock or SystemDeviceClock(),
                events=Events(listeners),
                profiles=ProfileRegistry(profiles),
                fault_points=fault_points,
                chance=chance,
                worker=claim_holder(),
                passphrase=passphrase,
            )
            with queue._write("save_clock"):
                pass
            if payloads is not None:
                migrate_payloads(queue._write, payloads)
        except BaseException:
            database.close()
            raise
        return queue

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._transactions.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ transactions and events

    def transaction(self, *, savepoints: bool = True) -> AbstractContextManager[AppConnection]:
        """Make everything inside one commit: all of it or nothing.

        Two uses. The app writes its own rows in the same file, on the connection it is given, and
        queues what belongs to them. The drain records outcomes and claims the next entries with
        one wait for the disk. Operations inside that raise undo only themselves; an exception that
        leaves the block undoes all. Other threads wait. Do not commit on the connection.

        ``savepoints=False`` saves two statements per operation. It is for blocks that let every
        exception out except ``ClaimLostError``, which is raised before anything is changed.

        Events are delivered after the commit.
        """
        return self._transactions.group(savepoints=savepoints)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on; returns a function that unsubscribes it.

        It is called after the commit, in the order of commits, on the committing thread, and should
        return quickly. Changes made by other processes cause no events here.
        """
        return self._events.subscribe(listener)

    @property
    def has_listeners(self) -> bool:
        """Whether any listener is subscribed."""
        return self._events.has_listeners

    def emit(self, event: Event) -> None:
        """Deliver an event that is not a change of the queue, such as ``drained``."""
        self._events.put([event])
        self._events.deliver()

    def emit_about(
        self,
        kind: EventKind,
        entry: Entry,
        *,
        http_status: int | None = None,
        code: str | None = None,
        delay_seconds: float | None = None,
        detail: str | None = None,
    ) -> None:
        """Deliver an event about an entry that is not a change of it, such as ``sent``."""
        if not self.has_listeners:
            return
        with self._read() as tx:
            event = event_about(
                kind,
                entry,
                tx.now,
                age_seconds=tx.age_seconds(entry),
                http_status=http_status,
                code=code,
                delay_seconds=delay_seconds,
                detail=detail,
            )
        self.emit(event)

    # ------------------------------------------------------------------ users and enqueueing

    def add_user(self, user_id: str) -> None:
        """Add a user; entries are queued for known users only. Idempotent."""
        with self._write("add_user") as tx:
            enqueue.add_user(tx, user_id)

    def enqueue(
        self,
        new: NewEntry,
        *,
        coalesce: bool = False,
        connection: AppConnection | None = None,
    ) -> Entry:
        """Queue one mutation durably, and return it as it is queued.

        When this returns, a power cut does not lose the entry. The idempotency key is made here,
        unless one is given, and stays for every send. A key that is queued already returns the
        entry that has it, and nothing is written; if that one is another request,
        ``EntryInvalidError``.

        ``coalesce``: a pending ``update`` or ``patch`` of the same entity that was never claimed
        takes the new one's payload instead of a new entry (the returned entry is the earlier one);
        a ``delete`` after a ``create`` that was never claimed discards both (the returned entry is
        the discarded create). Where that could reorder anything, the entry is queued as usual.

        ``connection``: the app's own connection *to the same file*, with a transaction open in it
        and of the same driver as the queue's. The entry is then part of that transaction, and the
        app calls ``announce`` after its commit. See also ``transaction``.

        ``once`` of the entry names what the user does, such as ``order.close:001``: if the user
        has an unsettled entry with that name (pending, in flight, failed or in conflict), it is
        returned, and nothing is written. So a double tap on a button is one entry.

        A parent that is failed, discarded or expired makes the new entry ``failed`` with reason
        ``dependency`` at once; it is revived with its parent.

        Raises ``EntryInvalidError`` (its ``rule`` names what was broken) or ``QueueFullError``.
        """
        draft = check_new(new, self.settings, self.profiles)
        with self._write("enqueue", connection) as tx:
            return enqueue.enqueue(tx, draft, self._quota, coalesce=coalesce)

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
        drafts = [check_new(new, self.settings, self.profiles) for new in news]
        with self._write("enqueue_many", connection) as tx:
            return enqueue.enqueue_many(tx, drafts, self._quota, coalesce=coalesce)

    def announce(self, entries: Iterable[Entry]) -> None:
        """Deliver events about entries queued on the app's ``connection``, after its commit."""
        with self._read() as tx:
            events = [
                event_about(EventKind.ENQUEUED, entry, tx.now, age_seconds=tx.age_seconds(entry))
                for entry in entries
            ]
        self._events.put(events)
        self._events.deliver()

    # ------------------------------------------------------------------ claims

    def claim(self, user_id: str, *, lease_seconds: float | None = None) -> Claimed | None:
        """Claim the user's next entry for sending, atomically among threads and processes.

        Next is, among the heads of lanes that wait for nothing and are due: the highest priority,
        then the lowest sequence number. So one entry per lane is in flight; a profile with strict
        order has one lane. None if there is nothing to send now.

        The claim holds until the lease expires (2 minutes by default); ``renew`` restarts it.
        ``attempt_count`` of the returned entry counts this send.
        """
        claimed = self.claim_some(user_id, 1, lease_seconds=lease_seconds)
        return claimed[0] if claimed else None

    def claim_some(
        self,
        user_id: str,
        limit: int,
        *,
        lease_seconds: float | None = None,
        in_batch: bool = False,
        skip_profiles: Iterable[str] = (),
        held_paths: Iterable[str] = (),
    ) -> list[Claimed]:
        """Claim up to ``limit`` entries at once, in the order in which to send them.

        Several may be of one lane. Of those the next may be sent only after the one before has
        succeeded, recorded or not; otherwise it has to be released. That saves commits, and the
        order is the same as with ``claim``. Entries of ``skip_profiles`` are not claimed,
        nor those whose path matches one of ``held_paths`` (see ``path_template``).

        ``in_batch``: to be sent in one request. Also what waits for others of the same batch: such
        an entry (its ``waiting_for`` is above 0) may be sent in a batch behind them only.
        """
        wanted = claims.Wanted(
            user_id=user_id,
            limit=limit,
            in_batch=in_batch,
            skip_profiles=skip_profiles,
            held_paths=held_paths,
        )
        seconds = lease_seconds or self.settings.lease_seconds
        with self._write("claim") as tx:
            return claims.claim_some(tx, wanted, lease_seconds=seconds, worker=self._worker)

    def save_batch_offer(self, server: str, offer: BatchOffer | None) -> None:
        """Store what is known about the batch endpoint of a server; None stores nothing."""
        with self._write("save_batch_offer") as tx:
            write_offer(tx, server, offer)

    def save_holds(self, server: str, holds: Mapping[str, StoredHold]) -> None:
        """Store what the server has set by ``Retry-After``, so that a later process keeps to it."""
        with self._write("save_holds") as tx:
            write_holds(tx, server, holds)

    def renew(self, claimed: Claimed) -> None:
        """Restart the lease, for a send that takes long. Raises ``ClaimLostError``."""
        with self._write("renew") as tx:
            claims.renew(tx, claimed)

    def renew_all(self, held: Iterable[Claimed]) -> None:
        """Restart the leases of several claims in one commit; those that are lost are left out."""
        with self._write("renew") as tx:
            for claimed in held:
                with suppress(ClaimLostError):
                    claims.renew(tx, claimed)

    def record(self, claimed: Claimed, outcome: Outcome) -> Entry:
        """Record the outcome of a claim, and return the entry after that.

        ``Succeeded``, ``RetryLater``, ``Released``, ``Failed``, ``Conflicted`` and ``Expired`` say
        what follows from each. Raises ``ClaimLostError``.
        """
        with self._write("record") as tx:
            return completion.record(tx, claimed, outcome, self.settings, self._chance)

    def map_local_id(
        self, user_id: str, local_id: str, server_id: str | int, *, entity_type: str
    ) -> None:
        """Record a server id that the app got by other means, and free what waits for it.

        An existing mapping is never changed.
        """
        with self._write("map_local_id") as tx:
            completion.map_local_id(tx, user_id, local_id, server_id, entity_type=entity_type)

    # ------------------------------------------------------------------ decisions about entries

    def resolve(
        self,
        entry_id: str,
        how: Resolution | ResolutionName,
        *,
        payload: Any = UNSET,
        headers: Mapping[str, str] | UnsetType = UNSET,
        adopts: bool = True,
    ) -> Entry:
        """End a conflict.

        ``THEIRS`` discards the entry, ``GIVE_UP`` makes it ``failed``; both park its dependents.
        ``MINE`` sends it once more, ``forced`` and with a new key. ``MERGED`` sends ``payload``
        with a new key, with the server's side as its base. Both may come with new ``headers``,
        for example another ``If-Match``. Edits of the entity that are queued behind it are then
        based on the server's side, unless ``adopts`` is false: then each of them is checked against
        it. Raises ``TransitionError`` unless it is in ``conflict``.
        """
        rewrite = Rewrite(payload=payload, headers=headers)
        with self._write("resolve") as tx:
            chosen = member_named(Resolution, how)
            return resolution.resolve(tx, entry_id, chosen, rewrite, self.settings, adopts=adopts)

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
        """Change the request of a pending, failed or conflicting entry; it gets a new key.

        The entry keeps its place in the order and becomes ``pending`` with all its attempts; parked
        dependents are revived. What is not given stays. Raises ``TransitionError``,
        ``EntryInvalidError``, and ``OutcomeUnknownError`` if it was sent without a conclusive
        response (with ``force`` it is edited anyway, and may then happen twice).
        """
        rewrite = Rewrite(payload=payload, endpoint=endpoint, headers=headers)
        with self._write("edit_payload") as tx:
            return resolution.edit(
                tx, entry_id, rewrite, self.settings, depends_on=depends_on, force=force
            )

    def retry(self, entry_id: str) -> Entry:
        """Send a failed entry again: same key, all its attempts, and its dependents revived.

        Raises ``TransitionError`` unless it is ``failed``, or while something it depends on is
        failed, discarded or expired: retry that first.
        """
        with self._write("retry") as tx:
            return resolution.retry(tx, entry_id)

    def retry_all(
        self,
        user_id: str,
        *,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Retry all failed entries of a user, or those with this reason and the server's last code.

        Entries that depend on one that failed are revived with it, and are left out here. Works in
        small transactions. Returns the entries; with ``dry_run`` they are not changed.
        """
        chosen = None if reason is None else member_named(Reason, reason)
        wanted = Filter(user_id=user_id, reason=chosen, code=code)
        return bulk.retry_all(self._write, wanted, dry_run=dry_run)

    def discard_all(
        self,
        user_id: str,
        *,
        status: Status | StatusName | Iterable[Status | StatusName] = Status.FAILED,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        with_dependents: bool = False,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Discard all failed entries of a user, or those with this reason and last code.

        ``status`` may also be ``conflict``, or both. Works in small transactions. Returns the
        entries; with ``dry_run`` they are not changed.
        """
        given = [status] if isinstance(status, str) else status
        statuses = tuple(member_named(Status, name) for name in given)
        for one in statuses:
            after(Transition.DISCARD, one)  # raises TransitionError for other statuses
        chosen = None if reason is None else member_named(Reason, reason)
        wanted = Filter(user_id=user_id, statuses=statuses, reason=chosen, code=code)
        return bulk.discard_all(
            self._write, wanted, with_dependents=with_dependents, dry_run=dry_run
        )

    def cancel(
        self, entry_id: str, *, reason: Reason = Reason.PERSON, force: bool = False
    ) -> Entry:
        """Discard a pending entry, and park its dependents.

        Raises ``TransitionError`` if it is not pending any more, ``OutcomeUnknownError`` if it was
        sent without a conclusive response: it may have happened. ``force`` cancels it anyway.
        """
        with self._write("cancel") as tx:
            return resolution.cancel(tx, entry_id, reason=reason, force=force)

    def discard(
        self,
        entry_id: str,
        *,
        reason: Reason = Reason.PERSON,
        with_dependents: bool = False,
    ) -> Entry:
        """Discard a failed or conflicting entry; its lane continues.

        Dependents stay parked, or are discarded with it. Raises ``TransitionError``.
        """
        with self._write("discard") as tx:
            return resolution.discard(tx, entry_id, reason=reason, with_dependents=with_dependents)

    def park(self, entry_id: str, *, reason: Reason, error: str | None = None) -> Entry:
        """Make a pending entry ``failed`` without sending it, and park its dependents.

        Raises ``TransitionError``.
        """
        with self._write("park") as tx:
            return resolution.park(tx, entry_id, reason=reason, error=error)

    # ------------------------------------------------------------------ outcomes and maintenance

    def wait(self, entry_id: str, timeout: float | None = None) -> Entry:
        """Wait until an entry is not ``pending`` or ``in_flight`` any more, and return it.

        So it has succeeded, expired or been discarded, or it is failed or in conflict and needs a
        person. Another thread or process sends meanwhile. ``timeout`` is in seconds; None waits
        without end. Raises ``TimeoutError``, and ``UsageError`` inside a transaction.
        """
        if self._transactions.in_group():
            raise UsageError("wait cannot be called inside a transaction: its outcome comes later")
        return wait_for_outcome(self, entry_id, timeout)

    def watchdog(self) -> list[Entry]:
        """Return entries to ``pending`` whose process has ended, or whose lease has expired.

        On Linux a process of this device that has ended is recognized at once. Elsewhere, and where
        that is not certain, a claim ends with its lease.

        They keep their key, their outcome is unknown and no attempt is counted. Claims that are
        renewed are not touched.
        """
        with self._write("watchdog") as tx:
            return completion.return_expired_claims(tx)

    def expire_stale(self, user_id: str) -> list[Entry]:
        """Expire what has been pending for longer than the cap (7 days), and park its dependents.

        If entries will pass the cap within 48 hours, an event ``expiring`` is emitted, once a day.

        Age is time that has certainly passed: by a clock that cannot be set while the device is
        on, and by the server's ``Date`` (``learn_server_time``) across the times when it was off.
        The wall clock is not used. Entries whose outcome is unknown are kept as long as the server
        certainly knows their keys.
        """
        with self._write("expire_stale") as tx:
            return maintenance.expire_stale(tx, user_id, self.settings)

    def learn_server_time(self, server_now: datetime) -> bool:
        """Store the ``Date`` of a response that the server has just sent.

        Cheap to call with every response: it is written only when it changes something. Returns
        whether the device was off for longer than was counted: entries are older than recorded.
        """
        with self._read() as tx:
            update = update_from_server(tx.clock, server_now)
        if update is None:
            return False
        with self._write("learn_server_time") as tx:
            return maintenance.learn_server_time(tx, server_now)

    def prune(self, *, limit: int | None = None) -> int:
        """Remove what succeeded 7 days ago and what was otherwise settled 30 days ago.

        Also failed entries, conflicts, mappings and versions of entities that are older than the
        settings say and that nothing refers to; the first three only if the event ``pruning`` has
        announced it. Works in small transactions; ``limit`` bounds how many entries are removed.
        Returns how many were.
        """
        return pruning.prune(self._write, self.settings, limit)

    def prune_if_due(self) -> bool:
        """Prune a batch if the last check was an hour ago; returns whether there is more to prune.

        For idle time: it is cheap when called often, and prunes only if the oldest
        entries can be removed. Errors of the file are logged, and it is tried again in an hour.
        """
        if monotonic() < self._prune_at:
            return False
        self._prune_at = monotonic() + _PRUNE_INTERVAL_SECONDS
        try:
            with self._read() as tx:
                may_prune = pruning.may_prune(tx, self.settings)
                users = tx.rows("users") if self.has_listeners else []
                warned = [
                    user_id
                    for (user_id,) in users
                    if maintenance.expires_soon(tx, user_id, self.settings)
                ]
            for user_id in warned:
                with self._write("warn_of_expiry") as tx:
                    maintenance.warn_of_expiry(tx, user_id, self.settings)
            if not may_prune:
                return False
            has_more = self.prune(limit=pruning.PRUNE_BATCH) == pruning.PRUNE_BATCH
        except OutboxFileError as error:
            _log.warning("nothing was pruned: %s", error)
            return False
        if has_more:
            self._prune_at = 0.0
        return has_more

    def purge_user(self, user_id: str, *, force: bool = False) -> int:
        """Remove a user with all entries, attempts and mappings, as at logout.

        Raises ``UnsentEntriesError`` while anything is not settled, unless ``force``. The pages
        are overwritten. Returns how many entries were removed.
        """
        with self._write("purge_user") as tx:
            removed = maintenance.purge_user(tx, user_id, force=force)
        self._transactions.checkpoint()
        return removed

    def change_passphrase(
        self, passphrase: str | bytes, *, allow_weak_passphrase: bool = False
    ) -> None:
        """Encrypt the file under another passphrase; a plain file opened with ``apsw`` too.

        No other process may have the file open: ``FileBusyError`` otherwise. A crash leaves the
        old passphrase or the new one, never a mixture. Needs free disk space of the file's size.
        A weak passphrase is refused as for a new file; see ``open``.
        """
        check_new_passphrase(passphrase, allow_weak=allow_weak_passphrase)
        with self._transactions.exclusive() as database:
            rekey(database, self._passphrase, passphrase)
            self._passphrase = passphrase

    def check_integrity(self) -> None:
        """Read the whole file and raise ``FileDamagedError`` if a part of it is damaged."""
        self._transactions.check_integrity()
