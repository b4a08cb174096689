"""Wait until an entry has an outcome: it succeeded, or is left to a person, or will never be sent.

Events wake the wait. Other processes cause no events here, so the file is read every half second.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Event as Flag
from time import monotonic
from typing import Final, Protocol

from onceward_outbox.entry import Entry, Status
from onceward_outbox.events import Event, Listener

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
