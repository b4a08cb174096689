"""A watcher of jobs that looks away: the default of the library."""

from collections.abc import Mapping

from holdfast.ports import JobOutcome

__all__ = ["NullJobMetrics"]


class NullJobMetrics:
    """Counts nothing."""

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        """Ignore it."""

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        """Ignore it."""
