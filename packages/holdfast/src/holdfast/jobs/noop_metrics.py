"""No-op job metrics, the default of a worker."""

from collections.abc import Mapping

from holdfast.ports import JobOutcome

__all__ = ["NullJobMetrics"]


class NullJobMetrics:
    """Implements ``JobMetrics`` without recording anything."""

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        """Do nothing."""

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        """Do nothing."""
