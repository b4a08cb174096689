"""How one drain of one user stands, from its first entry to its report."""

from holdfast.core.response_classification import Misdirected, SignInNeeded, Verdict
from holdfast.outbox.report import DrainReport, Ended

__all__ = ["Progress"]


class Progress:
    """How one drain of one user stands."""

    def __init__(self, user_id: str) -> None:
        """Begin."""
        self.report = DrainReport(user_id=user_id)
        # Why to end; None as long as there is no reason.
        self.ended: Ended | None = None
        # Whether the last entry has happened, so that the next one of its lane may be sent.
        self.is_done = False
        # The network is away: nothing is tried for so long. None if it is there.
        self.held_seconds: float | None = None
        self.silences = 0
        # The device was off for longer than was known: what is queued may be too old.
        self.has_aged = False
        # Profiles of entries that cannot be sent, because nothing says how.
        self.unknown_profiles: set[str] = set()
        self.refused_tokens: set[str | None] = set()
        # How many sends in a row were answered with 401.
        self.refusals = 0

    def heard(self, verdict: Verdict) -> None:
        """Take note that somebody has answered."""
        if not isinstance(verdict, Misdirected):
            self.silences = 0
        if not isinstance(verdict, SignInNeeded):
            self.refusals = 0

    def end(self, why: Ended, detail: str | None = None) -> None:
        """Let the drain end after this entry."""
        self.ended = why
        self.report.detail = detail

    def hold(self, seconds: float, why: str) -> None:
        """Let nothing be tried for so long."""
        self.held_seconds = seconds
        self.report.detail = why
