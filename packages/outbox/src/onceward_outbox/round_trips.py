"""Response time-outs from the round trips seen, as TCP sets its retransmission time-out.

For each endpoint the smoothed round trip and its mean deviation are kept (Jacobson and Karels,
RFC 6298). The time-out is the smoothed round trip and four deviations, within a floor and a
ceiling. Each silent send of the same entry in a row doubles it.
"""

from typing import Final, Self

from onceward_outbox.outage import path_template
from onceward_outbox.settings import QueueSettings

__all__ = ["RoundTrips"]

_GAIN: Final = 1 / 8
_DEVIATION_GAIN: Final = 1 / 4
_DEVIATIONS: Final = 4
_FIRST_SHARE: Final = 1 / 3
"""Before the first response the time-out is this part of the ceiling."""

_BYTES_PER_SECOND: Final = 16_384
"""A body is given the time that it takes on a slow mobile network."""

_MAX_ENDPOINTS: Final = 256
_MAX_DOUBLINGS: Final = 16
_ALL: Final = ""


class RoundTrips:
    """What is known about how fast a server responds. Drains of one outbox share it."""

    def __init__(self, *, floor_seconds: float, ceiling_seconds: float) -> None:
        self._floor = floor_seconds
        self._ceiling = ceiling_seconds
        # By path template: smoothed round trip and deviation.
        self._known: dict[str, tuple[float, float]] = {}

    @classmethod
    def of(cls, settings: QueueSettings) -> Self:
        """Return an estimate without samples, with the limits of a queue."""
        return cls(
            floor_seconds=settings.response_floor_seconds,
            ceiling_seconds=settings.response_ceiling_seconds,
        )

    def observe(self, endpoint: str, seconds: float) -> None:
        """Note how long a response took."""
        if len(self._known) >= _MAX_ENDPOINTS:
            self._known.clear()
        for key in (path_template(endpoint), _ALL):
            known = self._known.get(key)
            if known is None:
                self._known[key] = (seconds, seconds / 2)
            else:
                smoothed, deviation = known
                self._known[key] = (
                    smoothed + _GAIN * (seconds - smoothed),
                    deviation + _DEVIATION_GAIN * (abs(seconds - smoothed) - deviation),
                )

    def timeout_seconds(
        self,
        endpoint: str,
        *,
        size: int = 0,
        silent: int = 0,
        floor_seconds: float | None = None,
        ceiling_seconds: float | None = None,
    ) -> float:
        """Return how long to wait for a response to a body of this size.

        ``silent`` is how many sends in a row of the same entry had no response. The limits are the
        queue's, unless they are given; the ceiling holds in any case.
        """
        floor = self._floor if floor_seconds is None else floor_seconds
        ceiling = self._ceiling if ceiling_seconds is None else ceiling_seconds
        known = self._known.get(path_template(endpoint)) or self._known.get(_ALL)
        if known is None:
            seconds = ceiling * _FIRST_SHARE
        else:
            smoothed, deviation = known
            seconds = smoothed + _DEVIATIONS * deviation
        seconds = max(seconds, floor) * float(2 ** min(silent, _MAX_DOUBLINGS))
        return min(seconds + size / _BYTES_PER_SECOND, ceiling)
