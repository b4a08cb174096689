"""A walker's events as they happen: server-sent events over one long answer to a GET."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from holdfast.errors import StoreUnavailableError
from holdfast.ports import Clock, Store
from holdfast_services.walk.events import WalkerEvent, list_events

__all__ = ["StreamNotifier", "server_is_stopping", "stream_events"]

_PAGE: Final = 100
# What a browser waits before it comes back after a stream has ended.
_COME_BACK_MILLISECONDS: Final = 2000
# How long a server that wants to end waits for a stream at most.
_LOOK_UP_SECONDS: Final = 1.0


class StreamNotifier:
    """Wakes the streams of this process when one of its requests has added an event.

    Never the truth: what another process adds is found by looking, once in a while.
    """

    def __init__(self) -> None:
        """Nobody listens yet."""
        self._listening: dict[str, set[asyncio.Event]] = {}

    def notify(self, tenant: str) -> None:
        """Wake a walker's streams."""
        for notifier in self._listening.get(tenant, ()):
            notifier.set()

    @contextmanager
    def listen(self, tenant: str) -> Iterator[asyncio.Event]:
        """Give a bell that rings with the walker's events."""
        notifier = asyncio.Event()
        notifiers = self._listening.setdefault(tenant, set())
        notifiers.add(notifier)
        try:
            yield notifier
        finally:
            notifiers.discard(notifier)
            if not notifiers and self._listening.get(tenant) is notifiers:
                del self._listening[tenant]


async def stream_events(
    store: Store,
    tenant: str,
    *,
    after: int,
    notifiers: StreamNotifier,
    clock: Clock,
    until: datetime | None,
    poll_seconds: float,
    keep_alive_seconds: float,
    is_stopping: Callable[[], bool],
) -> AsyncIterator[bytes]:
    """Give what comes after an event, for as long as there is someone to read it.

    Ends with the token (``until``), with the server, and with the store: whoever wants more comes
    back with ``Last-Event-ID`` and misses nothing.
    """
    yield b"retry: %d\n\n" % _COME_BACK_MILLISECONDS
    sent_at = clock.monotonic()

    def is_over() -> bool:
        return is_stopping() or (until is not None and clock.now() >= until)

    with notifiers.listen(tenant) as notifier:
        while not is_over():
            notifier.clear()  # before looking: what is added from here on rings again
            try:
                events = await list_events(store, tenant, after=after, limit=_PAGE)
            except StoreUnavailableError:
                return
            for event in events:
                yield _encode_event(event)
                after = event.seq
            if events:
                sent_at = clock.monotonic()
            elif clock.monotonic() - sent_at >= keep_alive_seconds:
                yield b": still here\n\n"
                sent_at = clock.monotonic()
            if len(events) < _PAGE:
                await _wait_for_events(notifier, min(poll_seconds, keep_alive_seconds), is_over)


async def _wait_for_events(
    notifier: asyncio.Event, seconds: float, is_over: Callable[[], bool]
) -> None:
    """Wait for the bell, for so long at most; look up once a second whether it is over."""
    while seconds > 0 and not notifier.is_set() and not is_over():
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, _LOOK_UP_SECONDS)):
                await notifier.wait()
        seconds -= _LOOK_UP_SECONDS


def server_is_stopping() -> bool:
    """Tell whether the server wants to end.

    Uvicorn waits for its answers before it tells the app of the end, and a stream never completes
    by itself: the handler of the signal is the one place where the wish shows.
    """
    server: Any = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return bool(getattr(server, "should_exit", False))


def _encode_event(event: WalkerEvent) -> bytes:
    # JSON on one line: a line break would end the field.
    data = json.dumps(
        {
            "id": event.seq,
            "type": event.type,
            "data": event.data,
            "createdAt": event.created_at.isoformat().replace("+00:00", "Z"),
        },
        separators=(",", ":"),
    )
    return f"id: {event.seq}\nevent: {event.type}\ndata: {data}\n\n".encode()
