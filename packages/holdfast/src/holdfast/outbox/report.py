"""What a drain did, and why it ended."""

from enum import StrEnum

import msgspec

__all__ = ["DrainReport", "Ended"]


class Ended(StrEnum):
    """Why a drain ended."""

    EMPTY = "empty"
    """Nothing is left to send."""
    BLOCKED = "blocked"
    """What is left waits for a person, or for another process that is sending."""
    WAITING = "waiting"
    """What is left waits for its next try."""
    OFFLINE = "offline"
    """The server cannot be reached."""
    SIGNED_OUT = "signed_out"
    """The server wants a token that holds. No entry has failed of it."""
    TIME_UP = "time_up"
    STOPPED = "stopped"


class DrainReport(msgspec.Struct, kw_only=True):
    """What one drain did for one user."""

    user_id: str
    ended: Ended = Ended.EMPTY
    # Requests that were sent for entries, answered or not.
    sent: int = 0
    succeeded: int = 0
    retrying: int = 0
    failed: int = 0
    # Left for a person.
    conflicts: int = 0
    # Settled by the entry's strategy.
    resolved: int = 0
    expired: int = 0
    # Claims of dead processes that came back.
    revived: int = 0
    rebuilt: int = 0
    # Another process had taken the entry over when the answer came.
    lost: int = 0
    # Entries that are not settled after all.
    unsent: int = 0
    # When the next retry is due.
    next_due_seconds: float | None = None
    elapsed_seconds: float = 0.0
    # A few words for a person about why it ended.
    detail: str | None = None
