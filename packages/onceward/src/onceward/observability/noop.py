"""No-op metrics, the defaults of ``Onceward`` and of a worker."""

from collections.abc import Mapping
from typing import Literal

from onceward.ports import (
    BrokerMetrics,
    CommitFailure,
    JobMetrics,
    JobOutcome,
    Metrics,
    Outcome,
    StoreMetrics,
)

__all__ = ["NullBrokerMetrics", "NullJobMetrics", "NullMetrics", "NullStoreMetrics"]


class NullMetrics(Metrics):
    """Implements ``Metrics`` without recording anything."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None: ...
    def waited(self, endpoint: str, seconds: float) -> None: ...
    def expired(self, endpoint: str) -> None: ...
    def store_time(self, operation: str, seconds: float) -> None: ...
    def swept(self, records: int, seconds: float) -> None: ...


class NullStoreMetrics(StoreMetrics):
    """Implements ``StoreMetrics`` without recording anything."""

    def pool_waited(self, seconds: float) -> None: ...
    def commit_failed(self, of: Literal["request", "job"], failure: CommitFailure) -> None: ...


class NullBrokerMetrics(BrokerMetrics):
    """Implements ``BrokerMetrics`` without recording anything."""

    def broker_changed(self, *, is_silent: bool) -> None: ...
    def jobs_bypassed_broker(self, jobs: int) -> None: ...


class NullJobMetrics(JobMetrics):
    """Implements ``JobMetrics`` without recording anything."""

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None: ...
    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None: ...
