"""Events about the queue, delivered after the commit. They never hold a payload or a token.

An app gets them by a function that is called with each, or by an iterator that waits for the next.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from threading import Condition, Lock
from typing import Final, Protocol, Self, TypedDict

import msgspec

from onceward_outbox.entry import Reason, Status
from onceward_protocol.operation import Operation

_MAX_WAITING: Final = 10_000
"""Events kept for a slow reader; beyond that the oldest are dropped."""

_log = logging.getLogger(__name__)


class EventKind(StrEnum):
    """Kind of an event."""

    # An entry was queued.
    ENQUEUED = "enqueued"
    MERGED = "merged"
    """A later change was merged into this entry before it was sent."""
    # A drain has taken an entry to send it.
    CLAIMED = "claimed"
    SENT = "sent"
    """A response came, or the request may have reached the server. Emitted by the drain."""
    # The server has done it.
    SUCCEEDED = "succeeded"
    # It will be sent again later.
    RETRYING = "retrying"
    RELEASED = "released"
    """Its claim was released, or its lease expired."""
    # It will not be sent again by itself.
    FAILED = "failed"
    # The entity was changed on the server.
    CONFLICT = "conflict"
    # A conflict has ended.
    RESOLVED = "resolved"
    # A person has changed the payload.
    EDITED = "edited"
    # A person has put it back into the queue.
    RETRIED = "retried"
    # It is back in the queue because what it waits for may happen again.
    REVIVED = "revived"
    SERVER_REWOUND = "server_rewound"
    """The server has lost what it had acknowledged, e.g. by the restore of a backup: it expects a
    number of a strict sequence again."""
    # It is older than the server accepts.
    EXPIRED = "expired"
    EXPIRING = "expiring"
    """Entries of a user that will expire within two days. At most once a day."""
    # It will never be sent.
    DISCARDED = "discarded"
    PAUSED = "paused"
    """The drain waits, for example for a new token. Emitted by the drain."""
    ATTESTATION = "attestation"
    """The server does not accept the attestation of one entry. Emitted by the drain."""
    HELD = "held"
    """The server is down or overloaded: nothing is sent to it, or to one endpoint, for a while."""
    # The server responds again after that.
    RESUMED = "resumed"
    DRAINED = "drained"
    """Emitted by the drain at its end, also if nothing was sent: ``detail`` is its ``Ended``."""
    PRUNING = "pruning"
    """It will be deleted after ``delay_seconds``, unless a person retries, edits or resolves it."""
    # Old entries were deleted.
    PRUNED = "pruned"
    # All entries of a user were deleted.
    PURGED = "purged"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One event. Entry fields are None where it is about more than one entry."""

    # What happened.
    kind: EventKind
    # When, by the device's clock.
    at: datetime
    # Whose queue it is about.
    user_id: str | None = None
    # The entry it is about.
    entry_id: str | None = None
    # The kind of entity.
    entity_type: str | None = None
    # The path that it is sent to.
    endpoint: str | None = None
    # What the entry does.
    operation: Operation | None = None
    # The device's id of the entity.
    local_id: str | None = None
    # The server's id of the entity.
    server_id: str | int | None = None
    # After the change.
    status: Status | None = None
    # Why it happened.
    reason: Reason | None = None
    # The number of the attempt.
    attempt: int | None = None
    # HTTP status of the response; None without one.
    http_status: int | None = None
    # The server's code in the response.
    code: str | None = None
    # For `failed`: the class of cause, by the profile's ``causes``.
    cause: str | None = None
    # Seconds since it was queued, as far as is certain.
    age_seconds: float | None = None
    # For `retrying`, `held`, `expiring` and `pruning`: how long until that, or the first of them.
    delay_seconds: float | None = None
    # For `expiring`, `pruning`, `pruned`, `purged` and `drained`: how many entries.
    count: int | None = None
    # For `expiring`: how many by entity type.
    counts: Mapping[str, int] | None = None
    # A few words for a person; never a payload.
    detail: str | None = None


class EventFacts(TypedDict, total=False):
    """Details of an event about an entry."""

    http_status: int | None
    code: str | None
    delay_seconds: float | None
    detail: str | None


# A function that is called with every event.
Listener = Callable[[Event], None]


class Events:
    """Delivers events to listeners, in the order of the commits, never inside a transaction.

    The committing thread delivers all queued events. A listener may use the queue: events that it
    causes are delivered after it has returned. An exception of a listener is logged, and the others
    still get the event.
    """

    def __init__(self, listeners: Iterable[Listener] = ()) -> None:
        # Each with what is called when the queue is closed.
        self._listeners: list[tuple[Listener, Callable[[], object] | None]] = [
            (listener, None) for listener in listeners
        ]
        self._waiting: deque[Event] = deque()
        self._delivering = Lock()

    def subscribe(
        self, listener: Listener, at_close: Callable[[], object] | None = None
    ) -> Callable[[], None]:
        """Add a listener and return a function that removes it."""
        added = (listener, at_close)
        self._listeners = [*self._listeners, added]

        def unsubscribe() -> None:
            self._listeners = [kept for kept in self._listeners if kept is not added]

        return unsubscribe

    def close(self) -> None:
        """Tell the listeners that want to know that no more events will come."""
        for _, at_close in self._listeners:
            if at_close is not None:
                at_close()

    @property
    def has_listeners(self) -> bool:
        """Whether any listener is subscribed."""
        return bool(self._listeners)

    def put(self, events: Iterable[Event]) -> None:
        """Queue events for delivery. Call it while the order of commits is certain."""
        self._waiting.extend(events)

    def deliver(self) -> None:
        """Deliver queued events, unless another thread is doing so: it delivers these too."""
        # Checked again after the lock is free: an event put in between must not stay.
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    self._call_listeners(self._waiting.popleft())
            finally:
                self._delivering.release()

    def _call_listeners(self, event: Event) -> None:
        for listener, _ in self._listeners:
            try:
                listener(event)
            except Exception:  # noqa: BLE001 - the app's own code may raise anything
                _log.exception("a listener failed on the event %s", event.kind)


class _Publisher(Protocol):
    def subscribe(
        self, listener: Listener, at_close: Callable[[], object]
    ) -> Callable[[], None]: ...


class EventStream:
    """Events as an iterator that waits; it ends when the stream or the outbox is closed."""

    def __init__(self, publisher: _Publisher) -> None:
        self._waiting: deque[Event] = deque(maxlen=_MAX_WAITING)
        self._changed = Condition()
        # True after ``close``; events that have arrived can still be read.
        self.is_closed = False
        self._unsubscribe = publisher.subscribe(self._on_event, self.close)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_closed)
            if not self._waiting:
                raise StopIteration
            return self._waiting.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; events that have arrived can still be read."""
        self._unsubscribe()
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _on_event(self, event: Event) -> None:
        with self._changed:
            self._waiting.append(event)
            self._changed.notify()


class AsyncEventStream:
    """Events as an asynchronous iterator; it ends when the stream or the outbox is closed.

    It listens from its construction on, in the running loop. Used with ``async with``, it stops
    listening when a loop over it is left early.
    """

    def __init__(self, publisher: _Publisher) -> None:
        self._waiting: deque[Event] = deque(maxlen=_MAX_WAITING)
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        # True after ``close``; events that have arrived can still be read.
        self.is_closed = False
        self._unsubscribe = publisher.subscribe(self._on_event, self.close)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self.is_closed:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; events that have arrived can still be read. May be called anywhere."""
        self._unsubscribe()
        self._call_in_loop(self._end)

    def _on_event(self, event: Event) -> None:
        self._call_in_loop(self._add, event)

    def _call_in_loop(self, change: Callable[..., None], *args: Event) -> None:
        # Events arrive on the threads that commit; everything else happens in the loop.
        with suppress(RuntimeError):  # the loop has been closed, with all that waited
            self._loop.call_soon_threadsafe(change, *args)

    def _add(self, event: Event) -> None:
        self._waiting.append(event)
        self._changed.set()

    def _end(self) -> None:
        self.is_closed = True
        self._changed.set()
