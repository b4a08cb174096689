"""The system clock. Everything that needs the time takes a clock as an argument."""

import time
from datetime import UTC, datetime

__all__ = ["SystemClock"]


class SystemClock:
    """The wall clock and the monotonic clock of this machine."""

    def now(self) -> datetime:
        """Return the current time in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; never decreases."""
        return time.monotonic()
