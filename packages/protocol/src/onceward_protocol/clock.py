"""Clocks. Everything that needs the time takes one as an argument."""

import time
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """A source of time. Tests provide their own."""

    def now(self) -> datetime:
        """Return the wall-clock time as an aware datetime in UTC."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""


class SystemClock:
    """The wall clock and the monotonic clock of this machine."""

    # Not methods: each request reads the time more than once.
    now = staticmethod(partial(datetime.now, UTC))
    # Seconds since an arbitrary start.
    monotonic = staticmethod(time.monotonic)
