"""Moving windows in a small file: exact for all processes of one machine, without a server for it.

What is counted need not outlive the machine, so nothing waits for a disk. A process that is killed
leaves the file whole, since SQLite writes ahead.
"""

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from holdfast.ports import Clock
from holdfast.stores.busy_retry import until_free
from holdfast.stores.sqlite.rows import is_busy

__all__ = ["FileWindows"]

# A hit takes less than a millisecond: this is only ever waited for a process stopped in one.
_BUSY_SECONDS: Final = 0.4

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS hits (name TEXT NOT NULL, until REAL NOT NULL)",
    "CREATE INDEX IF NOT EXISTS hits_by_name ON hits (name, until)",
    "CREATE INDEX IF NOT EXISTS hits_by_end ON hits (until)",
)
_FORGET: Final = "DELETE FROM hits WHERE until <= ?"
# The clock is the machine's, and begins anew with it: what lies beyond a whole window was left by
# an earlier start and counts for nothing.
_COUNT: Final = "SELECT count(*), min(until) FROM hits WHERE name = ? AND until <= ?"
_HIT: Final = "INSERT INTO hits (name, until) VALUES (?, ?)"


class FileWindows:
    """Counts on a thread of its own, which may wait for the other processes."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Take the file; it is made at the first hit."""
        self._path = path
        self._clock = clock
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, "holdfast-rate-limits")

    async def hit(self, name: str, amount: int, span_seconds: float) -> float | None:
        """Count one hit; return None if it fits the window, else how long to stay away."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._hit, name, amount, span_seconds)

    async def close(self) -> None:
        """Let go of the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _hit(self, name: str, amount: int, span_seconds: float) -> float | None:
        if self._db is None:
            self._db = self._connect()
        with self._db as db:
            db.execute("BEGIN IMMEDIATE")
            now = self._clock.monotonic()  # after the wait: so the order of hits is that of times
            db.execute(_FORGET, (now,))
            count, first_ends = db.execute(_COUNT, (name, now + span_seconds)).fetchone()
            if count >= amount:
                return float(first_ends - now)
            db.execute(_HIT, (name, now + span_seconds))
        return None

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._path, timeout=_BUSY_SECONDS, isolation_level=None)
        try:
            until_free(
                lambda: db.execute("PRAGMA journal_mode=WAL"),
                is_busy=is_busy,
                seconds=_BUSY_SECONDS,
            )
            db.execute("PRAGMA synchronous=OFF")
            for statement in _SCHEMA:
                db.execute(statement)
        except BaseException:
            db.close()
            raise
        return db

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
