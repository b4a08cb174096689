"""Guarantees of a PostgreSQL server about commits, and which commits are on its standby too.

With synchronous replication, COMMIT waits until the standby has the commit. If the wait is ended by
``pg_cancel_backend``, ``pg_terminate_backend`` or a restart, the commit is visible although the
standby may not have it. PostgreSQL reports success with a WARNING, and a later reader sees no
difference: if the standby is promoted, the commit is gone. So

- a commit with such a warning has an unknown outcome (``CommitNotices``);
- a record that was read may be replayed only after a commit that began after the read, wrote WAL
  and ended without a warning (``ConfirmedCommits``): a standby has WAL in order, so it has the
  record too.

Nothing here knows a driver. See docs/decisions/0053-failover.md.

Commits that were cut while the server worked on them are counted (``AbandonedCommits``). A COMMIT
that waits for a standby goes on waiting when its client is gone, and keeps its connection slot.
Without a limit, retries would fill all slots of the server. So the store refuses work while there
are too many, which opens the circuit breaker, and looks once a second if they have ended.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from onceward.errors import CommitUnknownError, StoreUnavailableError

# A commit that changes nothing, but writes WAL, and so waits for a synchronous standby. A
# transaction that only has a number (``pg_current_xact_id``) does not wait. Run it by itself: it
# commits at once.
CONFIRMING_COMMIT: Final = "SELECT pg_logical_emit_message(true, 'onceward', '')"

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
    """Notes about one connection. Set ``has_warned`` to False before COMMIT."""

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
        """Return the values that ``epoch.sql`` has read."""
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


_CHECK_SECONDS: Final = 1.0
# If a store's connections have no limit: half of the default of the stores with their own pool.
_LIMIT: Final = 8
# Which of the backends are left. A process id may be used again, by another app or an idle
# connection for example.
STILL_RUNNING: Final = """
SELECT pid FROM pg_stat_activity
 WHERE pid = ANY($1::int[]) AND state = 'active'
   AND application_name = current_setting('application_name')
"""


class AbandonedCommits:
    """The backends of commits that were cut and may not have ended. May be used in any thread."""

    def __init__(self, connections: int | None = None) -> None:
        """Refuse work from half of ``connections`` on; as many again may wait on the server."""
        # Gets the number after each change.
        self.report: Callable[[int], None] | None = None
        self._backends: set[int] = set()
        self._check_at = 0.0
        # True from the limit on, so that requests read one attribute.
        self.is_full = False
        self.limit_to_half_of(connections)

    def __len__(self) -> int:
        return len(self._backends)

    def limit_to_half_of(self, connections: int | None) -> None:
        """Refuse work from half of ``connections`` on; None is no limit of connections."""
        self._limit = _LIMIT if connections is None else max(1, connections // 2)

    def add(self, backend: int) -> None:
        """Note the process id of a backend whose connection was cut during COMMIT."""
        self._backends.add(backend)
        self._changed()

    def clear(self) -> None:
        """Forget them: they belong to a server that was replaced."""
        self._backends = set()
        self._changed()

    def _changed(self) -> None:
        self.is_full = len(self._backends) >= self._limit
        if self.report is not None:
            self.report(len(self._backends))

    async def check(self, connect: Callable[[], Awaitable[Any]]) -> None:
        """Forget those that have ended, on a connection of its own.

        Raises ``StoreUnavailableError`` if too many are left, and what ``connect`` raises.
        """
        if self._is_due():
            asked = self._backends
            connection = await connect()
            try:
                self._forget_ended(asked, await connection.fetch(STILL_RUNNING, sorted(asked)))
            finally:
                with suppress(OSError):
                    connection.terminate()
        self._refuse_if_full()

    def check_blocking(self, read: Callable[[list[int]], Iterable[Any]]) -> None:
        """Do the same with a function that runs ``STILL_RUNNING`` with its argument, and blocks."""
        if self._is_due():
            asked = self._backends
            self._forget_ended(asked, read(sorted(asked)))
        self._refuse_if_full()

    def _is_due(self) -> bool:
        now = time.monotonic()
        if now < self._check_at:
            return False
        self._check_at = now + _CHECK_SECONDS
        return True

    def _forget_ended(self, asked: set[int], rows: Iterable[Any]) -> None:
        running = {row[0] for row in rows}
        self._backends = {each for each in self._backends if each in running or each not in asked}
        self._changed()

    def _refuse_if_full(self) -> None:
        if self.is_full:
            raise StoreUnavailableError(
                f"{len(self._backends)} commits of this process are still waiting on the server, "
                "for a synchronous standby that is absent, or because it does not respond",
                reason="commits_waiting",
            )


class CommitWatch:
    """Watches a COMMIT that is sent in a ``with`` block, on any driver. Raises nothing by itself.

    A commit that was cut is counted: the server still works on it.
    """

    __slots__ = ("_abandoned", "_notices", "is_outdated")

    def __init__(self, notices: "CommitNotices | Any", abandoned: AbandonedCommits) -> None:
        self._notices = notices
        self._abandoned = abandoned
        # Another server was reached since the connection was opened.
        self.is_outdated = False

    def __enter__(self) -> Any:
        self._notices.has_warned = False
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._notices.was_cut:
            self._abandoned.add(self._notices.backend)

    def raise_if_unknown(self, *, is_read: bool = False) -> None:
        """Raise ``CommitUnknownError`` if a COMMIT that succeeded may be lost.

        With ``is_read``, for what confirms a record that was read, ``StoreUnavailableError``.
        """
        if not self._notices.has_warned and not self.is_outdated:
            return
        if is_read:
            raise unconfirmed("the standby did not confirm it")
        raise CommitUnknownError("the commit may not be on the standby, or on a promoted server")


class watching_commit(CommitWatch):  # noqa: N801 - used like a function; a generator would cost more
    """Watch a COMMIT, and raise at the end of the block if its outcome is unknown.

    Other errors of the block are raised unchanged.
    """

    __slots__ = ("_is_read",)

    def __init__(
        self, notices: CommitNotices, abandoned: AbandonedCommits, *, is_read: bool = False
    ) -> None:
        super().__init__(notices, abandoned)
        self._is_read = is_read

    def __exit__(self, kind: object, *raised: object) -> None:
        super().__exit__(kind, *raised)
        if kind is None:
            self.raise_if_unknown(is_read=self._is_read)


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
