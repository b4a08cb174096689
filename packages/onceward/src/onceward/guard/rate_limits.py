"""Rate limits with moving windows, counted in memory, in a file or in Redis.

A limit protects the server; it is no guarantee: while the counter fails, requests pass uncounted.

Limits are parsed by the ``limits`` library, which also counts in Redis. Memory and file are our
own: the memory storage of ``limits`` (5.8) reads the wall clock, which can be set back, and it has
no storage that the processes of one machine can share without a server.
"""

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from inspect import isawaitable
from math import ceil
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from onceward.stores.errors import is_sqlite_busy
from onceward_protocol.extras import needs_extra

with needs_extra("limits"):
    import limits
    from limits.aio.strategies import MovingWindowRateLimiter
    from limits.errors import ConfigurationError as LimitsConfigurationError
    from limits.storage import storage_from_string

from onceward.errors import ConfigurationError
from onceward.ports import Clock
from onceward_protocol.clock import SystemClock
from onceward_protocol.storage.busy_retry import until_free
from onceward_protocol.storage.private_files import create_database_file

__all__ = ["Counted", "LimitsRateLimiter", "check_limit"]

_IN_MEMORY: Final = frozenset({"memory", "async+memory"})
# Redis on the same network responds within a millisecond; waiting longer protects nothing.
_TIMEOUT_SECONDS: Final = 0.5
# A file takes longer only while another process is stopped in the middle of a hit.
_FILE_TIMEOUT_SECONDS: Final = 2.0
_FILE_BUSY_SECONDS: Final = 0.4
# After a failure the counter is not used for this long, so that an outage costs one wait.
_PAUSE_SECONDS: Final = 5.0
_MIN_HITS_BETWEEN_SWEEPS: Final = 1024

_log = logging.getLogger("onceward.rate_limits")


def check_limit(text: str) -> None:
    """Raise ``ConfigurationError`` unless the text is a limit such as ``50/minute``."""
    _parse(text)


class Counted:
    """A counted request."""

    __slots__ = ("_hits", "_parsed", "wait_seconds")

    def __init__(self, parsed: tuple["_Limit", ...], hits: Sequence["_Hit"]) -> None:
        self._parsed = parsed
        self._hits = hits
        # None if the request may pass, else the seconds until it may.
        self.wait_seconds: float | None = None
        for hit in hits:
            if hit.wait_seconds is not None:
                self.wait_seconds = max(hit.wait_seconds, self.wait_seconds or 0.0)

    @property
    def headers(self) -> tuple[tuple[bytes, bytes], ...]:
        """``RateLimit-Policy`` and ``RateLimit``; empty while the counter fails.

        Those of draft-ietf-httpapi-ratelimit-headers: lists of structured fields (RFC 9651), with
        a quoted name for each limit.
        """
        if not self._hits:
            return ()
        states = ", ".join(
            [
                f'"{one.name}";r={max(hit.remaining, 0)};t={max(ceil(hit.reset_seconds), 0)}'
                for one, hit in zip(self._parsed, self._hits, strict=True)
            ]
        )
        policy = b", ".join([one.policy for one in self._parsed])
        return (b"ratelimit-policy", policy), (b"ratelimit", states.encode())


_UNCOUNTED: Final = Counted((), ())


class LimitsRateLimiter:
    """Counts requests per tenant and endpoint."""

    def __init__(self, storage_url: str = "async+memory://", *, clock: Clock | None = None) -> None:
        """Count in memory, in a file, or in Redis.

        Memory is for one process, ``file:///path`` for the processes of one machine, and
        ``redis://…`` (or ``async+redis://…``) for those of several machines.
        """
        self._clock: Clock = clock or SystemClock()
        scheme, _, path = storage_url.partition("://")
        self._windows: _Windows
        if scheme in _IN_MEMORY:
            self._windows = _MemoryWindows(self._clock)
        elif scheme == "file":
            self._windows = _FileWindows(Path(path), self._clock)
        else:
            self._windows = _RedisWindows(storage_url)
        self._paused_until: float | None = None

    def check(self, limit: str) -> None:
        """Raise ``ConfigurationError`` if this is not a limit such as ``50/minute``."""
        check_limit(limit)

    async def seconds_to_wait(self, limit: str, tenant: str, endpoint: str) -> float | None:
        """Count one request; return None if it may pass, else the seconds until it may."""
        return (await self.count(limit, tenant, endpoint)).wait_seconds

    async def count(self, limit: str, tenant: str, endpoint: str) -> Counted:
        """Count one request; return the wait, and the headers that say how many are left."""
        parsed = _parse(limit)
        # The length keeps tenant "a/b" on "c" apart from tenant "a" on "b/c".
        name = f"{len(tenant)}:{tenant}/{endpoint}"
        if self._paused_until is not None:
            if self._clock.monotonic() < self._paused_until:
                return _UNCOUNTED
            self._paused_until = None
        try:
            async with asyncio.timeout(self._windows.timeout_seconds):
                hits = [await self._windows.hit(one, name) for one in parsed]
        except Exception as error:  # noqa: BLE001 - whatever the storage raises, requests pass
            self._paused_until = self._clock.monotonic() + _PAUSE_SECONDS
            _log.warning(
                "the rate limit counter failed (%s); requests pass uncounted for %d s",
                type(error).__name__,
                _PAUSE_SECONDS,
            )
            return _UNCOUNTED
        return Counted(parsed, hits)

    async def close(self) -> None:
        """Close the file or the connection."""
        await self._windows.close()


@dataclass(frozen=True, slots=True)
class _Limit:
    """One parsed limit."""

    item: limits.RateLimitItem
    text: str
    amount: int
    span_seconds: float
    # In the headers of responses, e.g. ``50-per-minute``.
    name: str
    # Its member of ``RateLimit-Policy``.
    policy: bytes


class _Hit(NamedTuple):
    """A counted request: how long to wait, what is left, and when the oldest hit leaves."""

    wait_seconds: float | None
    remaining: int
    reset_seconds: float


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
    return tuple(map(_limit, items))


def _limit(item: limits.RateLimitItem) -> _Limit:
    span, name = item.get_expiry(), _name(item)
    policy = f'"{name}";q={item.amount};w={ceil(span)}'.encode()
    return _Limit(item, repr(item), item.amount, span, name, policy)


def _name(item: limits.RateLimitItem) -> str:
    several = f"{item.multiples}-" if item.multiples > 1 else ""
    return f"{item.amount}-per-{several}{item.GRANULARITY.name}"


class _Windows(Protocol):
    """Where the hits of moving windows are counted."""

    timeout_seconds: float | None

    async def hit(self, limit: _Limit, name: str) -> _Hit:
        """Count one hit, if it fits the window."""

    async def close(self) -> None: ...


class _MemoryWindows:
    timeout_seconds: float | None = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[tuple[str, str], tuple[float, deque[float]]] = {}
        self._hits_until_sweep = _MIN_HITS_BETWEEN_SWEEPS

    async def hit(self, limit: _Limit, name: str) -> _Hit:
        now = self._clock.monotonic()
        self._sweep_if_due(now)
        key = (limit.text, name)
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = (limit.span_seconds, deque(maxlen=limit.amount))
        span, times = window
        while times and times[0] + span <= now:
            times.popleft()
        if len(times) < limit.amount:
            times.append(now)
            return _Hit(None, limit.amount - len(times), times[0] + span - now)
        wait = times[0] + span - now
        return _Hit(wait, 0, wait)

    def _sweep_if_due(self, now: float) -> None:
        """Drop windows without a hit for their whole span; the cost is spread over the hits."""
        self._hits_until_sweep -= 1
        if self._hits_until_sweep:
            return
        self._windows = {
            key: (span, times)
            for key, (span, times) in self._windows.items()
            if times and times[-1] + span > now
        }
        self._hits_until_sweep = max(_MIN_HITS_BETWEEN_SWEEPS, len(self._windows))

    async def close(self) -> None:
        pass


class _FileWindows:
    """A small SQLite file, used in one thread, which may wait for other processes.

    The counts need not survive a restart of the machine, so nothing is synced to the disk.
    """

    timeout_seconds: float | None = _FILE_TIMEOUT_SECONDS

    _SCHEMA: Final = (
        "CREATE TABLE IF NOT EXISTS hits (name TEXT NOT NULL, until REAL NOT NULL)",
        "CREATE INDEX IF NOT EXISTS hits_by_name ON hits (name, until)",
        "CREATE INDEX IF NOT EXISTS hits_by_end ON hits (until)",
    )
    _FORGET: Final = "DELETE FROM hits WHERE until <= ?"
    # The monotonic clock restarts with the machine: hits that end after a whole window are left
    # over from before the restart and do not count.
    _COUNT: Final = "SELECT count(*), min(until) FROM hits WHERE name = ? AND until <= ?"
    _HIT: Final = "INSERT INTO hits (name, until) VALUES (?, ?)"

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "onceward-rate-limits")

    async def hit(self, limit: _Limit, name: str) -> _Hit:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._hit, limit, f"{limit.text} {name}")

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _hit(self, limit: _Limit, name: str) -> _Hit:
        if self._db is None:
            self._db = self._connect()
        with self._db as db:
            db.execute("BEGIN IMMEDIATE")
            now = self._clock.monotonic()  # after the wait for the lock: hits are in order of time
            db.execute(self._FORGET, (now,))
            window_end = now + limit.span_seconds
            count, first_ends = db.execute(self._COUNT, (name, window_end)).fetchone()
            if count >= limit.amount:
                wait = float(first_ends - now)
                return _Hit(wait, 0, wait)
            db.execute(self._HIT, (name, window_end))
        oldest_ends = window_end if first_ends is None else float(first_ends)
        return _Hit(None, limit.amount - count - 1, oldest_ends - now)

    def _connect(self) -> sqlite3.Connection:
        create_database_file(str(self._path))
        db = sqlite3.connect(self._path, timeout=_FILE_BUSY_SECONDS, isolation_level=None)
        try:
            until_free(
                lambda: db.execute("PRAGMA journal_mode=WAL"),
                is_busy=is_sqlite_busy,
                seconds=_FILE_BUSY_SECONDS,
            )
            db.execute("PRAGMA synchronous=OFF")
            for statement in self._SCHEMA:
                db.execute(statement)
        except BaseException:
            db.close()
            raise
        return db

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


class _RedisWindows:
    """Moving windows of ``limits`` in Redis: one script, atomic across all processes."""

    def __init__(self, storage_url: str) -> None:
        self.timeout_seconds: float | None = _TIMEOUT_SECONDS
        url = storage_url if storage_url.startswith("async+") else f"async+{storage_url}"
        options: dict[str, Any] = {}
        if url.startswith("async+redis"):
            options["implementation"] = "redispy"
        try:
            self._storage: Any = storage_from_string(url, **options)
            self._strategy = MovingWindowRateLimiter(self._storage)
        except (LimitsConfigurationError, NotImplementedError, ValueError, TypeError):
            # Without the original message: it repeats the URL, which may contain a password.
            scheme = storage_url.partition("://")[0] if "://" in storage_url else "?"
            raise ConfigurationError(
                f'rate limits cannot be counted in "{scheme}://…": use async+memory://, '
                'file:///PATH or async+redis://HOST:PORT (pip install "onceward[redis]")'
            ) from None

    async def hit(self, limit: _Limit, name: str) -> _Hit:
        may_pass = await self._strategy.hit(limit.item, name)
        stats = await self._strategy.get_window_stats(limit.item, name)
        reset = max(0.0, stats.reset_time - time.time())
        return _Hit(None if may_pass else reset, stats.remaining if may_pass else 0, reset)

    async def close(self) -> None:
        client = getattr(getattr(self._storage, "bridge", None), "storage", None)
        aclose = getattr(client, "aclose", None)
        closing = None if aclose is None else aclose()
        if isawaitable(closing):
            await closing
