"""A walker's events as a stream of server-sent events."""

import json
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Final

from holdfast.errors import StoreUnavailableError
from holdfast.ports import Clock, Store
from holdfast_services.streams import (
    RECONNECT_MILLISECONDS,
    StreamNotifier,
    server_is_stopping,
    wait_for_wake_up,
)
from holdfast_services.walk.events import WalkerEvent, list_events

__all__ = ["StreamNotifier", "server_is_stopping", "stream_events"]

_PAGE: Final = 100


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
    yield b"retry: %d\n\n" % RECONNECT_MILLISECONDS
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
                await wait_for_wake_up(wake_up, min(poll_seconds, keep_alive_seconds), is_over)


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
