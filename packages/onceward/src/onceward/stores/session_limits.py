"""How long PostgreSQL may take to respond in an app's own sessions, and what confirms a record."""

import math
from dataclasses import dataclass, field
from typing import Final

from onceward.errors import ConfigurationError
from onceward.stores.postgres.abandoned import AbandonedCommits
from onceward.stores.replication import CONFIRMING_COMMIT

__all__ = ["CONFIRM", "REPLACED", "SessionLimits"]

REPLACED: Final = "the server was replaced: another one has been promoted since"

# Writes WAL, so that the commit after it waits for a synchronous standby, if there is to be one.
CONFIRM: Final = (
    "SELECT CASE WHEN current_setting('synchronous_standby_names') <> ''"
    " AND current_setting('synchronous_commit') NOT IN ('off', 'local')"
    f" THEN ({CONFIRMING_COMMIT}) END"
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Seconds until a connection that does not respond is closed.

    ``claim_seconds`` limits the connection and the claim of a key, ``statement_seconds`` each
    statement after it, those of the handler too, and ``commit_seconds`` COMMIT, which may wait for
    a standby.
    """

    claim_seconds: float = 5.0
    statement_seconds: float = 30.0
    commit_seconds: float = 10.0
    # Shared by all connections of a store.
    abandoned: AbandonedCommits = field(
        default_factory=AbandonedCommits, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raise ``ConfigurationError`` unless all limits are positive and finite."""
        for name in ("claim_seconds", "statement_seconds", "commit_seconds"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds!r} must be a positive number of seconds")
