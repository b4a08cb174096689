"""A watcher that looks away: the default of the library."""

from holdfast.ports import Outcome

__all__ = ["NullMetrics"]


class NullMetrics:
    """Counts nothing."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Ignore it."""

    def waited(self, endpoint: str, seconds: float) -> None:
        """Ignore it."""

    def expired(self, endpoint: str) -> None:
        """Ignore it."""

    def store_time(self, operation: str, seconds: float) -> None:
        """Ignore it."""

    def swept(self, records: int, seconds: float) -> None:
        """Ignore it."""
