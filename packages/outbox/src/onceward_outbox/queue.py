"""The durable queue in one SQLite file: every operation on it is one transaction. Sends nothing.

A change of status is checked against the table in ``entry.py``. The change and all that
follows from it (the next entry of the lane, dependents, the mapping of its id) commit together with
``synchronous=FULL``; only then are listeners called and the method returns.

One queue object may be used from several threads; several processes may each open the same file.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from random import random
from typing import Any, Self, TypedDict, Unpack

import msgspec
from msgspec import UNSET, UnsetType

from onceward_outbox import claims, completion, enqueue, resolution
from onceward_outbox.backoff import StoredHold, holds_row, read_holds, write_holds
from onceward_outbox.batch_offer import BatchOffer, offer_row, read_offer, write_offer
from onceward_outbox.claims import claim_holder
from onceward_outbox.clock import SystemDeviceClock
from onceward_outbox.database import AppConnection, Driver, open_database
from onceward_outbox.enqueue import QueueQuota
from onceward_outbox.entries import QueueFile
from onceward_outbox.entry import (
    Claimed,
    Entry,
    Reason,
    Resolution,
    ResolutionName,
    member_named,
)
from onceward_outbox.errors import ClaimLostError
from onceward_outbox.events import Event, EventFacts, EventKind, Events, Listener
from onceward_outbox.maintenance import Maintenance, PayloadMigration, migrate_payloads
from onceward_outbox.outcome import Outcome
from onceward_outbox.profile import Profile, ProfileRegistry
from onceward_outbox.resolution import Rewrite
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transactions
from onceward_protocol.clock import Clock
from onceward_protocol.fault_points import SyncFaultPoints


class QueueOptions(TypedDict, total=False):
    """Options of ``OutboxQueue.open``."""

    # Text is stretched into a key as SQLCipher 4 does (a few tenths of a second); 32 bytes are the
    # key itself, for apps that keep one in the system's key store. Without one the file is plain.
    passphrase: str | bytes | None
    # Accept a passphrase for a new file that has fewer than 12 characters or the form of a raw key
    # (``x'…'`` or ``raw:…``). An existing file with a weak one opens, and a warning is logged.
    allow_weak_passphrase: bool
    # Limits and times.
    settings: QueueSettings | None
    # The device's clocks.
    clock: Clock | None
    # Functions that are called with every event.
    listeners: Iterable[Listener]
    # Rewrites entries that an earlier version of the app has queued.
    payloads: PayloadMigration | None
    # Looked up before installed ones; see ``Profile``.
    profiles: Iterable[Profile]
    # Where tests interrupt an operation.
    fault_points: SyncFaultPoints | None
    # Random numbers from 0 to 1, for the jitter of delays.
    chance: Callable[[], float]
    # Plain files use the standard library's ``sqlite3``, encrypted ones ``apsw``; ``"apsw"`` is for
    # both. Two copies of SQLite in one process must never have the same file open, so an app that
    # opens the file itself uses the same driver.
    driver: Driver
    # The name of a VFS of ``apsw``.
    vfs: str | None
    # False: a file that does not exist, or has no outbox in it, is refused.
    create: bool


class OutboxQueue(Maintenance):
    """A device's queue of mutations in one SQLite file.

    Opened by ``OutboxQueue.open``; a context manager that closes it. Every operation raises an
    ``OutboxError`` of a class that says what is wrong, and has then changed nothing. File errors
    (``OutboxFileError``) can come out of any of them.
    """

    def __init__(
        self,
        file: QueueFile,
        *,
        passphrase: str | bytes | None,
        chance: Callable[[], float],
        worker: str,
    ) -> None:
        """Take over an open file; use ``open`` instead."""
        super().__init__(file, passphrase)
        # The profiles that entries may name.
        self.profiles = file.profiles
        self._chance = chance
        self._worker = worker

    @classmethod
    def open(cls, path: str | os.PathLike[str], **options: Unpack[QueueOptions]) -> Self:
        """Open or create the file, and bring its schema up to date.

        Raises ``WrongPassphraseError``, ``NewerFileError``, ``FileDamagedError``,
        ``FileReadOnlyError``, ``DiskFullError`` or ``FileBusyError``, and leaves the file as it is;
        ``ConfigurationError`` for a weak passphrase of a new file.
        """
        unknown = options.keys() - QueueOptions.__annotations__.keys()
        if unknown:
            raise TypeError(f"OutboxQueue.open has no option {', '.join(sorted(unknown))}")
        settings = options.get("settings") or QueueSettings()
        passphrase, payloads = options.get("passphrase"), options.get("payloads")
        database = open_database(
            Path(path),
            passphrase=passphrase,
            driver=options.get("driver", "auto"),
            vfs=options.get("vfs"),
            busy_seconds=settings.busy_seconds,
            create=options.get("create", True),
            allow_weak_passphrase=options.get("allow_weak_passphrase", False),
        )
        try:
            clock = options.get("clock") or SystemDeviceClock()
            events = Events(options.get("listeners", ()))
            profiles = ProfileRegistry(options.get("profiles", ()))
            points = options.get("fault_points")
            queue = cls(
                QueueFile(
                    Transactions(database, clock, events, profiles, points),
                    events,
                    settings,
                    profiles,
                    QueueQuota(settings.max_entries),
                ),
                passphrase=passphrase,
                chance=options.get("chance", random),
                worker=claim_holder(),
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
        """Close the file, and end the streams of events. Idempotent."""
        try:
            self._file.transactions.close()
        finally:
            self._file.events.close()

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
        return self._file.transactions.group(savepoints=savepoints)

    @property
    def has_listeners(self) -> bool:
        """Whether any listener is subscribed."""
        return self._file.events.has_listeners

    def emit(self, event: Event) -> None:
        """Deliver an event that is not a change of the queue, such as ``drained``."""
        self._deliver([event])

    def _deliver(self, events: Iterable[Event]) -> None:
        self._file.events.put(events)
        self._file.events.deliver()

    def emit_about(self, kind: EventKind, entry: Entry, **facts: Unpack[EventFacts]) -> None:
        """Deliver an event about an entry that is not a change of it, such as ``sent``."""
        if self.has_listeners:
            facts.setdefault("http_status", None)
            facts.setdefault("code", None)
            with self._read() as tx:
                event = tx.event(kind, entry, **facts)
            self._deliver([event])

    # ------------------------------------------------------------------ users and enqueueing

    def add_user(self, user_id: str) -> None:
        """Add a user; entries are queued for known users only. Idempotent."""
        with self._write("add_user") as tx:
            enqueue.add_user(tx, user_id)

    def announce(self, entries: Iterable[Entry]) -> None:
        """Deliver events about entries queued on the app's ``connection``, after its commit."""
        with self._read() as tx:
            events = [tx.event(EventKind.ENQUEUED, entry) for entry in entries]
        self._deliver(events)

    def eligible_users(self) -> list[str]:
        """Return the users for whom something can be claimed now."""
        with self._read() as tx:
            return [str(row[0]) for row in tx.rows("eligible_users", ms=tx.ms)]

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

    def watchdog(self) -> list[Entry]:
        """Return entries to ``pending`` whose process has ended, or whose lease has expired.

        On Linux a process of this device that has ended is recognized at once. Elsewhere, and where
        that is not certain, a claim ends with its lease.

        They keep their key, their outcome is unknown and no attempt is counted. Claims that are
        renewed are not touched.
        """
        with self._write("watchdog") as tx:
            return completion.return_expired_claims(tx)

    def lease_seconds_left(self, user_id: str) -> tuple[float, float] | None:
        """Return for how long a user's claims hold unless they are renewed: shortest and longest.

        None if nothing is claimed.
        """
        with self._read() as tx:
            first, last = tx.rows("lease_ends", user_id=user_id)[0]
            if first is None:
                return None
            return max(0.0, (first - tx.ms) / 1000), max(0.0, (last - tx.ms) / 1000)

    def base_of(self, claimed: Claimed) -> str | None:
        """Return the entity as it was when the claimed edit was made, as a JSON text, if known."""
        entry = claimed.entry
        if claimed.base is not None or entry.entity is None or claimed.version is None:
            return claimed.base or entry.base
        with self._read() as tx:
            found = tx.rows("entity_version", user_id=entry.user_id, entity=entry.entity)
        version, body = found[0] if found else (None, None)
        return body if body is not None and version == claimed.version else entry.base

    def server_state(
        self, server: str, base_url: str
    ) -> tuple[dict[str, StoredHold], BatchOffer | None]:
        """Return the holds set by ``Retry-After``, by path, and its batch endpoint.

        See ``Outages`` and ``Batches``.
        """
        holds, offer = holds_row(server), offer_row(base_url)
        with self._read() as tx:
            rows = dict(tx.rows("server_rows", holds=holds, offer=offer))
            return read_holds(tx, rows.get(holds)), read_offer(tx, rows.get(offer))

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

    def mappings(self, user_id: str, local_ids: Iterable[str]) -> dict[str, str | int]:
        """Return the server ids of those local ids that have one."""
        wanted = msgspec.json.encode(list(local_ids)).decode()
        with self._read() as tx:
            return dict(tx.rows("mappings", user_id=user_id, local_ids=wanted))

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

        ``SERVER_WINS`` discards the entry, ``GIVE_UP`` makes it ``failed``; both park its
        dependents. ``CLIENT_WINS`` sends it once more, ``forced`` and with a new key. ``MERGE``
        sends ``payload`` with a new key, with the server's side as its base. Both may come with
        new ``headers``, for example another ``If-Match``. Edits of the entity that are queued
        behind it are then based on the server's side, unless ``adopts`` is false: then each of them
        is checked against it. Raises ``TransitionError`` unless it is in ``conflict``.
        """
        rewrite = Rewrite(payload=payload, headers=headers)
        with self._write("resolve") as tx:
            chosen = member_named(Resolution, how)
            return resolution.resolve(tx, entry_id, chosen, rewrite, self.settings, adopts=adopts)

    def park(self, entry_id: str, *, reason: Reason, error: str | None = None) -> Entry:
        """Make a pending entry ``failed`` without sending it, and park its dependents.

        Raises ``TransitionError``.
        """
        with self._write("park") as tx:
            return resolution.park(tx, entry_id, reason=reason, error=error)
