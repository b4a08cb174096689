"""The circuit breaker around the store, as a table of states. Time is an argument."""

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(StrEnum):
    """CLOSED lets everything pass, OPEN nothing, HALF_OPEN one request at a time as a probe.

    ::

        CLOSED ──failures reach the limit──▶ OPEN ──open_seconds pass──▶ HALF_OPEN
          ▲                                   ▲                            │   │
          └───────────── success ─────────────┼────────────────────────────┘   │
                                              └────────── failure ─────────────┘
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(slots=True)
class Breaker:
    """Counts failures in a row. A success forgives all of them."""

    failure_limit: int = 5
    open_seconds: float = 1.0
    state: BreakerState = BreakerState.CLOSED
    _failures: int = 0
    _opened_at: float = 0.0
    _probe_at: float | None = field(default=None)

    def retry_after(self, now: float) -> float | None:
        """Return the seconds to stay away, or None when the call may go ahead."""
        if self.state is BreakerState.CLOSED:
            return None
        if self.state is BreakerState.OPEN:
            left = self._opened_at + self.open_seconds - now
            if left > 0:
                return left
            self.state = BreakerState.HALF_OPEN
            self._probe_at = None
        # A probe that never reports back (cancelled, killed) must not hold the door shut.
        if self._probe_at is not None and now - self._probe_at < self.open_seconds:
            return self.open_seconds
        self._probe_at = now
        return None

    def succeeded(self) -> None:
        """Note that the store answered."""
        self.state = BreakerState.CLOSED
        self._failures = 0
        self._probe_at = None

    def failed(self, now: float) -> None:
        """Note that the store did not answer."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN or self._failures >= self.failure_limit:
            self.state = BreakerState.OPEN
            self._opened_at = now
            self._probe_at = None
