"""What an app may set about its queue. Every number has its reason beside it."""

from dataclasses import dataclass
from datetime import timedelta

from holdfast.core.staleness import CAP
from holdfast.errors import ConfigurationError

__all__ = ["QueueSettings"]


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
