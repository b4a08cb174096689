"""What a PostgreSQL server guarantees about commits, and which commits are on its standby too.

With synchronous replication, COMMIT waits until the standby has the commit. If the wait is ended by
``pg_cancel_backend``, ``pg_terminate_backend`` or a restart, the commit is visible although the
standby may not have it. PostgreSQL reports success with a WARNING, and a later reader sees no
difference: if the standby is promoted, the commit is gone. So

- a commit with such a warning has an unknown outcome (``CommitNotices``);
- a record that was read may be replayed only after a commit that began after the read, wrote WAL
  and ended without a warning (``ConfirmedCommits``): a standby has WAL in order, so it has the
  record too.

Nothing here knows a driver. See docs/decisions/0053-failover.md.
"""

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.stores.postgres.abandoned import AbandonedCommits

__all__ = [
    "CONFIRMING_COMMIT",
    "READ_DURABILITY",
    "CommitNotices",
    "ConfirmedCommits",
    "Durability",
    "ReplicationBarrier",
    "is_replication_warning",
    "unconfirmed",
    "watching_commit",
]

# A commit that changes nothing, but writes WAL, and so waits for a synchronous standby. A
# transaction that only has a number (``pg_current_xact_id``) does not wait. Run it by itself: it
# commits at once.
CONFIRMING_COMMIT: Final = "SELECT pg_logical_emit_message(true, 'onceward', '')"

# Columns in the order of ``Durability``. Every role may read them.
READ_DURABILITY: Final = (
    "SELECT current_setting('synchronous_standby_names'), current_setting('synchronous_commit'),"
    " current_setting('fsync'), current_setting('full_page_writes'), pg_is_in_recovery()"
)

_WARNING: Final = "WARNING"
# A cancelled wait has the general state of warnings; the end of a backend has that of a shutdown.
_WARNING_STATES: Final = frozenset({"01000", "57P01"})
# With these, COMMIT waits for a standby. After ``remote_write`` it may lose the commit if its
# operating system stops, too.
_WAITING: Final = frozenset({"on", "remote_apply", "remote_write"})
_LASTING: Final = frozenset({"on", "remote_apply"})


def is_replication_warning(severity: str | None, sqlstate: str | None) -> bool:
    """Check whether a notice that arrived during COMMIT says that the standby may not have it.

    The text is translated, so it cannot be compared. A deferred trigger that raises a warning looks
    the same: then the outcome is looked up without need.
    """
    return severity == _WARNING and sqlstate in _WARNING_STATES


class CommitNotices:
    """What is noted of one connection. Set ``has_warned`` to False before COMMIT."""

    __slots__ = ("backend", "has_warned", "was_cut")

    def __init__(self, backend: int = 0) -> None:
        # COMMIT has warned that the standby may not have it.
        self.has_warned = False
        # The connection was closed while it waited for a response.
        self.was_cut = False
        # The process id of its backend; of a pooler, if there is one, until the server's was read.
        self.backend = backend

    def on_message(self, _connection: Any, message: Any) -> None:
        """Take a message of asyncpg; for ``add_log_listener``."""
        severity = getattr(message, "severity_en", None) or getattr(message, "severity", None)
        if is_replication_warning(severity, message.sqlstate):
            self.has_warned = True

    def on_diagnostic(self, diagnostic: Any) -> None:
        """Take a message of psycopg; for ``add_notice_handler``."""
        severity = diagnostic.severity_nonlocalized or diagnostic.severity
        if is_replication_warning(severity, diagnostic.sqlstate):
            self.has_warned = True


@dataclass(frozen=True, slots=True)
class Durability:
    """Settings of a server that decide what outlives the loss of its power, or of the server."""

    synchronous_standby_names: str
    synchronous_commit: str
    fsync: str
    full_page_writes: str
    is_in_recovery: bool = False

    @classmethod
    def of(cls, row: Sequence[Any]) -> "Durability":
        """Return what ``READ_DURABILITY`` has read."""
        standbys, commit, fsync, pages, is_in_recovery = row
        return cls(str(standbys), str(commit), str(fsync), str(pages), bool(is_in_recovery))

    @property
    def waits_for_standby(self) -> bool:
        """Whether COMMIT waits for a synchronous standby."""
        return bool(self.synchronous_standby_names) and self.synchronous_commit in _WAITING

    @property
    def is_replicated(self) -> bool:
        """Whether an acknowledged commit outlives the loss of the server."""
        return self.waits_for_standby and not self.weaknesses()

    def weaknesses(self) -> tuple[str, ...]:
        """Return how acknowledged commits can be lost, and what to do; one text for each way."""
        found: list[str] = []
        if self.fsync != "on":
            found.append("fsync is off: a power failure can destroy the database; set fsync = on")
        if self.full_page_writes != "on":
            found.append(
                "full_page_writes is off: a power failure can destroy pages; set "
                "full_page_writes = on"
            )
        if not self.synchronous_standby_names:
            found.append(
                "there is no synchronous standby: acknowledged writes can be lost at failover; set "
                "synchronous_standby_names"
            )
        if self.synchronous_commit not in _LASTING:
            found.append(
                f"synchronous_commit is {self.synchronous_commit}: acknowledged writes can be "
                "lost; set synchronous_commit = on"
            )
        return tuple(found)

    def describe(self) -> str:
        """Return the settings in one line."""
        standbys = self.synchronous_standby_names or "none"
        return (
            f"fsync {self.fsync}, full_page_writes {self.full_page_writes}, synchronous_commit "
            f"{self.synchronous_commit}, synchronous standbys: {standbys}"
        )


class ConfirmedCommits:
    """Which commits of this process ended without a warning. May be used in any thread."""

    __slots__ = ("_confirmed", "_lock", "_numbers")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        # The highest number of a commit that was confirmed.
        self._confirmed = 0
        self._lock = threading.Lock()

    def mark(self) -> int:
        """Return a number for now: take it before COMMIT is sent, and after a record was read."""
        return next(self._numbers)

    def confirm(self, started: int) -> None:
        """Note that the commit that began at ``started`` wrote WAL and ended without a warning."""
        with self._lock:
            self._confirmed = max(self._confirmed, started)

    def cover(self, read: int) -> bool:
        """Check whether a commit that began after ``read`` was confirmed."""
        return self._confirmed > read


def unconfirmed(reason: str) -> StoreUnavailableError:
    """Return the error for a record that may be on the primary only."""
    return StoreUnavailableError(
        f"the record may not have been replicated: {reason}", reason="outcome_unknown"
    )


class watching_commit:  # noqa: N801 - used like a function; a generator would cost more
    """Watch a COMMIT that is sent in the block. Other errors of the block are raised unchanged.

    Raises ``CommitUnknownError`` if the standby may not have the commit; with ``is_read``, for what
    confirms a record that was read, ``StoreUnavailableError``. A commit that was cut is counted:
    the server still works on it.
    """

    __slots__ = ("_abandoned", "_is_read", "_notices")

    def __init__(
        self, notices: CommitNotices, abandoned: AbandonedCommits, *, is_read: bool = False
    ) -> None:
        self._notices = notices
        self._abandoned = abandoned
        self._is_read = is_read

    def __enter__(self) -> None:
        self._notices.has_warned = False

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            if self._notices.was_cut:
                self._abandoned.add(self._notices.backend)
        elif self._notices.has_warned:
            if self._is_read:
                raise unconfirmed("the standby did not confirm it")
            raise CommitUnknownError("the commit may not have been replicated")


class ReplicationBarrier:
    """Waits until what was read is on the standby. For one event loop."""

    def __init__(self, commits: ConfirmedCommits, commit: Callable[[], Awaitable[None]]) -> None:
        """``commit`` runs ``CONFIRMING_COMMIT``; it raises if that fails or warns."""
        self._commits = commits
        self._commit = commit
        self._running: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Return after a confirmed commit that began after this call; else raise.

        Callers share one commit, unless it began before they came.
        """
        read = self._commits.mark()
        while not self._commits.cover(read):
            if self._running is None:
                self._running = asyncio.create_task(self._run())
                self._running.add_done_callback(_retrieve)
            # A caller that is cancelled must not end the commit of the others.
            await asyncio.shield(self._running)

    async def _run(self) -> None:
        started = self._commits.mark()
        try:
            await self._commit()
        finally:
            self._running = None
        self._commits.confirm(started)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark the error as seen: all callers may have been cancelled."""
    if not task.cancelled():
        task.exception()
