"""Events: what happened to the queue, told after it is committed. Never a payload or a token."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from datetime import datetime
from enum import StrEnum
from threading import Lock

import msgspec

from holdfast.core.outbox_entry import Entry, Operation, Reason, Status

__all__ = ["Event", "EventKind", "Events", "Listener", "about"]

_log = logging.getLogger(__name__)


class EventKind(StrEnum):
    """What happened."""

    ENQUEUED = "enqueued"
    MERGED = "merged"
    """A later change went into this entry before it was ever sent."""
    CLAIMED = "claimed"
    SENT = "sent"
    """An answer came, or did not. For the drain to tell."""
    SUCCEEDED = "succeeded"
    RETRYING = "retrying"
    RELEASED = "released"
    """Given back unsent, or by the watchdog."""
    FAILED = "failed"
    CONFLICT = "conflict"
    RESOLVED = "resolved"
    EDITED = "edited"
    RETRIED = "retried"
    REVIVED = "revived"
    EXPIRED = "expired"
    DISCARDED = "discarded"
    PAUSED = "paused"
    """The drain waits for somebody, for example for a new token. For the drain to tell."""
    DRAINED = "drained"
    """For the drain to tell."""
    PRUNED = "pruned"
    PURGED = "purged"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened. Entry fields are None where it is about more than one entry."""

    kind: EventKind
    at: datetime
    user_id: str | None = None
    entry_id: str | None = None
    entity_type: str | None = None
    operation: Operation | None = None
    local_id: str | None = None
    server_id: str | int | None = None
    # After the change.
    status: Status | None = None
    reason: Reason | None = None
    attempt: int | None = None
    # HTTP status of the answer this is about.
    error_code: int | None = None
    # For `retrying`: how long it waits.
    delay_seconds: float | None = None
    # For `pruned`, `purged` and `drained`: how many entries.
    count: int | None = None
    # A few words for a person, made here or by the drain; never a payload.
    detail: str | None = None


Listener = Callable[[Event], None]


def about(
    kind: EventKind,
    entry: Entry,
    at: datetime,
    *,
    delay_seconds: float | None = None,
    detail: str | None = None,
) -> Event:
    """Make the event that this happened to this entry, as it is now."""
    return Event(
        kind=kind,
        at=at,
        user_id=entry.user_id,
        entry_id=entry.id,
        entity_type=entry.entity_type,
        operation=entry.operation,
        local_id=entry.local_id,
        server_id=entry.server_id,
        status=entry.status,
        reason=entry.reason,
        attempt=entry.attempt_count,
        error_code=entry.last_error_code,
        delay_seconds=delay_seconds,
        detail=detail,
    )


class Events:
    """Delivers events to listeners, in the order of the commits, never inside a transaction.

    Whichever thread has just committed delivers all that waits. A listener may use the queue: what
    it causes is delivered after it has returned. One that raises is logged, and the others hear the
    event all the same.
    """

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        """Start with these listeners."""
        self._listeners = list(listeners)
        self._waiting: deque[Event] = deque()
        self._delivering = Lock()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener and return what takes it off again."""
        self._listeners = [*self._listeners, listener]

        def unsubscribe() -> None:
            self._listeners = [kept for kept in self._listeners if kept is not listener]

        return unsubscribe

    @property
    def listening(self) -> bool:
        """Whether anybody would hear an event."""
        return bool(self._listeners)

    def put(self, events: Iterable[Event]) -> None:
        """Take events for delivery. To be called where the order of commits is certain."""
        self._waiting.extend(events)

    def deliver(self) -> None:
        """Tell the listeners what waits, unless another thread is at it: then that one does."""
        # Looked at again after the lock is free: an event put in between must not stay.
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    self._tell(self._waiting.popleft())
            finally:
                self._delivering.release()

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - the app's own code may raise anything
                _log.exception("a listener failed on the event %s", event.kind)
