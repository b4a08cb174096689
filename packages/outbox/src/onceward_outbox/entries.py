"""The entries of a queue, of one user or of all: what an app asks about them and decides."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Event as Flag
from time import monotonic
from typing import Any, Final, NamedTuple, Protocol, Unpack, overload

import msgspec
from msgspec import UNSET, UnsetType

from onceward_outbox import enqueue, resolution
from onceward_outbox.database import AppConnection
from onceward_outbox.enqueue import QueueQuota
from onceward_outbox.entry import (
    COLUMNS,
    OPEN,
    Attempt,
    Entry,
    EntryOptions,
    NewEntry,
    Reason,
    ReasonName,
    Status,
    StatusName,
    Transition,
    after,
    attempt_of,
    created_by,
    entry_of,
    member_named,
)
from onceward_outbox.errors import (
    EntryInvalidError,
    EntryNotFoundError,
    UnsentEntriesError,
    UsageError,
)
from onceward_outbox.events import Event, EventKind, Events, EventStream, Listener
from onceward_outbox.profile import ProfileRegistry
from onceward_outbox.resolution import Rewrite
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction, Transactions, Write
from onceward_outbox.validation import Draft, check_new
from onceward_protocol.operation import Operation, OperationName

_REQUEST: Final = ("user_id", "operation", "entity_type", "endpoint", "payload")
"""The positional arguments of ``enqueue``."""

_BATCH: Final = 500
"""Entries per commit of a decision about many."""


@dataclass(frozen=True, slots=True)
class QueueFile:
    """An open file with its settings: what the operations on it have in common."""

    transactions: Transactions
    events: Events
    settings: QueueSettings
    profiles: ProfileRegistry
    quota: QueueQuota


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a queue."""

    # By status; every status is present.
    counts: dict[Status, int]
    # Pending entries that could be claimed now.
    ready: int
    # Pending entries that wait for their next attempt.
    waiting: int
    # Pending entries behind another one in their lane, or behind what they depend on.
    blocked: int
    # Failed entries that the server has refused for good; nothing waits for them.
    refused: int
    # Seconds since the oldest pending entry was queued, as far as is certain.
    oldest_pending_seconds: float | None
    # Bytes of the file and its log.
    file_bytes: int

    @property
    def unsent(self) -> int:
        """Entries that are still to be sent, or that wait for a decision before that."""
        return sum(self.counts[status] for status in OPEN) - self.refused


class Unsettled(NamedTuple):
    """Counts of a user's entries that are not settled."""

    # Still to be sent, or waiting for a decision before that.
    unsent: int
    # Refused by the server for good; nothing waits for them.
    refused: int


class Entries:
    """Operations on the entries of all users, or of the user that this is bound to.

    Bound to a user, the id of another user's entry raises ``EntryNotFoundError``, as one that does
    not exist, and the argument ``user_id`` may be left out. Otherwise it has to be given, except
    where it says that all users are meant.
    """

    def __init__(self, file: QueueFile, user_id: str | None = None) -> None:
        # The user that this is bound to; None for all users.
        self.user_id = user_id
        self._file = file
        self._read, self._write = file.transactions.read, file.transactions.write

    # ------------------------------------------------------------------ enqueueing

    @overload
    def enqueue(
        self,
        user_id: str,
        operation: Operation | OperationName,
        entity_type: str,
        endpoint: str,
        payload: Any = None,
        /,
        *,
        coalesce: bool = False,
        connection: AppConnection | None = None,
        **options: Unpack[EntryOptions],
    ) -> Entry: ...
    @overload
    def enqueue(
        self, new: NewEntry, /, *, coalesce: bool = False, connection: AppConnection | None = None
    ) -> Entry: ...
    def enqueue(
        self,
        new: NewEntry | str,
        /,
        *request: Any,
        coalesce: bool = False,
        connection: AppConnection | None = None,
        **options: Any,
    ) -> Entry:
        """Queue one mutation durably, and return it as it is queued.

        ``outbox.enqueue("ada", "create", "note", "/notes", payload)``: user, operation,
        type of entity, path and payload; ``options`` are the other fields of ``NewEntry``, which
        may be given instead.

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
        app calls ``announce`` after its commit. See also ``OutboxQueue.transaction``.

        ``once`` of the entry names what the user does, such as ``order.close:001``: if the user
        has an entry with that name that is unsettled or has succeeded, it is returned, and nothing
        is written. So a double tap on a button is one entry. One that the server has refused does
        not count: the next tap is a new entry.

        A parent that is failed, discarded or expired makes the new entry ``failed`` with reason
        ``dependency`` at once; it is revived with its parent.

        Raises ``EntryInvalidError`` (its ``rule`` names what was broken) or ``QueueFullError``.
        """
        if isinstance(new, str):
            given = dict(zip(_REQUEST, (new, *request), strict=False))
            new = NewEntry(**given, **options)
        draft = self._checked(new)
        with self._write("enqueue", connection) as tx:
            return enqueue.enqueue(tx, draft, self._file.quota, coalesce=coalesce)

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
        drafts = [self._checked(new) for new in news]
        with self._write("enqueue_many", connection) as tx:
            return enqueue.enqueue_many(tx, drafts, self._file.quota, coalesce=coalesce)

    def _checked(self, new: NewEntry) -> Draft:
        if self.user_id not in (None, new.user_id):
            raise EntryInvalidError(
                "user_id_must_reference_existing_user",
                f"this outbox is that of {self.user_id}: the entry has another user_id",
            )
        return check_new(new, self._file.settings, self._file.profiles)

    # ------------------------------------------------------------------ queries

    def get(self, entry_id: str) -> Entry:
        """Return one entry, or raise ``EntryNotFoundError``."""
        with self._read() as tx:
            return self._entry(tx, entry_id)

    def by_key(self, key: str) -> Entry | None:
        """Return the entry with this idempotency key."""
        with self._read() as tx:
            found = tx.one("by_key", key=key)
        is_mine = found is not None and self.user_id in (None, found.user_id)
        return found if is_mine else None

    def by_local_id(self, local_id: str) -> list[Entry]:
        """Return all entries about the entity with this local id, in order."""
        with self._read() as tx:
            found = tx.entries("by_local_id", local_id=local_id)
        return [entry for entry in found if self.user_id in (None, entry.user_id)]

    def entries(
        self,
        user_id: str | None = None,
        *,
        status: Status | StatusName | Iterable[Status | StatusName] | None = None,
        entity_type: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Entry]:
        """Return a page of entries in the order in which they were queued; None: of all users.

        ``after`` is the id of the last entry of the page before.
        """
        if limit < 1:
            raise UsageError("limit must be at least 1")
        conditions, params = ["1"], dict[str, Any](limit=limit)
        if (user := self._user_or_all(user_id)) is not None:
            conditions.append("user_id = :user_id")
            params["user_id"] = user
        if status is not None:
            wanted = _statuses(status)
            names = [f":status_{number}" for number in range(len(wanted))]
            conditions.append(f"status IN ({', '.join(names)})")
            params |= {f"status_{number}": name.value for number, name in enumerate(wanted)}
        if entity_type is not None:
            conditions.append("entity_type = :entity_type")
            params["entity_type"] = entity_type
        if after is not None:
            conditions.append("rowid > (SELECT rowid FROM offline_sync_queue WHERE id = :after)")
        sql = (
            f"SELECT {', '.join(COLUMNS)} FROM offline_sync_queue"  # noqa: S608 - constants only
            f" WHERE {' AND '.join(conditions)} ORDER BY rowid LIMIT :limit"
        )
        with self._read() as tx:
            if after is not None:
                params["after"] = self._entry(tx, after).id
            return [entry_of(row) for row in tx.query(sql, params)]

    def next_eligible(self, user_id: str | None = None) -> Entry | None:
        """Return the entry that ``claim`` would claim now."""
        with self._read() as tx:
            return tx.one("next_eligible", user_id=self._user(user_id), ms=tx.ms)

    def next_due_seconds(self, user_id: str | None = None) -> float | None:
        """Return how long until the user's first retry is due; None if there is none."""
        with self._read() as tx:
            due_ms = tx.rows("next_due", user_id=self._user(user_id))[0][0]
            return None if due_ms is None else max(0, due_ms - tx.ms) / 1000

    def blocked_by(self, user_id: str | None = None, lane: str | None = None) -> list[Entry]:
        """Return the ``failed`` and ``conflict`` entries, which need a person.

        Entries that are parked because of another (reason ``dependency``) are left out: the other
        one needs the attention.
        """
        with self._read() as tx:
            return [
                entry
                for entry in tx.entries("stuck", user_id=self._user(user_id))
                if entry.reason is not Reason.DEPENDENCY and lane in (None, entry.lane)
            ]

    def dependents(self, entry_id: str, *, transitive: bool = False) -> list[Entry]:
        """Return the entries that depend on this one, or on the entity it creates."""
        with self._read() as tx:
            entry = self._entry(tx, entry_id)
            name = "all_dependents" if transitive else "dependents"
            return tx.entries(name, id=entry.id, local=created_by(entry))

    def attempts(self, entry_id: str) -> list[Attempt]:
        """Return the history of an entry's sends, oldest first."""
        with self._read() as tx:
            return [attempt_of(row) for row in tx.rows("attempts", id=self._entry(tx, entry_id).id)]

    def unsent(self, user_id: str | None = None) -> int:
        """Count a user's entries that are still to be sent, or wait for a decision before that.

        Entries that the server has refused for good are not among them: see ``unsettled``.
        """
        return self.unsettled(user_id).unsent

    def unsettled(self, user_id: str | None = None) -> Unsettled:
        """Count a user's unsent and refused entries."""
        with self._read() as tx:
            return _unsettled(tx, self._user(user_id))

    def in_flight(self, user_id: str | None = None) -> int:
        """Count a user's entries that are claimed, by any process."""
        with self._read() as tx:
            return int(tx.rows("count_in_flight", user_id=self._user(user_id))[0][0])

    def stats(self, user_id: str | None = None) -> Stats:
        """Count entries by status; None: those of all users."""
        user_id = self._user_or_all(user_id)
        with self._read() as tx:
            counts = dict.fromkeys(Status, 0)
            users: set[str] = set()
            for owner, status, count in tx.rows("counts", user_id=user_id):
                counts[Status(status)] += count
                users.add(owner)
            ready = tx.rows("count_ready", user_id=user_id)[0][0]
            in_back_off, due = tx.rows("count_waiting", user_id=user_id, ms=tx.ms)[0]
            oldest = [
                found[0][0]
                for owner in users
                if (found := tx.rows("oldest_unsent", user_id=owner))[0][0] is not None
            ]
            return Stats(
                counts=counts,
                ready=ready + due,
                waiting=in_back_off - due,
                blocked=counts[Status.PENDING] - ready - in_back_off,
                refused=tx.rows("count_refused", user_id=user_id)[0][0],
                oldest_pending_seconds=(tx.ms - min(oldest)) / 1000 if oldest else None,
                file_bytes=tx.file_bytes(),
            )

    def wait(self, entry_id: str, timeout: float | None = None) -> Entry:
        """Wait until an entry is not ``pending`` or ``in_flight`` any more, and return it.

        So it has succeeded, expired or been discarded, or it is failed or in conflict and needs a
        person. Another thread or process sends meanwhile. ``timeout`` is in seconds; None waits
        without end. Raises ``TimeoutError``, and ``UsageError`` inside a transaction.
        """
        if self._file.transactions.in_group():
            raise UsageError("wait cannot be called inside a transaction: its outcome comes later")
        return wait_for_outcome(self, entry_id, timeout)

    # ------------------------------------------------------------------ decisions

    def retry(self, entry_id: str) -> Entry:
        """Send a failed entry again, with all its attempts, and revive its dependents.

        So too one that the device expired unsent. What the server refused gets a new key, as the
        refusal may be stored; what may have happened keeps its key. Raises ``TransitionError``
        for any other entry, while something it depends on is failed, discarded or expired (retry
        that first), and if another entry was enqueued with its ``once`` since.
        """
        with self._write("retry") as tx:
            return resolution.retry(tx, self._entry(tx, entry_id).id)

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
                tx,
                self._entry(tx, entry_id).id,
                rewrite,
                self._file.settings,
                depends_on=depends_on,
                force=force,
            )

    def cancel(
        self, entry_id: str, *, reason: Reason = Reason.PERSON, force: bool = False
    ) -> Entry:
        """Discard a pending entry, and park its dependents.

        Raises ``TransitionError`` if it is not pending any more, ``OutcomeUnknownError`` if it was
        sent without a conclusive response: it may have happened. ``force`` cancels it anyway.
        """
        with self._write("cancel") as tx:
            return resolution.cancel(tx, self._entry(tx, entry_id).id, reason=reason, force=force)

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
            return resolution.discard(
                tx, self._entry(tx, entry_id).id, reason=reason, with_dependents=with_dependents
            )

    def retry_all(
        self,
        user_id: str | None = None,
        *,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Retry all failed entries of a user, or those with this reason and the server's last code.

        Entries that depend on one that failed are revived with it, and are left out here. Works in
        small transactions. Returns the entries; with ``dry_run`` they are not changed.
        """

        def retry(tx: Transaction, found: Iterable[Entry]) -> Iterator[Entry]:
            # Decided for the whole batch first, so that a dry run finds the same ones.
            ready = [
                entry
                for entry in found
                if not tx.rows("dead_waits", id=entry.id)
                and resolution.newer_with_once(tx, entry) is None
            ]
            for entry in ready:
                # Of several with the same ``once`` the first is retried.
                if dry_run or resolution.newer_with_once(tx, entry) is None:
                    yield entry if dry_run else resolution.retry(tx, entry.id)

        return _in_batches(
            self._write,
            "retry_all",
            retry,
            user_id=self._user(user_id),
            statuses='["failed"]',
            reason=_reason(reason),
            code=code,
        )

    def discard_all(
        self,
        user_id: str | None = None,
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
        statuses = _statuses(status)
        for one in statuses:
            after(Transition.DISCARD, one)  # raises TransitionError for other statuses

        def discard(tx: Transaction, found: Iterable[Entry]) -> Iterator[Entry]:
            for entry in found:
                # One that depends on an earlier one may have been discarded with it.
                if dry_run or tx.entry(entry.id).status is Status.DISCARDED:
                    yield entry
                else:
                    yield resolution.discard(
                        tx, entry.id, reason=Reason.PERSON, with_dependents=with_dependents
                    )

        return _in_batches(
            self._write,
            "discard_all",
            discard,
            user_id=self._user(user_id),
            statuses=msgspec.json.encode(statuses).decode(),
            reason=_reason(reason),
            code=code,
        )

    def purge_user(self, user_id: str | None = None, *, force: bool = False) -> int:
        """Remove a user with all entries, attempts and mappings, as at logout.

        Raises ``UnsentEntriesError`` while anything is unsent or in conflict, unless ``force``;
        refused entries are neither. The pages are overwritten. Returns how many were removed.
        """
        user = self._user(user_id)
        with self._write("purge_user") as tx:
            unsent = _unsettled(tx, user).unsent
            if unsent and not force:
                raise UnsentEntriesError(
                    f"entries of {user} not sent, or in conflict: {unsent} (force=True drops them)",
                    unsent=unsent,
                )
            tx.rows("purge_waits", user_id=user)
            tx.rows("purge_attempts", user_id=user)
            removed = len(tx.rows("purge_entries", user_id=user))
            for name in ("purge_mappings", "purge_versions", "purge_user"):
                tx.rows(name, user_id=user)
            tx.events.append(Event(kind=EventKind.PURGED, at=tx.now, user_id=user, count=removed))
        self._file.transactions.checkpoint()
        return removed

    # ------------------------------------------------------------------ events

    def subscribe(
        self, listener: Listener, at_close: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """Call ``listener`` with every event from now on; returns a function that unsubscribes it.

        It is called after the commit, in the order of commits, on the committing thread, and should
        return quickly. Changes made by other processes cause no events here. Events that are about
        no single user, such as an outage of the server, are passed on to each. ``at_close`` is
        called when the queue is closed.
        """

        def on_event(event: Event) -> None:
            if event.user_id in (None, self.user_id):
                listener(event)

        chosen = listener if self.user_id is None else on_event
        return self._file.events.subscribe(chosen, at_close)

    def events(self) -> EventStream:
        """Return the events from now on, as an iterator that waits for the next one."""
        return EventStream(self)

    # ------------------------------------------------------------------ whose entries

    def _user(self, user_id: str | None) -> str:
        """Return the user that is meant."""
        user = self._user_or_all(user_id)
        if user is None:
            raise UsageError("name the user whose entries are meant")
        return user

    def _user_or_all(self, user_id: str | None) -> str | None:
        if user_id is not None and self.user_id not in (None, user_id):
            raise UsageError(f"this outbox is that of {self.user_id}, and no other user's")
        return self.user_id if user_id is None else user_id

    def _entry(self, tx: Transaction, entry_id: str) -> Entry:
        entry = tx.entry(entry_id)
        if self.user_id not in (None, entry.user_id):
            raise EntryNotFoundError(f"there is no entry {entry_id} in the queue")
        return entry


def _unsettled(tx: Transaction, user_id: str) -> Unsettled:
    count, refused, _ = tx.rows("count_unsettled", user_id=user_id)[0]
    return Unsettled(count - refused, refused)


def _statuses(given: Status | StatusName | Iterable[Status | StatusName]) -> list[Status]:
    names = [given] if isinstance(given, str) else given
    return [member_named(Status, name) for name in names]


def _reason(given: Reason | ReasonName | None) -> Reason | None:
    return None if given is None else member_named(Reason, given)


def _in_batches(
    write: Write,
    operation: str,
    decide: Callable[[Transaction, Iterable[Entry]], Iterable[Entry]],
    **conditions: Any,
) -> list[Entry]:
    """Decide about all entries that match, some in each transaction. None matches every value."""
    done: list[Entry] = []
    position, has_more = 0, True
    while has_more:
        with write(operation) as tx:
            page = tx.entries("stuck_like", **conditions, after=position, limit=_BATCH)
            done += decide(tx, page)
        has_more = len(page) == _BATCH
        position = page[-1].sequence_number if page else position
    return done


# -- waiting for an outcome ------------------------------------------------------------------------


_POLL_SECONDS: Final = 0.5
_UNDECIDED: Final = frozenset({Status.PENDING, Status.IN_FLIGHT})


class _Entries(Protocol):
    def get(self, entry_id: str) -> Entry: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]: ...


def wait_for_outcome(queue: _Entries, entry_id: str, timeout: float | None) -> Entry:
    """Return the entry when its status is not ``pending`` or ``in_flight`` any more.

    ``timeout`` is in seconds; None waits without end. Raises ``TimeoutError``.
    """
    changed = Flag()

    def on_event(event: Event) -> None:
        if event.entry_id == entry_id:
            changed.set()

    unsubscribe = queue.subscribe(on_event)
    try:
        deadline = _deadline(timeout)
        while True:
            changed.clear()
            entry = queue.get(entry_id)
            if entry.status not in _UNDECIDED:
                return entry
            changed.wait(_pause(entry, timeout, deadline))
    finally:
        unsubscribe()


async def wait_for_outcome_async(
    queue: _Entries,
    entry_id: str,
    timeout: float | None,  # noqa: ASYNC109 - the same as without asyncio
) -> Entry:
    """Return the entry as ``wait_for_outcome`` does; no thread waits meanwhile."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def on_event(event: Event) -> None:
        if event.entry_id == entry_id:
            loop.call_soon_threadsafe(changed.set)

    unsubscribe = queue.subscribe(on_event)
    try:
        deadline = _deadline(timeout)
        while True:
            changed.clear()
            entry = await asyncio.to_thread(queue.get, entry_id)
            if entry.status not in _UNDECIDED:
                return entry
            pause = _pause(entry, timeout, deadline)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await changed.wait()
    finally:
        unsubscribe()


def _deadline(timeout: float | None) -> float:
    return float("inf") if timeout is None else monotonic() + timeout


def _pause(entry: Entry, timeout: float | None, deadline: float) -> float:
    """Return how long to wait for an event; raise ``TimeoutError`` after the deadline."""
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError(f"entry {entry.id} is still {entry.status} after {timeout:g} s")
    return min(left, _POLL_SECONDS)
