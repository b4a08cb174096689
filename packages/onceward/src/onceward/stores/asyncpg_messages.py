"""Lets statements of Onceward share a message with the BEGIN and COMMIT of SQLAlchemy's sessions.

SQLAlchemy's adapter for asyncpg sends BEGIN, each statement and COMMIT separately. Claim and record
would be two more messages, and each costs about as much as the handler's insert. So the first
message of a guarded transaction is BEGIN and the claim, the last one is the record and COMMIT
(docs/decisions/0021-guard-after-dependencies.md has the numbers).

The adapter keeps its transaction in ``_transaction`` and calls ``commit`` and ``rollback`` of it;
``SharedTransaction`` takes that place, so everything else works as with SQLAlchemy's own. An
adapter that has begun already, has another isolation level or no such attribute gets separate
messages.

asyncpg asks the server to cancel what runs if a task is cancelled or a time-out expires. A COMMIT
that waits for a standby must not be cancelled: PostgreSQL would show the commit although the
standby may not have it. So connections are closed instead, here, before asyncpg can ask.
"""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy import Connection
from sqlalchemy.util import await_only

from onceward.errors import CommitUnknownError
from onceward.stores.replication import CommitNotices, unconfirmed
from onceward.stores.session_limits import CONFIRM, SessionLimits

__all__ = [
    "LateConnections",
    "LimitedTransaction",
    "SharedTransaction",
    "begin_with",
    "confirm_read",
    "in_commit_time",
    "in_time",
    "late_connections",
    "limited_transaction",
    "notices_of",
]

T = TypeVar("T")

# The key of the pool's record of a connection, for what it has warned.
_NOTICES: Final = "onceward_notices"
_ROLLBACK_SECONDS: Final = 5.0
# How often late connections are looked for.
_LOOK_SECONDS: Final = 0.2


class Watched(Protocol):
    """Something that may be late."""

    def look(self, now: float) -> None:
        """Close the connection if it is late. ``now`` is in monotonic seconds."""


class LateConnections:
    """Closes connections whose response is late, by one timer: one for each message costs more.

    The timer runs while something is waited for. It looks a few times a second.
    """

    __slots__ = ("_deadlines", "_timer", "_watched")

    def __init__(self) -> None:
        self._deadlines: dict[Any, float] = {}
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, watched: Watched) -> None:
        """Call ``look`` a few times a second, until ``leave``."""
        self._watched.add(watched)
        if self._timer is None:
            self._look_later()

    def leave(self, watched: Watched) -> None:
        """Call ``look`` no more."""
        self._watched.discard(watched)

    def add(self, driver: Any, seconds: float) -> None:
        """Close a connection in ``seconds``, unless it is removed before."""
        self._deadlines[driver] = time.monotonic() + seconds
        if self._timer is None:
            self._look_later()

    def remove(self, driver: Any) -> bool:
        """Take a connection whose response has arrived; return False if it was late."""
        return self._deadlines.pop(driver, None) is not None

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for driver, deadline in list(self._deadlines.items()):
            if deadline <= now:
                del self._deadlines[driver]
                driver.terminate()
        for watched in list(self._watched):
            watched.look(now)
        if self._deadlines or self._watched:
            self._look_later()


# Of each event loop; a loop that has ended leaves nothing.
_late: "WeakKeyDictionary[asyncio.AbstractEventLoop, LateConnections]" = WeakKeyDictionary()


def late_connections() -> LateConnections:
    """Return those of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _late.get(loop)
    if found is None:
        found = _late[loop] = LateConnections()
    return found


async def in_time(driver: Any, waiting: Awaitable[T], seconds: float) -> T:
    """Await a response; close the connection if it is late, or if this task is cancelled."""
    late = late_connections()
    late.add(driver, seconds)
    try:
        return await waiting
    except asyncio.CancelledError:
        driver.terminate()
        raise
    finally:
        late.remove(driver)


async def in_commit_time(
    driver: Any, waiting: Awaitable[T], notices: "SessionNotices", limits: SessionLimits
) -> T:
    """Await the response to COMMIT as ``in_time`` does.

    The server goes on with a commit that is cut, so it is counted, and ``notices.was_cut`` is set.
    """
    late = late_connections()
    late.add(driver, limits.commit_seconds)
    try:
        return await waiting
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled:
            driver.terminate()
        if not late.remove(driver) or is_cancelled:
            notices.was_cut = True
            limits.abandoned.add(notices.backend)
        raise
    finally:
        late.remove(driver)


class SessionNotices(CommitNotices):
    """What is noted of a connection of the pool."""

    __slots__ = ("backend", "was_cut")

    def __init__(self, backend: int) -> None:
        super().__init__()
        # Whether the connection was closed during COMMIT.
        self.was_cut = False
        # Its process id; of a pooler, if there is one, until the server's was read.
        self.backend = backend


def notices_of(pooled: Any) -> SessionNotices:
    """Return what notes the warnings of a connection of the pool, from its first use on."""
    found: SessionNotices | None = pooled.info.get(_NOTICES)
    if found is None:
        driver = pooled.driver_connection
        found = pooled.info[_NOTICES] = SessionNotices(driver.get_server_pid())
        driver.add_log_listener(found.on_message)
    return found


class _Guard(Protocol):
    """Decides who may end the transaction; a ``GuardedUnit``."""

    def refuse_connection_commit(self) -> None:
        """Raise if the handler commits the session's connection."""

    def note_connection_rollback(self) -> None:
        """Note a rollback of the connection."""


class SharedTransaction:
    """The transaction of an asyncpg connection, as SQLAlchemy's adapter uses it."""

    __slots__ = ("_driver", "_guard", "_is_over", "_limits", "_notices", "last_statement")

    def __init__(
        self, driver: Any, guard: _Guard, notices: SessionNotices, limits: SessionLimits
    ) -> None:
        self._driver = driver
        self._guard = guard
        self._notices = notices
        self._limits = limits
        self._is_over = False
        # Sent in one message with COMMIT.
        self.last_statement: str | None = None

    @property
    def was_cut(self) -> bool:
        """Whether the connection was closed during COMMIT."""
        return self._notices.was_cut

    async def commit(self) -> None:
        """Send the last statement and COMMIT. If the statement fails, nothing is committed.

        A commit of the handler is refused, and rolls back. Raises ``CommitUnknownError`` if the
        standby may not have the commit.
        """
        last, driver, notices = self.last_statement, self._driver, self._notices
        try:
            self._guard.refuse_connection_commit()
            notices.has_warned = False
            message = "COMMIT" if last is None else f"{last};COMMIT"
            await in_commit_time(driver, driver.execute(message), notices, self._limits)
        except BaseException:
            # The adapter forgets this transaction, and its connection goes back to the pool.
            try:
                if not driver.is_closed() and driver.is_in_transaction():
                    await driver.execute("ROLLBACK")
            except BaseException:
                driver.terminate()
                raise
            raise
        _check(notices)

    async def confirm(self) -> None:
        """Commit what was read, so that a synchronous standby has it too. Raises if it may not."""
        self._is_over = True
        self._notices.has_warned = False
        message = self._driver.execute(f"{CONFIRM};COMMIT")
        await in_commit_time(self._driver, message, self._notices, self._limits)
        _check_read(self._notices)

    async def rollback(self) -> None:
        """Send ROLLBACK."""
        self._guard.note_connection_rollback()
        if not self._is_over:
            await in_time(self._driver, self._driver.execute("ROLLBACK"), _ROLLBACK_SECONDS)


class LimitedTransaction:
    """asyncpg's transaction of a connection whose BEGIN shares no message, within time limits."""

    __slots__ = ("_driver", "_is_over", "_limits", "_notices", "_transaction")

    def __init__(self, pooled: Any, transaction: Any, limits: SessionLimits) -> None:
        self._driver = pooled.driver_connection
        self._transaction = transaction
        self._notices = notices_of(pooled)
        self._limits = limits
        self._is_over = False

    @property
    def was_cut(self) -> bool:
        """Whether the connection was closed during COMMIT."""
        return self._notices.was_cut

    async def commit(self) -> None:
        """Commit. Raises ``CommitUnknownError`` if the standby may not have the commit."""
        self._notices.has_warned = False
        ending = self._transaction.commit()
        await in_commit_time(self._driver, ending, self._notices, self._limits)
        _check(self._notices)

    async def confirm(self) -> None:
        """Commit what was read, so that a synchronous standby has it too. Raises if it may not."""
        self._is_over = True
        self._notices.has_warned = False
        await in_time(self._driver, self._driver.execute(CONFIRM), self._limits.statement_seconds)
        ending = self._transaction.commit()
        await in_commit_time(self._driver, ending, self._notices, self._limits)
        _check_read(self._notices)

    async def rollback(self) -> None:
        """Roll back."""
        if not self._is_over:
            await in_time(self._driver, self._transaction.rollback(), _ROLLBACK_SECONDS)


def _check(notices: CommitNotices) -> None:
    if notices.has_warned:
        raise CommitUnknownError("the commit may not have been replicated")


def _check_read(notices: CommitNotices) -> None:
    if notices.has_warned:
        raise unconfirmed("the standby did not confirm it")


async def confirm_read(pooled: Any, limits: SessionLimits) -> None:
    """Confirm what was read on a connection in autocommit mode. Raises if it may be lost."""
    driver, notices = pooled.driver_connection, notices_of(pooled)
    notices.has_warned = False
    await in_commit_time(driver, driver.execute(CONFIRM), notices, limits)
    _check_read(notices)


def limited_transaction(
    pooled: Any, limits: SessionLimits
) -> SharedTransaction | LimitedTransaction | None:
    """Limit the transaction that SQLAlchemy's adapter has begun; None if there is none."""
    adapter: Any = pooled.dbapi_connection
    begun = getattr(adapter, "_transaction", None)
    if begun is None or isinstance(begun, SharedTransaction | LimitedTransaction):
        return begun
    limited = adapter._transaction = LimitedTransaction(pooled, begun, limits)  # noqa: SLF001
    return limited


def begin_with(
    connection: Connection, statement: str, guard: _Guard, limits: SessionLimits
) -> tuple[SharedTransaction, str] | None:
    """Send BEGIN and a statement in one message; return the transaction and the command tag.

    ``guard`` is asked before each COMMIT, and gets each ROLLBACK of the connection. ``limits`` are
    for all messages of the transaction but those of the handler.
    Returns None if this connection cannot do it. Runs in SQLAlchemy's greenlet.
    """
    pooled = connection.connection
    adapter: Any = pooled.dbapi_connection
    if (
        getattr(adapter, "_transaction", adapter) is not None  # begun, or no such attribute
        or getattr(adapter, "isolation_level", adapter) not in (None, "read_committed")
        or adapter.readonly
        or adapter.deferrable
    ):
        return None
    driver = adapter.driver_connection
    shared = SharedTransaction(driver, guard, notices_of(pooled), limits)
    adapter._transaction = shared  # noqa: SLF001 - see the first lines of this module
    if hasattr(adapter, "_started"):  # SQLAlchemy 2.0
        adapter._started = True  # noqa: SLF001
    try:
        message = driver.execute(f"BEGIN;{statement}")
        return shared, await_only(in_time(driver, message, limits.claim_seconds))
    except Exception:
        if driver.is_closed():
            # Let SQLAlchemy find out, so that it discards the connections of the same age.
            adapter._transaction = None  # noqa: SLF001
            if hasattr(adapter, "_started"):
                adapter._started = False  # noqa: SLF001
            connection.exec_driver_sql("SELECT 1")
        raise
