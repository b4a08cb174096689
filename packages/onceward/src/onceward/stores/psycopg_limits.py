"""Time limits, and warnings of COMMIT, on psycopg's connections of an app's engine or of Django.

psycopg waits for a response without a limit, and on Ctrl-C it asks the server to cancel what runs.
A COMMIT that waits for a standby must not be cancelled: PostgreSQL would show the commit although
the standby may not have it. So ``wait`` of a connection is replaced by an object that closes the
connection instead (docs/decisions/0053-failover.md).
"""

import threading
from typing import Any, Final
from weakref import ref

from onceward.errors import CommitUnknownError
from onceward_protocol.extras import needs_extra

with needs_extra("psycopg"):
    import psycopg
    from psycopg import errors, waiting

from onceward.stores.postgres.abandoned import AbandonedCommits
from onceward.stores.replication import CommitNotices

__all__ = ["PsycopgLimits", "limits_of", "thread_limit"]

# How often psycopg looks for Ctrl-C while it waits.
_INTERVAL_SECONDS: Final = 0.1
# A private name of psycopg; its public base would also be an error of a statement.
_WaitTimeout: Final[type[Exception]] = errors._WaitTimeout  # noqa: SLF001

_thread = threading.local()


class thread_limit:  # noqa: N801 - used like a function; a generator would cost more
    """Limit each response to this thread, on connections that have no limit of their own.

    For what a pool does before it returns a connection: tests of old connections.
    """

    __slots__ = ("_seconds",)

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        _thread.seconds = self._seconds

    def __exit__(self, *_: object) -> None:
        _thread.seconds = None

    @staticmethod
    def current() -> float | None:
        """Return the limit of this thread in seconds."""
        return getattr(_thread, "seconds", None)


class PsycopgLimits:
    """Replaces ``wait`` of one connection, and notes its warnings."""

    __slots__ = ("_connection", "_pgconn", "backend", "notices", "seconds", "was_cut")

    def __init__(self, connection: Any) -> None:
        # Weak: the connection refers to this object.
        self._connection = ref(connection)
        self._pgconn = connection.pgconn
        # What a response may take; None outside guarded transactions, where the app decides.
        self.seconds: float | None = None
        # Whether COMMIT has warned that the standby may not have it.
        self.notices = CommitNotices()
        # The process id of the backend; of a pooler, if there is one, until the server's was read.
        self.backend: int = connection.pgconn.backend_pid
        # Whether the connection was closed while it waited for a response.
        self.was_cut = False

    def __call__(
        self, generator: Any, interval: float = _INTERVAL_SECONDS, timeout: float | None = None
    ) -> Any:
        """Wait for a response; close the connection if it is late, or if this thread is stopped."""
        seconds = self.seconds
        if seconds is None:
            seconds = thread_limit.current()
        if seconds is None or timeout is not None:
            connection: Any = self._connection()
            return type(connection).wait(connection, generator, interval, timeout)
        pgconn = self._pgconn
        try:
            return waiting.wait(generator, pgconn.socket, interval=interval, timeout=seconds)
        except _WaitTimeout:
            self._cut()
            raise psycopg.OperationalError(
                f"PostgreSQL did not respond within {seconds:g} seconds: the connection was closed"
            ) from None
        except Exception:
            raise
        except BaseException:  # Ctrl-C, or the end of a worker process
            self._cut()
            raise

    def _cut(self) -> None:
        self.was_cut = True
        self._pgconn.finish()

    def begin_commit(self, seconds: float) -> None:
        """Forget earlier warnings, and limit COMMIT to ``seconds``."""
        self.seconds = seconds
        self.notices.has_warned = False

    def note_cut(self, abandoned: AbandonedCommits) -> bool:
        """Return whether COMMIT was cut. If so, the server still works on it, and it is counted."""
        if self.was_cut:
            abandoned.add(self.backend)
        return self.was_cut

    def check_commit(self) -> None:
        """Raise ``CommitUnknownError`` if COMMIT has warned."""
        if self.notices.has_warned:
            raise CommitUnknownError("the commit may not have been replicated")


def limits_of(raw: Any) -> PsycopgLimits | None:
    """Return the limits of a connection, from now on in place of its ``wait``.

    None for connections of psycopg 2, which have no time limits.
    """
    found = getattr(raw, "wait", None)
    if type(found) is PsycopgLimits:
        return found
    if getattr(raw, "pgconn", None) is None:
        return None
    limits = raw.wait = PsycopgLimits(raw)
    raw.add_notice_handler(limits.notices.on_diagnostic)
    return limits
