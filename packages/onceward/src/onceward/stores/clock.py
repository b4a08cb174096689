"""The clock by which records expire: that of the database, followed between two readings of it.

Servers with different clocks would treat the same record as expired and as live. SQLite has only
the clock of its machine: there, a time before that of the newest record shows that it is behind.
"""

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final

from onceward.errors import StoreUnavailableError
from onceward.ports import Clock, EpochReading, Store
from onceward_protocol.clock import SystemClock

# From here on the process is not ready, and from there on it refuses to serve and to sweep.
WARN_SECONDS: Final = 60.0
REFUSE_SECONDS: Final = 300.0

_log = logging.getLogger("onceward.stores")


def _elapsed() -> Callable[[], float]:
    """Return seconds that go on while the machine is suspended, where there are such."""
    boot_time = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic if boot_time is None else partial(time.clock_gettime, boot_time)


class StoreClock:
    """The time of the database; until it was read, that of the process. Never raises."""

    def __init__(
        self, process: Clock | None = None, *, elapsed: Callable[[], float] | None = None
    ) -> None:
        """``elapsed`` are seconds that no setting of the ``process`` clock changes."""
        self._process = process or SystemClock()
        self._elapsed = elapsed or _elapsed()
        self.now = self._process.now
        self.monotonic = self._process.monotonic
        # The time of the newest record on SQLite.
        self._newest: datetime | None = None
        # At the last reading.
        self.is_wrong = False

    def learn(self, reading: EpochReading) -> None:
        """Follow the time of a reading. May be called in any thread."""
        if reading.time is not None:
            elapsed = self._elapsed
            shift = reading.time.timestamp() - elapsed()
            self.now = lambda: datetime.fromtimestamp(elapsed() + shift, UTC)
        elif reading.newest is not None:
            self._newest = reading.newest
        else:
            return
        problem = self.problem()
        if problem is not None and not self.is_wrong:
            _log.warning("%s", problem)
        self.is_wrong = problem is not None

    def difference(self) -> float:
        """Return how many seconds the clock of the process is ahead; negative if it is behind."""
        now = self._process.now()
        if self._newest is not None:
            return min(0.0, (now - self._newest).total_seconds())
        return (now - self.now()).total_seconds()

    def problem(self) -> str | None:
        """Return the error message with its remedy, or None."""
        difference = self.difference()
        if abs(difference) <= WARN_SECONDS:
            return None
        side = "ahead of" if difference > 0 else "behind"
        than, more = "the database's", ""
        if self._newest is not None:
            than = "the time of the newest record"
            more = ", or remove that record (onceward keys ls, keys rm) if its time is wrong"
        return (
            f"the clock of this machine is {abs(difference):.0f} seconds {side} {than}: "
            f"correct it{more}"
        )

    def check(self, most: float = REFUSE_SECONDS) -> None:
        """Raise ``StoreUnavailableError`` if the clock of the process is further off."""
        if abs(self.difference()) > most:
            raise StoreUnavailableError(
                str(self.problem()), retry_after_seconds=5.0, is_outage=False, reason="wrong_clock"
            )


async def read_clock(store: Store, clock: Clock) -> None:
    """Read the database's clock. Raises ``StoreUnavailableError`` if the other one is far off."""
    if isinstance(clock, StoreClock):
        clock.learn(await store.read_epoch())
        clock.check()
