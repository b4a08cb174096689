"""Messages and time limits on psycopg's connections of an app's engine or of Django.

psycopg waits for a response without a limit, and on Ctrl-C it asks the server to cancel what runs.
A COMMIT that waits for a standby must not be cancelled: PostgreSQL would show the commit although
the standby may not have it. So ``wait`` of a connection is replaced by an object that closes the
connection instead (docs/decisions/0053-failover.md).
"""

import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final
from weakref import ref

from onceward_protocol.extras import needs_extra

with needs_extra("psycopg"):
    import psycopg
    from psycopg import errors, waiting
    from psycopg.pq import TransactionStatus

from onceward.errors import CommitUnknownError
from onceward.stores.errors import is_unknown_commit
from onceward.stores.psycopg.messages import begin_statement, raise_outage, send
from onceward.stores.replication import CommitNotices, CommitWatch, watching_commit
from onceward.stores.sessions.messages import (
    CONFIRM,
    Messages,
    Sent,
    SessionLimits,
    autocommit_refusal,
)

# How often psycopg looks for Ctrl-C while it waits.
_INTERVAL_SECONDS: Final = 0.1
# A private name of psycopg; its public base would also be an error of a statement.
_WaitTimeout: Final[type[Exception]] = errors._WaitTimeout  # noqa: SLF001
_IDLE: Final = TransactionStatus.IDLE


class _ThreadLimit(threading.local):
    """Time limit of a response to this thread, on connections that have no limit of their own.

    For what a pool does before it returns a connection: tests of old connections.
    """

    seconds: float | None = None


_thread = _ThreadLimit()


class _limited:  # noqa: N801 - used like a function; a generator would cost more
    """Limit each response on one connection, or to this thread."""

    __slots__ = ("_before", "_limits", "_seconds")

    def __init__(self, limits: "PsycopgLimits | _ThreadLimit", seconds: float) -> None:
        self._limits = limits
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before, self._limits.seconds = self._limits.seconds, self._seconds

    def __exit__(self, *_: object) -> None:
        self._limits.seconds = self._before


class PsycopgLimits(CommitNotices):
    """Replaces ``wait`` of one connection, and notes its warnings."""

    __slots__ = ("_connection", "_pgconn", "seconds")

    def __init__(self, connection: Any) -> None:
        super().__init__(connection.pgconn.backend_pid)
        # Weak: the connection refers to this object.
        self._connection = ref(connection)
        self._pgconn = connection.pgconn
        # What a response may take; None outside guarded transactions, where the app decides.
        self.seconds: float | None = None

    def __call__(
        self, generator: Any, interval: float = _INTERVAL_SECONDS, timeout: float | None = None
    ) -> Any:
        """Wait for a response; close the connection if it is late, or if this thread is stopped."""
        seconds = self.seconds
        if seconds is None:
            seconds = _thread.seconds
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


def limits_of(raw: Any) -> PsycopgLimits:
    """Return the limits of a connection, from now on in place of its ``wait``."""
    found = raw.wait
    if type(found) is PsycopgLimits:
        return found
    limits: PsycopgLimits = PsycopgLimits(raw)
    raw.wait = limits
    raw.add_notice_handler(limits.on_diagnostic)
    return limits


def _on_checkin(raw: Any, _record: Any) -> None:
    """Remove the limit of a connection that returns to the pool; a listener of the pool."""
    found = getattr(raw, "wait", None)
    if type(found) is PsycopgLimits:
        found.seconds = None


def _on_connect(_engine: Any, _record: Any, _args: Any, parameters: dict[str, Any]) -> None:
    """Limit the time to connect during a call of Onceward, unless the app does; ``do_connect``."""
    seconds = _thread.seconds
    if seconds is not None and "PGCONNECT_TIMEOUT" not in os.environ:
        parameters.setdefault("connect_timeout", math.ceil(seconds))


class _limited_commit(watching_commit):  # noqa: N801 - used like a function
    """Watch a COMMIT, within its own time limit."""

    __slots__ = ("_before", "_limits", "_seconds")

    def __init__(
        self,
        raw: Any,
        limits: SessionLimits,
        *,
        is_read: bool = False,
        seconds: float | None = None,
    ) -> None:
        self._limits = found = limits_of(raw)
        self._seconds = seconds or limits.commit_seconds
        super().__init__(found, limits.abandoned, is_read=is_read)

    def __enter__(self) -> None:
        super().__enter__()
        self._before, self._limits.seconds = self._limits.seconds, self._seconds

    def __exit__(self, kind: object, *raised: object) -> None:
        self._limits.seconds = self._before
        super().__exit__(kind, *raised)


class PsycopgMessages(Messages):
    """Messages on connections of psycopg 3. ``raw_of`` finds psycopg's in that of the library."""

    has_limits = True
    listeners = (("checkin", _on_checkin), ("do_connect", _on_connect))

    def __init__(self, limits: SessionLimits, raw_of: Callable[[Any], Any]) -> None:
        self._limits = limits
        self._raw_of = raw_of

    def connecting(self, _pool: Any = None) -> AbstractContextManager[Any]:
        return _limited(_thread, self._limits.claim_seconds)

    def waiting(self, seconds: float) -> AbstractContextManager[Any]:
        return _limited(_thread, seconds)

    def begin_of(self, raw: Any) -> str | None:
        """Return the BEGIN with which a message can begin a transaction."""
        return begin_statement(raw)

    def send(self, connection: Any, raw: Any, statements: str) -> Any:  # noqa: ARG002
        """Run statements in one round trip; return the result of the last."""
        try:
            return send(raw, statements)
        except psycopg.Error as error:
            raise_outage(raw, error)
            raise

    def limit(self, connection: Any, unit: Sent | None = None) -> None:  # noqa: ARG002
        limits_of(self._raw_of(connection)).seconds = self._limits.statement_seconds

    def unlimit(self, connection: Any) -> None:
        limits_of(self._raw_of(connection)).seconds = None

    def claiming(self, connection: Any) -> AbstractContextManager[Any]:
        return _limited(limits_of(self._raw_of(connection)), self._limits.claim_seconds)

    def notices_of(self, connection: Any) -> CommitNotices | None:
        return limits_of(self._raw_of(connection))

    def begin_and_claim(self, connection: Any, call: str) -> int | None:
        raw = self._raw_of(connection)
        begin = self.begin_of(raw)
        if begin is None:
            return None
        limits = limits_of(raw)
        before, limits.seconds = limits.seconds, self._limits.claim_seconds
        try:
            return int(self.send(connection, raw, f"{begin};{call}").ntuples)
        finally:
            limits.seconds = before

    def refuse_autocommit(self, connection: Any) -> None:
        if self._raw_of(connection).autocommit:
            raise autocommit_refusal()

    def is_closed(self, connection: Any) -> bool:
        return bool(self._raw_of(connection).closed)

    def confirm(self, connection: Any) -> None:
        raw = self._raw_of(connection)
        is_idle = raw.autocommit and raw.pgconn.transaction_status == _IDLE
        with _limited_commit(raw, self._limits, is_read=True):
            self.send(connection, raw, CONFIRM if is_idle else f"{CONFIRM};COMMIT")

    def can_finish(self, connection: Any) -> bool:  # noqa: ARG002
        return True

    def finish_and_commit(self, connection: Any, statement: str) -> None:
        raw = self._raw_of(connection)
        limits = limits_of(raw)
        before, limits.seconds = limits.seconds, self._limits.commit_seconds
        try:
            with CommitWatch(limits, self._limits.abandoned) as watch:
                self.send(connection, raw, f"{statement};COMMIT")
            watch.raise_if_unknown()
        except Exception as error:
            if raw.closed or is_unknown_commit(error):
                lost = f"the connection was lost in COMMIT: {error}"
                raise CommitUnknownError(lost, is_cut=limits.was_cut) from error
            raise
        finally:
            limits.seconds = before

    def committing(
        self, connection: Any, *, is_read: bool = False, seconds: float | None = None
    ) -> AbstractContextManager[Any]:
        raw = self._raw_of(connection)
        return _limited_commit(raw, self._limits, is_read=is_read, seconds=seconds)

    def needs_rollback(self, driver: Any) -> bool:
        """Return whether there may be a transaction: psycopg asks in some twenty calls."""
        return bool(driver.pgconn.transaction_status != _IDLE)
