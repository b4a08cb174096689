"""Events as an iterator that waits for the next one."""

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition
from typing import Final, Protocol, Self

from onceward_outbox.events import Event, Listener

__all__ = ["EventStream", "Publisher"]

_MAX_EVENTS: Final = 10_000
"""Events kept for a slow reader; beyond that the oldest are dropped."""


class Publisher(Protocol):
    """Where events come from: a queue, or what one user sees of it."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event; returns a function that unsubscribes it."""


class EventStream:
    """Events as an iterator that waits; it ends when the stream or the outbox is closed."""

    def __init__(self, publisher: Publisher) -> None:
        self._waiting: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._changed = Condition()
        # True after ``close``; events that have arrived can still be read.
        self.is_closed = False
        self._unsubscribe = publisher.subscribe(self._on_event)

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
