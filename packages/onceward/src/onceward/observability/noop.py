"""No-op metrics, the defaults of ``Onceward`` and of a worker."""

from collections.abc import Mapping
from typing import Literal

from onceward.ports import CommitFailure, JobOutcome, Outcome

__all__ = ["NullBrokerMetrics", "NullJobMetrics", "NullMetrics", "NullStoreMetrics"]


class NullMetrics:
    """Implements ``Metrics`` without recording anything."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Do nothing."""

    def waited(self, endpoint: str, seconds: float) -> None:
        """Do nothing."""

    def expired(self, endpoint: str) -> None:
        """Do nothing."""

    def store_time(self, operation: str, seconds: float) -> None:
        """Do nothing."""

    def swept(self, records: int, seconds: float) -> None:
        """Do nothing."""


class NullStoreMetrics:
    """Implements ``StoreMetrics`` without recording anything."""

    def pool_waited(self, seconds: float) -> None:
        """Do nothing."""

    def commit_failed(self, of: Literal["request", "job"], failure: CommitFailure) -> None:
        """Do nothing."""


class NullBrokerMetrics:
    """Implements ``BrokerMetrics`` without recording anything."""

    def broker_changed(self, *, is_silent: bool) -> None:
        """Do nothing."""

    def jobs_bypassed_broker(self, jobs: int) -> None:
        """Do nothing."""


class NullJobMetrics:
    """Implements ``JobMetrics`` without recording anything."""

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        """Do nothing."""

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        """Do nothing."""
