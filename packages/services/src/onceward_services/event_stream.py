"""Streams of server-sent events, the same for all services."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, TypeVar

from fastapi.responses import StreamingResponse

from onceward import Principal
from onceward.errors import RequestError, StoreUnavailableError
from onceward.ports import Clock
from onceward_services.streams import RECONNECT_MILLISECONDS, StreamNotifier, wait_for_wake_up

__all__ = [
    "EVENT_STREAM",
    "KEEP_ALIVE_SECONDS",
    "POLL_SECONDS",
    "EventStream",
    "Events",
    "stream_events",
    "token_expiry",
    "wants_stream",
]

EVENT_STREAM: Final = "text/event-stream"
# How often events of other processes are looked for; those of this one wake the stream.
POLL_SECONDS: Final = 1.0
# After this time without an event, a comment tells proxies that the stream is alive.
KEEP_ALIVE_SECONDS: Final = 15.0

Position = TypeVar("Position")


class Events(NamedTuple):
    """Events after a position: encoded events with theirs."""

    found: Sequence[tuple[Any, bytes]]
    # True if there may be more.
    has_more: bool


class EventStream(StreamingResponse):
    """A stream that is counted until it ends for any reason."""

    def __init__(self, close: Callable[[], None], content: AsyncIterator[bytes]) -> None:
        # Proxies must neither cache nor buffer the stream.
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type=EVENT_STREAM, headers=headers)
        self._close = close

    async def __call__(self, *asgi: Any) -> None:
        """Send the stream, and close it."""
        try:
            await super().__call__(*asgi)
        finally:
            self._close()


async def stream_events(
    read: Callable[[Position], Awaitable[Events]],
    *,
    after: Position,
    tenant: str,
    notifier: StreamNotifier,
    clock: Clock,
    until: datetime | None,
    is_stopping: Callable[[], bool],
) -> AsyncIterator[bytes]:
    """Yield what ``read`` finds after a position, until the client disconnects.

    Ends when the token expires (``until``), the server stops, the store is unavailable or the
    position is refused. A client that reconnects with ``Last-Event-ID`` misses nothing.
    """
    yield b"retry: %d\n\n" % RECONNECT_MILLISECONDS
    sent_at = clock.monotonic()

    def is_over() -> bool:
        return is_stopping() or (until is not None and clock.now() >= until)

    with notifier.listen(tenant) as wake_up:
        while not is_over():
            wake_up.clear()  # before reading, so that an event added meanwhile sets it again
            try:
                events = await read(after)
            except (StoreUnavailableError, RequestError):
                return
            for position, text in events.found:
                yield text
                after = position
            if events.found:
                sent_at = clock.monotonic()
            elif clock.monotonic() - sent_at >= KEEP_ALIVE_SECONDS:
                yield b": still here\n\n"
                sent_at = clock.monotonic()
            if not events.has_more:
                await wait_for_wake_up(wake_up, POLL_SECONDS, is_over)


def wants_stream(accept: str) -> bool:
    """Return whether an Accept header names the media type of streams."""
    kinds = (part.partition(";")[0].strip().lower() for part in accept.split(","))
    return EVENT_STREAM in kinds


def token_expiry(caller: Principal) -> datetime | None:
    """Return when the token expires, which also ends the stream."""
    expires = caller.claims.get("exp")
    return None if expires is None else datetime.fromtimestamp(float(expires), UTC)
