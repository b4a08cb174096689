"""Counts for how long a broker has not responded."""

from collections.abc import Callable
from typing import Final

__all__ = ["SilenceTimer"]

_MAX_TICK_SECONDS: Final = 0.5
# A shorter limit is checked more often than twice a second.
_TICKS: Final = 10


class SilenceTimer:
    """Counts the seconds since the last response, in ticks that its owner calls.

    Ticks, not a clock: when this process was stopped, or its event loop was blocked, the responses
    that came meanwhile wait in the socket. Such a pause counts as one tick, and they are read
    before the next.
    """

    def __init__(self, limit_seconds: float, *, on_change: Callable[[bool], None]) -> None:
        """``on_change(True)`` is called at the limit, ``on_change(False)`` at the next response."""
        self.limit_seconds = limit_seconds
        # How often ``tick`` must be called.
        self.tick_seconds = min(_MAX_TICK_SECONDS, limit_seconds / _TICKS)
        # Since the last response; at the start, since the start.
        self.seconds = 0.0
        # The same, but not from before the current connection was made.
        self.connection_seconds = 0.0
        # Whether the limit is exceeded.
        self.is_over = False
        self._on_change = on_change

    def heard(self) -> None:
        """Note a response."""
        self.seconds = self.connection_seconds = 0.0
        self._set_over(is_over=False)

    def connected(self) -> None:
        """Note a new connection, on which the broker has yet to respond."""
        self.connection_seconds = 0.0

    def tick(self) -> None:
        """Note that ``tick_seconds`` have passed."""
        self.seconds += self.tick_seconds
        self.connection_seconds += self.tick_seconds
        if self.seconds >= self.limit_seconds:
            self._set_over(is_over=True)

    def _set_over(self, *, is_over: bool) -> None:
        if self.is_over != is_over:
            self.is_over = is_over
            self._on_change(is_over)
