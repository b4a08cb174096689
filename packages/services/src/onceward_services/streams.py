"""Wakes requests that wait for something new: event streams and long polls of all services."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from onceward import Principal
from onceward.errors import QuotaExceededError
from onceward.frameworks.asgi import server_is_stopping

__all__ = ["RECONNECT_MILLISECONDS", "StreamNotifier", "server_is_stopping", "wait_for_wake_up"]

# The reconnection delay of browsers after a stream has ended.
RECONNECT_MILLISECONDS: Final = 2000
# How often a waiting request checks whether to end: a stopping server waits at most this long.
_CHECK_SECONDS: Final = 1.0


class StreamNotifier:
    """Wakes the waiting requests of this process when one of its requests has committed a change.

    Only an optimization: they find the changes of other processes by polling.
    """

    def __init__(self) -> None:
        self._listening: dict[str, set[asyncio.Event]] = {}
        self._streams: Counter[tuple[str, str]] = Counter()

    def notify(self, tenant: str) -> None:
        """Wake a tenant's waiting requests."""
        for event in self._listening.get(tenant, ()):
            event.set()

    def open_stream(
        self, principal: Principal, most: int, what: str = "event streams"
    ) -> Callable[[], None]:
        """Count a stream of a principal; returns what ends it. 0 is no limit.

        Raises ``QuotaExceededError`` for one more than ``most`` in this process.
        """
        name = (principal.tenant, principal.actor)
        if most and self._streams[name] >= most:
            raise QuotaExceededError(
                f"you have {most} {what} open, which is the maximum: close one first",
                details={"resource": "streams", "limit": most},
                retry_after_seconds=RECONNECT_MILLISECONDS / 1000,
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
        """Yield an asyncio event that is set when the tenant has something new."""
        event = asyncio.Event()
        events = self._listening.setdefault(tenant, set())
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events and self._listening.get(tenant) is events:
                del self._listening[tenant]


async def wait_for_wake_up(
    wake_up: asyncio.Event, seconds: float, is_over: Callable[[], bool]
) -> None:
    """Wait for the event or the timeout; check every second whether the request should end."""
    while seconds > 0 and not wake_up.is_set() and not is_over():
        with suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, _CHECK_SECONDS)):
                await wake_up.wait()
        seconds -= _CHECK_SECONDS
