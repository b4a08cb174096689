"""Repeats a request and records how long each took."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

__all__ = ["Latencies", "measure"]


@dataclass(slots=True)
class Latencies:
    """Seconds of each request, and what they got."""

    seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def percentile(self, percent: float) -> float:
        """Return the latency that this share of the requests did not exceed, in milliseconds."""
        ordered = sorted(self.seconds)
        if not ordered:
            return float("nan")
        return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def __str__(self) -> str:
        return (
            f"p50 {self.percentile(50):.1f} ms, p99 {self.percentile(99):.1f} ms, "
            f"n {len(self.seconds)}, {dict(self.statuses)}"
        )


async def measure(
    send: Callable[[], Awaitable[int]], *, seconds: float, pause: float = 0.01
) -> Latencies:
    """Send one request after another for some time; ``send`` returns the status."""
    found = Latencies()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        status = await send()
        found.seconds.append(time.perf_counter() - started)
        found.statuses[status] += 1
        await asyncio.sleep(pause)
    return found
