"""Rate limits by moving windows. Protection, not truth: when the counter is away, requests pass."""

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from inspect import isawaitable
from pathlib import Path
from typing import Any, Final

import limits
from limits.aio.strategies import MovingWindowRateLimiter
from limits.errors import ConfigurationError as LimitsConfigurationError
from limits.storage import storage_from_string

from holdfast.clock import SystemClock
from holdfast.errors import ConfigurationError
from holdfast.ports import Clock
from holdfast.server.sqlite_rate_limit import FileWindows

__all__ = ["LimitsRateLimiter", "check_limit"]

_IN_MEMORY: Final = frozenset({"memory", "async+memory"})
# A counter on the same network answers in a millisecond; waiting longer protects nobody.
_TIMEOUT_SECONDS: Final = 0.5
# A file is never away: longer only while another process is stopped in the middle of a hit.
_FILE_SECONDS: Final = 2.0
# After a failure the counter is left alone for this long, so an outage costs one wait, not all.
_PAUSE_SECONDS: Final = 5.0

_log = logging.getLogger("holdfast.rate_limits")


def check_limit(text: str) -> None:
    """Raise ``ConfigurationError`` unless the text is a limit such as ``50/minute``."""
    _parse(text)


class LimitsRateLimiter:
    """Counts requests per tenant and endpoint: in this process or, for several, where all look."""

    def __init__(self, storage_url: str = "async+memory://", *, clock: Clock | None = None) -> None:
        """Count in memory, in a file, or in Redis.

        ``file:///path`` is for the processes of one machine. Redis, for those of several, is
        ``async+redis://…`` (``redis://…`` is the same).
        """
        self._clock: Clock = clock or SystemClock()
        scheme, _, place = storage_url.partition("://")
        self._windows: _MemoryWindows | FileWindows | _RedisWindows
        if scheme in _IN_MEMORY:
            self._windows = _MemoryWindows(self._clock)
        elif scheme == "file":
            self._windows = FileWindows(Path(place), self._clock)
        else:
            self._windows = _RedisWindows(storage_url)
        self._paused_until: float | None = None

    def check(self, limit: str) -> None:
        """Raise ``ConfigurationError`` if this is not a limit such as ``50/minute``."""
        check_limit(limit)

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count one request; return None if it may pass, else how long to stay away."""
        parsed = _parse(limit)
        # The length keeps tenant "a/b" on "c" apart from tenant "a" on "b/c".
        name = f"{len(tenant)}:{tenant}/{endpoint}"
        windows = self._windows
        if isinstance(windows, _MemoryWindows):
            waits = [windows.hit(one, name) for one in parsed]
        else:
            if self._paused_until is not None:
                if self._clock.monotonic() < self._paused_until:
                    return None
                self._paused_until = None
            try:
                is_file = isinstance(windows, FileWindows)
                async with asyncio.timeout(_FILE_SECONDS if is_file else _TIMEOUT_SECONDS):
                    waits = [await _hit(windows, one, name) for one in parsed]
            except Exception as error:  # noqa: BLE001 - whatever the client raises, requests pass
                self._paused_until = self._clock.monotonic() + _PAUSE_SECONDS
                _log.warning(
                    "the rate limit counter does not answer (%s); requests pass uncounted for %d s",
                    type(error).__name__,
                    _PAUSE_SECONDS,
                )
                return None
        return max((wait for wait in waits if wait is not None), default=None)

    async def close(self) -> None:
        """Let go of the connection."""
        if not isinstance(self._windows, _MemoryWindows):
            await self._windows.close()


class _MemoryWindows:
    """Moving windows in this process.

    Not the memory storage of ``limits``: after each hit that one walks all keys with a hop to a
    thread for each (25 to 90 µs a hit measured, against 6 to 9 here), and it counts on the wall
    clock, which can be set back.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, str], tuple[float, deque[float]]] = {}
        self._hits_until_sweep = 1024

    def hit(self, limit: "_Limit", name: str) -> float | None:
        now = self._clock.monotonic()
        key = (limit.text, name)
        self._sweep_at_times(now)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = (limit.span_seconds, deque(maxlen=limit.amount))
        span, times = window
        if len(times) < limit.amount or times[0] + span <= now:
            times.append(now)  # pushes the oldest out when full
            return None
        return times[0] + span - now

    def _sweep_at_times(self, now: float) -> None:
        """Drop windows nobody has hit for their whole span; its cost is spread over the hits."""
        self._hits_until_sweep -= 1
        if self._hits_until_sweep:
            return
        self._windows = {
            key: (span, times)
            for key, (span, times) in self._windows.items()
            if times and times[-1] + span > now
        }
        self._hits_until_sweep = max(1024, len(self._windows))


class _RedisWindows:
    """Moving windows of ``limits`` in Redis: one script, atomic across all processes."""

    def __init__(self, storage_url: str) -> None:
        url = storage_url if storage_url.startswith("async+") else f"async+{storage_url}"
        options: dict[str, Any] = {}
        if url.startswith("async+redis"):
            options["implementation"] = "redispy"
        try:
            self._storage: Any = storage_from_string(url, **options)
            self._strategy = MovingWindowRateLimiter(self._storage)
        except (LimitsConfigurationError, NotImplementedError, ValueError, TypeError):
            # Not its message: it repeats the URL, which may hold a password.
            scheme = storage_url.partition("://")[0] if "://" in storage_url else "?"
            raise ConfigurationError(
                f'rate limits cannot be counted in "{scheme}://…": use async+memory://, '
                'file:///PATH or async+redis://HOST:PORT (pip install "holdfast[redis]")'
            ) from None

    async def hit(self, limit: "_Limit", name: str) -> float | None:
        if await self._strategy.hit(limit.item, name):
            return None
        stats = await self._strategy.get_window_stats(limit.item, name)
        return max(0.0, stats.reset_time - time.time())

    async def close(self) -> None:
        client = getattr(getattr(self._storage, "bridge", None), "storage", None)
        aclose = getattr(client, "aclose", None)
        closing = None if aclose is None else aclose()
        if isawaitable(closing):
            await closing


@dataclass(frozen=True, slots=True)
class _Limit:
    """One limit, with what is asked of it on each request worked out before."""

    item: limits.RateLimitItem
    text: str
    amount: int
    span_seconds: float


async def _hit(windows: "FileWindows | _RedisWindows", limit: _Limit, name: str) -> float | None:
    if isinstance(windows, FileWindows):
        return await windows.hit(f"{limit.text} {name}", limit.amount, limit.span_seconds)
    return await windows.hit(limit, name)


@lru_cache(maxsize=256)
def _parse(text: str) -> tuple[_Limit, ...]:
    try:
        items = limits.parse_many(text)
    except ValueError:
        items = []
    if not items or any(item.amount < 1 for item in items):
        raise ConfigurationError(
            f'"{text}" is not a rate limit; write for example 50/minute or 5/second;100/hour'
        )
    return tuple(_Limit(item, repr(item), item.amount, item.get_expiry()) for item in items)
