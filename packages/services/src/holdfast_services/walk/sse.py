"""A walker's events as a stream of server-sent events."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from holdfast import Principal
from holdfast.errors import QuotaExceededError, StoreUnavailableError
from holdfast.ports import Clock, Store
from holdfast_services.walk.events import WalkerEvent, list_events

__all__ = ["StreamNotifier", "server_is_stopping", "stream_events"]

_PAGE: Final = 100
# The reconnection delay of browsers after a stream has ended.
_RECONNECT_MILLISECONDS: Final = 2000
# How often a stream checks whether to end: a stopping server waits at most this long.
_CHECK_SECONDS: Final = 1.0


class StreamNotifier:
    """Wakes the streams of this process when one of its requests has added an event.

    Only an optimization: streams find the events of other processes by polling.
    """

    def __init__(self) -> None:
        self._listening: dict[str, set[asyncio.Event]] = {}
        self._streams: Counter[tuple[str, str]] = Counter()

    def notify(self, tenant: str) -> None:
        """Wake a walker's streams."""
        for event in self._listening.get(tenant, ()):
            event.set()

    def open_stream(self, principal: Principal, most: int) -> Callable[[], None]:
        """Count a stream of a principal; returns what ends it. 0 is no limit.

        Raises ``QuotaExceededError`` for one more than ``most`` in this process.
        """
        name = (principal.tenant, principal.actor)
        if most and self._streams[name] >= most:
            raise QuotaExceededError(
                f"you have {most} event streams open, which is the maximum: close one first",
                details={"resource": "streams", "limit": most},
                retry_after_seconds=_RECONNECT_MILLISECONDS / 1000,
            )
        self._streams[name] += 1
        is_open = True

        def close() -> None:
            nonlocal is_open
            if is_open:
                is_open = False
                self._streams[name] -= 1
                if not self._streams[name]:
                    del self._streams[name]

        return close

    @contextmanager
    def listen(self, tenant: str) -> Iterator[asyncio.Event]:
        """Yield an asyncio event that is set when the walker has new events."""
        event = asyncio.Event()
        events = self._listening.setdefault(tenant, set())
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events and self._listening.get(tenant) is events:
                del self._listening[tenant]


async def stream_events(
    store: Store,
    tenant: str,
    *,
    after: int,
    notifier: StreamNotifier,
    clock: Clock,
    until: datetime | None,
    poll_seconds: float,
    keep_alive_seconds: float,
    is_stopping: Callable[[], bool],
) -> AsyncIterator[bytes]:
    """Yield the events after one, until the client disconnects.

    Ends when the token expires (``until``), the server stops or the store is unavailable.
    A client that reconnects with ``Last-Event-ID`` misses nothing.
    """
    yield b"retry: %d\n\n" % _RECONNECT_MILLISECONDS
    sent_at = clock.monotonic()

    def is_over() -> bool:
        return is_stopping() or (until is not None and clock.now() >= until)

    with notifier.listen(tenant) as wake_up:
        while not is_over():
            wake_up.clear()  # before reading, so that an event added meanwhile sets it again
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
                await _wait_for_events(wake_up, min(poll_seconds, keep_alive_seconds), is_over)


async def _wait_for_events(
    wake_up: asyncio.Event, seconds: float, is_over: Callable[[], bool]
) -> None:
    """Wait for new events or the timeout; check every second whether the stream should end."""
    while seconds > 0 and not wake_up.is_set() and not is_over():
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, _CHECK_SECONDS)):
                await wake_up.wait()
        seconds -= _CHECK_SECONDS


def server_is_stopping() -> bool:
    """Return whether the server is shutting down.

    Uvicorn waits for open responses before it runs the lifespan shutdown, and a stream never ends
    without a reason. Only the signal handler's server object shows that a shutdown has begun.
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
