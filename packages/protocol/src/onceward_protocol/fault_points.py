"""Points at which a test may inject a fault: into async code, and into blocking code."""

from typing import Protocol

__all__ = ["FaultPoints", "SyncFaultPoints"]


class FaultPoints(Protocol):
    """Named points at which a test may kill, delay or raise. Injected, never global."""

    async def reach(self, point: str) -> None:
        """Return normally, or inject a fault (kill, delay or raise)."""


class SyncFaultPoints(Protocol):
    """The same for blocking code.

    Every operation of the outbox that writes has two: ``<operation>.before_commit`` and
    ``<operation>.after_commit``, such as ``enqueue.before_commit``.
    """

    def reach(self, point: str) -> None:
        """Return normally, or inject a fault (kill, delay or raise)."""
