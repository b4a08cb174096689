"""What an app may set about its queue. Every number has its reason beside it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

from holdfast.core.staleness import CAP
from holdfast.errors import ConfigurationError

__all__ = ["VARIABLES", "QueueSettings", "span_in"]

VARIABLES: Final[Mapping[str, str]] = {
    "lease_seconds": "HOLDFAST_OUTBOX_LEASE_SECONDS",
    "stale_after": "HOLDFAST_OUTBOX_CAP_DAYS",
    "keep_succeeded": "HOLDFAST_OUTBOX_KEEP_SUCCEEDED_DAYS",
    "keep_settled": "HOLDFAST_OUTBOX_KEEP_SETTLED_DAYS",
}
"""Which variable of the environment sets which of the settings."""

# Less would round to nothing: the file's own time is in milliseconds.
_LEAST: Final = timedelta(milliseconds=1)
# By the last word of a variable's name. Above the most, a finger has slipped.
_UNITS: Final = {
    "SECONDS": (timedelta(seconds=1), 86_400),
    "DAYS": (timedelta(days=1), 36_500),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Limits and spans of one queue."""

    lease_seconds: float = 120.0
    """How long a claim holds without being renewed: the watchdog's two minutes."""

    stale_after: timedelta = CAP
    """How old a pending entry may become: as long as a device may stay offline."""

    keep_succeeded: timedelta = timedelta(days=7)
    """For looking back."""

    keep_settled: timedelta = timedelta(days=30)
    """What was discarded or expired is kept longer: somebody may ask where it went."""

    max_entries: int = 1_000_000
    """Entries of one user that are not settled. Past that, something else is wrong."""

    max_payload_bytes: int = 1_048_576
    """One entry's body; more than servers take by default."""

    payload_version: int = 0
    """The format of the payloads that this version of the app queues."""

    busy_seconds: float = 10.0
    """How long to wait while another process writes. Each does so for milliseconds."""

    def __post_init__(self) -> None:
        """Refuse numbers that no queue can work with."""
        if self.lease_seconds <= 0 or self.max_entries < 1 or self.max_payload_bytes < 1:
            raise ConfigurationError(
                "lease_seconds, max_entries and max_payload_bytes must be more than 0"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Take from the environment what is set there; the rest is as always.

        ``HOLDFAST_OUTBOX_LEASE_SECONDS``, ``HOLDFAST_OUTBOX_CAP_DAYS``,
        ``HOLDFAST_OUTBOX_KEEP_SUCCEEDED_DAYS`` and ``HOLDFAST_OUTBOX_KEEP_SETTLED_DAYS`` are
        numbers above 0, fractions too. An empty one counts as not set. Anything else is a
        ``ConfigurationError`` that names the variable. ``holdfast outbox`` reads them by itself,
        an app only if it calls this; ``dataclasses.replace`` sets the rest.
        """
        given: dict[str, Any] = {}
        for name, variable in VARIABLES.items():
            span = span_in(environment, variable)
            if span is not None:
                given[name] = span.total_seconds() if name == "lease_seconds" else span
        return cls(**given)


def span_in(environment: Mapping[str, str], variable: str) -> timedelta | None:
    """Read a span of time in the unit that the variable's name ends with; None if not set."""
    given = environment.get(variable)
    if not given:
        return None
    word = variable.rpartition("_")[2]
    unit, most = _UNITS[word]
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number <= most or number * unit < _LEAST:
        raise ConfigurationError(
            f"{variable} should be a number of {word.lower()} above 0 and up to {most}, "
            f"such as 1 or 0.5, not {given!r}"
        )
    return number * unit
