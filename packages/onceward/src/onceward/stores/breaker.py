"""The circuit breaker around the store. The time is an argument."""

from dataclasses import dataclass, field
from enum import StrEnum


class BreakerState(StrEnum):
    """CLOSED allows every call, OPEN none, HALF_OPEN one at a time as a probe.

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
    """Counts consecutive failures. A success resets the count."""

    failure_limit: int = 5
    open_seconds: float = 1.0
    state: BreakerState = BreakerState.CLOSED
    # Since the last success; 0: it is closed, and another success changes nothing.
    failures: int = 0
    _opened_at: float = 0.0
    _probe_at: float | None = field(default=None)

    def retry_after(self, now: float) -> float | None:
        """Return the seconds to wait, or None if the call is allowed."""
        if self.state is BreakerState.CLOSED:
            return None
        if self.state is BreakerState.OPEN:
            left = self._opened_at + self.open_seconds - now
            if left > 0:
                return left
            self.state = BreakerState.HALF_OPEN
            self._probe_at = None
        # A probe that never reports (cancelled, killed) must not block others for longer than this.
        if self._probe_at is not None and now - self._probe_at < self.open_seconds:
            return self.open_seconds
        self._probe_at = now
        return None

    def succeeded(self) -> None:
        self.state = BreakerState.CLOSED
        self.failures = 0
        self._probe_at = None

    def abandoned(self) -> None:
        """Record a call that ended without a sign of the store's health: another may probe."""
        self._probe_at = None

    def failed(self, now: float) -> None:
        """Record a failed call: the breaker may open. For outages, not for errors of one call."""
        self.failures += 1
        if self.state is BreakerState.HALF_OPEN or self.failures >= self.failure_limit:
            self.state = BreakerState.OPEN
            self._opened_at = now
            self._probe_at = None
