"""Settings of a queue."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Self

from onceward_outbox.errors import ConfigurationError

VARIABLES: Final[Mapping[str, str]] = {
    "lease_seconds": "ONCEWARD_OUTBOX_LEASE_SECONDS",
    "stale_after": "ONCEWARD_OUTBOX_CAP_DAYS",
    "keep_succeeded": "ONCEWARD_OUTBOX_KEEP_SUCCEEDED_DAYS",
    "keep_settled": "ONCEWARD_OUTBOX_KEEP_SETTLED_DAYS",
    "keep_failed": "ONCEWARD_OUTBOX_KEEP_FAILED_DAYS",
    "keep_mappings": "ONCEWARD_OUTBOX_KEEP_MAPPINGS_DAYS",
    "keep_versions": "ONCEWARD_OUTBOX_KEEP_VERSIONS_DAYS",
    "warn_before": "ONCEWARD_OUTBOX_WARN_DAYS",
    "prune_notice": "ONCEWARD_OUTBOX_PRUNE_NOTICE_DAYS",
    "response_floor_seconds": "ONCEWARD_OUTBOX_RESPONSE_FLOOR_SECONDS",
    "response_ceiling_seconds": "ONCEWARD_OUTBOX_RESPONSE_CEILING_SECONDS",
    "max_probe_seconds": "ONCEWARD_OUTBOX_MAX_PROBE_SECONDS",
    "parallel_lanes": "ONCEWARD_OUTBOX_PARALLEL_LANES",
    "batch_items": "ONCEWARD_OUTBOX_BATCH_ITEMS",
}
"""Environment variable by setting."""

# The elapsed clock has milliseconds.
_MIN_SPAN: Final = timedelta(milliseconds=1)
# By setting: what is counted, and the maximum.
_COUNTS: Final = {"parallel_lanes": ("lanes", 64), "batch_items": ("entries", 1000)}
# Unit and maximum, by the last word of a variable's name.
_UNITS: Final = {
    "SECONDS": (timedelta(seconds=1), 86_400),
    "DAYS": (timedelta(days=1), 36_500),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """Limits and durations of one queue."""

    lease_seconds: float = 120.0
    """How long a claim holds without being renewed."""

    stale_after: timedelta | None = None
    """How old a pending entry of any profile may become before it expires; None: as its profile
    says."""

    warn_before: timedelta = timedelta(hours=48)
    """How long before its entries expire a user is warned, by the event ``expiring``."""

    keep_succeeded: timedelta = timedelta(days=7)
    """How long succeeded entries are kept."""

    keep_settled: timedelta = timedelta(days=30)
    """How long discarded and expired entries are kept: longer, because users look for them."""

    keep_failed: timedelta | None = timedelta(days=90)
    """How long failed entries and conflicts are kept that no other entry waits for; None: always.
    """

    keep_mappings: timedelta = timedelta(days=90)
    """How long the server ids of local ids are kept after the last entry that refers to them was
    removed. An app that still has the local id in its own tables should read the server id before.
    """

    keep_versions: timedelta = timedelta(days=90)
    """How long the version of an entity is kept after it was last seen."""

    prune_notice: timedelta = timedelta(days=7)
    """How long before their removal failed entries, conflicts and mappings are announced, by the
    event ``pruning``."""

    max_entries: int = 1_000_000
    """Maximum of unsettled entries per user."""

    max_payload_bytes: int = 1_048_576
    """Maximum size of one payload."""

    payload_version: int = 0
    """The format of the payloads that this version of the app queues."""

    busy_seconds: float = 10.0
    """How long to wait while another process writes. A write takes milliseconds."""

    parallel_lanes: int = 4
    """How many lanes a drain sends from at once, each over its own connection."""

    batch: bool = True
    """Whether several entries are sent in one request to a server that offers it."""

    batch_items: int = 50
    """How many entries a batch may have, up to the server's limit."""

    response_floor_seconds: float = 2.0
    """The shortest time that a response may take. Within this and the ceiling the time-out follows
    the round trips seen; for the head of a strict order the request is repeated after half of it,
    with the same key on another connection."""

    response_ceiling_seconds: float = 30.0
    """The longest time that a response may take."""

    max_probe_seconds: float = 300.0
    """How long to wait at most between two probes of a server that is down. One that names a
    longer time itself (``Retry-After``) is not sent anything before."""

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` for invalid numbers."""
        if self.max_probe_seconds <= 0 or self.parallel_lanes < 1:
            raise ConfigurationError("max_probe_seconds and parallel_lanes must be more than 0")
        if self.batch_items < 1:
            raise ConfigurationError(
                "batch_items must be more than 0; batch=False sends no batches"
            )
        if not 0 < self.response_floor_seconds <= self.response_ceiling_seconds:
            raise ConfigurationError(
                "0 < response_floor_seconds <= response_ceiling_seconds must hold"
            )
        if self.lease_seconds <= 0 or self.max_entries < 1 or self.max_payload_bytes < 1:
            raise ConfigurationError(
                "lease_seconds, max_entries and max_payload_bytes must be more than 0"
            )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return settings from the environment; what is not set there has its default.

        The variables of ``VARIABLES``, such as ``ONCEWARD_OUTBOX_CAP_DAYS``, are numbers above 0,
        fractions too, except for the numbers of lanes and of entries in a batch (1 sends no
        batches). An empty one counts as not set. Anything else
        raises a ``ConfigurationError`` that names the variable. ``onceward outbox`` reads them, an
        app only if it calls this; ``dataclasses.replace`` sets the rest.
        """
        given: dict[str, Any] = {}
        for name, variable in VARIABLES.items():
            if name in _COUNTS:
                count = _count_in(environment, variable, *_COUNTS[name])
                given |= {} if count is None else {name: count}
                continue
            span = span_in(environment, variable)
            if span is not None:
                given[name] = span.total_seconds() if name.endswith("_seconds") else span
        return cls(**given)


def _count_in(environment: Mapping[str, str], variable: str, what: str, maximum: int) -> int | None:
    """Return a whole number; None if not set."""
    given = environment.get(variable)
    if not given:
        return None
    if given.isascii() and given.isdigit() and 0 < int(given[:9]) <= maximum:
        return int(given)
    raise ConfigurationError(
        f"{variable} should be a number of {what} from 1 to {maximum}, not {given!r}"
    )


def span_in(environment: Mapping[str, str], variable: str) -> timedelta | None:
    """Return a duration in the unit that the variable's name ends with; None if not set."""
    given = environment.get(variable)
    if not given:
        return None
    word = variable.rpartition("_")[2]
    unit, maximum = _UNITS[word]
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number <= maximum or number * unit < _MIN_SPAN:
        raise ConfigurationError(
            f"{variable} should be a number of {word.lower()} above 0 and up to {maximum}, "
            f"such as 1 or 0.5, not {given!r}"
        )
    return number * unit
