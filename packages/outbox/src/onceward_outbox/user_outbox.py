"""The outbox of one user: no call sees or changes an entry of another user of the same device."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event as Flag
from typing import Any, Protocol

from msgspec import UNSET, UnsetType

from onceward_outbox.conflicts import resolve_conflict
from onceward_outbox.drain_state import DrainReport
from onceward_outbox.entry import (
    Attempt,
    Entry,
    NewEntry,
    Reason,
    ReasonName,
    Resolution,
    ResolutionName,
    Status,
    StatusName,
)
from onceward_outbox.errors import EntryInvalidError, EntryNotFoundError
from onceward_outbox.event_stream import EventStream, Publisher
from onceward_outbox.events import Event, Listener
from onceward_outbox.queue import OutboxQueue, Stats

__all__ = ["UserOutbox"]


class _DrainUser(Protocol):
    def __call__(
        self,
        user_id: str,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
        stop: Flag | None = None,
    ) -> DrainReport: ...


class UserOutbox:
    """What ``Outbox.for_user`` returns: the operations of a queue, for the entries of one user.

    The id of another user's entry raises ``EntryNotFoundError``, as one that does not exist.
    """

    def __init__(
        self,
        queue: OutboxQueue,
        user_id: str,
        drain: _DrainUser,
        open_stream: Callable[[Publisher], EventStream],
    ) -> None:
        # The user whose entries these are.
        self.user_id = user_id
        self._queue = queue
        self._drain = drain
        self._open_stream = open_stream

    # ------------------------------------------------------------------ enqueueing

    def enqueue(self, new: NewEntry, *, coalesce: bool = False) -> Entry:
        """Queue one mutation of this user. See ``OutboxQueue.enqueue``."""
        self._check(new)
        return self._queue.enqueue(new, coalesce=coalesce)

    def enqueue_many(self, news: Iterable[NewEntry], *, coalesce: bool = False) -> list[Entry]:
        """Queue several mutations of this user in one commit."""
        given = list(news)
        for new in given:
            self._check(new)
        return self._queue.enqueue_many(given, coalesce=coalesce)

    # ------------------------------------------------------------------ queries

    def get(self, entry_id: str) -> Entry:
        """Return one entry, or raise ``EntryNotFoundError``."""
        entry = self._queue.get(entry_id)
        if entry.user_id != self.user_id:
            raise EntryNotFoundError(f"there is no entry {entry_id} in the queue")
        return entry

    def by_key(self, key: str) -> Entry | None:
        """Return the entry with this idempotency key."""
        found = self._queue.by_key(key)
        return found if found is not None and found.user_id == self.user_id else None

    def by_local_id(self, local_id: str) -> list[Entry]:
        """Return all entries about the entity with this local id, in order."""
        return [one for one in self._queue.by_local_id(local_id) if one.user_id == self.user_id]

    def entries(
        self,
        *,
        status: Status | StatusName | Iterable[Status | StatusName] | None = None,
        entity_type: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[Entry]:
        """Return a page of entries in the order in which they were queued."""
        if after is not None:
            self.get(after)
        return self._queue.entries(
            self.user_id, status=status, entity_type=entity_type, limit=limit, after=after
        )

    def next_eligible(self) -> Entry | None:
        """Return what a drain would send next."""
        return self._queue.next_eligible(self.user_id)

    def next_due_seconds(self) -> float | None:
        """Return how long until the first retry is due; None if there is none."""
        return self._queue.next_due_seconds(self.user_id)

    def blocked_by(self, lane: str | None = None) -> list[Entry]:
        """Return the ``failed`` and ``conflict`` entries, which need a person."""
        return self._queue.blocked_by(self.user_id, lane)

    def dependents(self, entry_id: str, *, transitive: bool = False) -> list[Entry]:
        """Return the entries that depend on this one, or on the entity it creates."""
        self.get(entry_id)
        return self._queue.dependents(entry_id, transitive=transitive)

    def attempts(self, entry_id: str) -> list[Attempt]:
        """Return the history of an entry's sends, oldest first."""
        self.get(entry_id)
        return self._queue.attempts(entry_id)

    def mappings(self, local_ids: Iterable[str]) -> dict[str, str | int]:
        """Return the server ids of those local ids that have one."""
        return self._queue.mappings(self.user_id, local_ids)

    def unsent(self) -> int:
        """Count the entries that are not settled."""
        return self._queue.unsent(self.user_id)

    def in_flight(self) -> int:
        """Count the entries that are claimed, by any process."""
        return self._queue.in_flight(self.user_id)

    def stats(self) -> Stats:
        """Count entries by status."""
        return self._queue.stats(self.user_id)

    def wait(self, entry_id: str, timeout: float | None = None) -> Entry:
        """Wait until an entry has an outcome. See ``OutboxQueue.wait``."""
        self.get(entry_id)
        return self._queue.wait(entry_id, timeout)

    # ------------------------------------------------------------------ decisions

    def retry(self, entry_id: str) -> Entry:
        """Send a failed entry again. See ``OutboxQueue.retry``."""
        self.get(entry_id)
        return self._queue.retry(entry_id)

    def retry_all(
        self,
        *,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Retry all failed entries that match. See ``OutboxQueue.retry_all``."""
        return self._queue.retry_all(self.user_id, reason=reason, code=code, dry_run=dry_run)

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
        """Change the request of an entry. See ``OutboxQueue.edit_payload``."""
        self.get(entry_id)
        return self._queue.edit_payload(
            entry_id,
            payload,
            headers=headers,
            endpoint=endpoint,
            depends_on=depends_on,
            force=force,
        )

    def resolve(
        self, entry_id: str, how: Resolution | ResolutionName, *, payload: Any = UNSET
    ) -> Entry:
        """End a conflict as the user has decided. See ``OutboxQueue.resolve``."""
        return resolve_conflict(self._queue, self.get(entry_id), how, payload=payload)

    def cancel(self, entry_id: str, *, force: bool = False) -> Entry:
        """Discard a pending entry. See ``OutboxQueue.cancel``."""
        self.get(entry_id)
        return self._queue.cancel(entry_id, force=force)

    def discard(self, entry_id: str, *, with_dependents: bool = False) -> Entry:
        """Discard a failed or conflicting entry. See ``OutboxQueue.discard``."""
        self.get(entry_id)
        return self._queue.discard(entry_id, with_dependents=with_dependents)

    def discard_all(
        self,
        *,
        status: Status | StatusName | Iterable[Status | StatusName] = Status.FAILED,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        with_dependents: bool = False,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Discard all entries that match. See ``OutboxQueue.discard_all``."""
        return self._queue.discard_all(
            self.user_id,
            status=status,
            reason=reason,
            code=code,
            with_dependents=with_dependents,
            dry_run=dry_run,
        )

    def purge(self, *, force: bool = False) -> int:
        """Remove the user with all entries. See ``OutboxQueue.purge_user``."""
        return self._queue.purge_user(self.user_id, force=force)

    # ------------------------------------------------------------------ sending and events

    def drain(
        self,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
        stop: Flag | None = None,
    ) -> DrainReport:
        """Send this user's entries now, on this thread. See ``Outbox.drain``."""
        return self._drain(self.user_id, max_seconds=max_seconds, wait=wait, stop=stop)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event about this user; returns a function to unsubscribe.

        Events that are about no single user, such as an outage of the server, are passed on too.
        """

        def on_event(event: Event) -> None:
            if event.user_id in (None, self.user_id):
                listener(event)

        return self._queue.subscribe(on_event)

    def events(self) -> EventStream:
        """Return the events of ``subscribe`` from now on, as an iterator that waits."""
        return self._open_stream(self)

    def _check(self, new: NewEntry) -> None:
        if new.user_id != self.user_id:
            raise EntryInvalidError(
                "user_id_must_reference_existing_user",
                f"this outbox is that of {self.user_id}: the entry has another user_id",
            )
