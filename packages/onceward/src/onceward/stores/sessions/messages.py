"""How a driver sends what Onceward adds to a transaction of the app, and within what time."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from onceward.errors import ConfigurationError
from onceward.stores.replication import CONFIRMING_COMMIT, AbandonedCommits, CommitNotices

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
        for name in ("claim_seconds", "statement_seconds", "commit_seconds"):
            seconds = getattr(self, name)
            if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds!r} must be a positive number of seconds")


class Sent(Protocol):
    """A unit whose statements are limited."""

    # When the last statement was sent, in monotonic seconds; 0 without a time limit.
    statement_at: float


class Messages:
    """Statement by statement and without time limits: on SQLite, and on psycopg 2.

    Methods block, and take a connection as the library of the app has it.
    """

    # Whether connections that do not respond are closed.
    has_limits = False
    # Names of events of an engine, and what listens to them.
    listeners: tuple[tuple[str, Callable[..., None]], ...] = ()

    def connecting(self, _pool: Any = None) -> AbstractContextManager[Any]:
        """Limit the time to connect during the block."""
        return nullcontext()

    def waiting(self, seconds: float) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Limit each response to this thread during the block."""
        return nullcontext()

    def rolling_back(self) -> AbstractContextManager[Any]:
        """Limit the time of a rollback during the block."""
        return nullcontext()

    def limit(self, connection: Any, unit: Sent | None = None) -> None:
        """Close the connection if it does not respond to a statement of a unit, or of one read.

        Until ``unlimit``, or until the pool has it back.
        """

    def unlimit(self, connection: Any) -> None:
        """Let the app decide again what a statement may take."""

    def claiming(self, connection: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Limit each response during the block, which claims a key."""
        return nullcontext()

    def notices_of(self, connection: Any) -> CommitNotices | None:  # noqa: ARG002
        """Return the notes on a connection."""
        return None

    def begin_and_claim(self, connection: Any, call: str) -> int | None:  # noqa: ARG002
        """Begin and claim in one message; return the number of rows.

        None if the connection cannot do it: then the claim is a statement.
        """
        return None

    def refuse_autocommit(self, connection: Any) -> None:
        """Raise ``ConfigurationError`` if a statement has not begun a transaction."""

    def is_closed(self, connection: Any) -> bool:  # noqa: ARG002
        """Return whether the driver has closed the connection."""
        return False

    def confirm(self, connection: Any) -> None:
        """Commit what was read, so that a synchronous standby has it too.

        Raises ``StoreUnavailableError`` if it may not have it.
        """

    def can_finish(self, connection: Any) -> bool:  # noqa: ARG002
        """Return whether the record and COMMIT can be one message."""
        return False

    def finish_and_commit(self, connection: Any, statement: str) -> None:
        """Run the statement that saves a record, and commit, in one message.

        Raises ``CommitUnknownError``, ``SupersededError`` or an error of the driver.
        """
        raise NotImplementedError

    def committing(
        self,
        connection: Any,  # noqa: ARG002
        *,
        is_read: bool = False,  # noqa: ARG002
        seconds: float | None = None,  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Limit a COMMIT during the block; raise ``CommitUnknownError`` if it has warned.

        With ``is_read`` it confirms what was read, and the error is ``StoreUnavailableError``.
        ``seconds`` takes the place of ``commit_seconds``.
        """
        return nullcontext()

    def needs_rollback(self, driver: Any) -> bool:  # noqa: ARG002
        """Return whether a driver's connection may have a transaction, after Onceward's COMMIT."""
        return True


def autocommit_refusal() -> ConfigurationError:
    """Return the error for an engine whose statements do not begin a transaction."""
    return ConfigurationError(
        "this engine is in AUTOCOMMIT mode, so nothing can commit together: "
        "use an engine with transactions"
    )
