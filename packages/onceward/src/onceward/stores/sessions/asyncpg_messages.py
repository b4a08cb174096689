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
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from sqlalchemy.util import await_only

from onceward.errors import CommitUnknownError
from onceward.stores.errors import is_unknown_commit
from onceward.stores.postgres.params import rows_changed
from onceward.stores.replication import CommitNotices, watching_commit
from onceward.stores.sessions.messages import (
    CONFIRM,
    Messages,
    Sent,
    SessionLimits,
    autocommit_refusal,
)
from onceward.stores.sessions.sqlalchemy_engine import is_outage

T = TypeVar("T")

# The key of the pool's record of a connection, for what it has warned.
_NOTICES: Final = "onceward_notices"
# The same, for what ends the limit of its statements.
_LIMIT: Final = "onceward_limit"
_ROLLBACK_SECONDS: Final = 5.0
# How often late connections are looked for.
_LOOK_SECONDS: Final = 0.2


class _LateConnections:
    """Closes connections whose response is late, by one timer: one for each message costs more.

    The timer runs while something is waited for. It looks a few times a second.
    """

    __slots__ = ("_deadlines", "_timer", "_units")

    def __init__(self) -> None:
        # Of connections that wait for a response, in monotonic seconds.
        self._deadlines: dict[Any, float] = {}
        # By SQLAlchemy's adapter: the unit, and what each of its statements may take.
        self._units: dict[Any, tuple[Sent, float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, driver: Any, seconds: float) -> None:
        """Close a connection in ``seconds``, unless it is removed before."""
        self._deadlines[driver] = time.monotonic() + seconds
        if self._timer is None:
            self._look_later()

    def remove(self, driver: Any) -> bool:
        """Take a connection whose response has arrived; return False if it was late."""
        return self._deadlines.pop(driver, None) is not None

    def add_unit(self, adapter: Any, unit: Sent, seconds: float) -> None:
        """Close a connection while a statement of the unit takes longer, until it is removed."""
        self._units[adapter] = unit, seconds
        if self._timer is None:
            self._look_later()

    def remove_unit(self, adapter: Any) -> None:
        self._units.pop(adapter, None)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        now = time.monotonic()
        for driver, deadline in list(self._deadlines.items()):
            if deadline <= now:
                del self._deadlines[driver]
                driver.terminate()
        for adapter, (unit, seconds) in list(self._units.items()):
            # SQLAlchemy's adapter holds this lock while a statement runs.
            running: asyncio.Lock | None = getattr(adapter, "_execute_mutex", None)
            if now - unit.statement_at >= seconds and running is not None and running.locked():
                adapter.driver_connection.terminate()
        if self._deadlines or self._units:
            self._look_later()


# Of each event loop; a loop that has ended leaves nothing.
_late: "WeakKeyDictionary[asyncio.AbstractEventLoop, _LateConnections]" = WeakKeyDictionary()


def _late_connections() -> _LateConnections:
    """Return those of the running event loop."""
    loop = asyncio.get_running_loop()
    found = _late.get(loop)
    if found is None:
        found = _late[loop] = _LateConnections()
    return found


async def _in_time(
    driver: Any, waiting: Awaitable[T], seconds: float, commit: CommitNotices | None = None
) -> T:
    """Await a response; close the connection if it is late, or if this task is cancelled.

    ``commit`` are the notices of a connection that commits: they get whether it was cut.
    """
    late = _late_connections()
    late.add(driver, seconds)
    try:
        return await waiting
    except BaseException as error:
        is_cancelled = isinstance(error, asyncio.CancelledError)
        if is_cancelled:
            driver.terminate()
        if commit is not None:
            commit.was_cut = not late.remove(driver) or is_cancelled
        raise
    finally:
        late.remove(driver)


def _is_unsent(error: Exception) -> bool:
    """Check whether asyncpg refused to send: it has read that the server ends the connection."""
    return type(error).__name__ == "InternalClientError" and "cannot switch to" in str(error)


def notices_of(pooled: Any) -> CommitNotices:
    """Return the listener for warnings of a connection of the pool, from its first use on."""
    found: CommitNotices | None = pooled.info.get(_NOTICES)
    if found is None:
        driver = pooled.driver_connection
        found = pooled.info[_NOTICES] = CommitNotices(driver.get_server_pid())
        driver.add_log_listener(found.on_message)
    return found


class SharedTransaction:
    """The transaction of an asyncpg connection, as SQLAlchemy's adapter uses it."""

    __slots__ = ("_begun", "_driver", "_is_over", "_limits", "_notices", "last_statement")

    def __init__(self, pooled: Any, limits: SessionLimits, begun: Any = None) -> None:
        """``begun`` is asyncpg's own transaction, if the adapter has begun one."""
        self._driver = pooled.driver_connection
        self._notices = notices_of(pooled)
        self._limits = limits
        self._begun = begun
        self._is_over = False
        # Sent in one message with COMMIT.
        self.last_statement: str | None = None

    async def commit(self) -> None:
        """Send the last statement and COMMIT. If the statement fails, nothing is committed.

        Raises ``CommitUnknownError`` if the standby may not have the commit.
        """
        driver = self._driver
        with watching_commit(self._notices, self._limits.abandoned):
            try:
                await self._send_commit(self.last_statement)
            except BaseException:
                # The adapter forgets this transaction, and its connection goes to the pool.
                try:
                    if not driver.is_closed() and driver.is_in_transaction():
                        await driver.execute("ROLLBACK")
                except Exception:  # noqa: BLE001 - the first error tells whether COMMIT was sent
                    driver.terminate()
                except BaseException:
                    driver.terminate()
                    raise
                raise

    async def confirm(self) -> None:
        self._is_over = True
        with watching_commit(self._notices, self._limits.abandoned, is_read=True):
            await self._send_commit(CONFIRM)

    async def _send_commit(self, last: str | None) -> None:
        driver, limits = self._driver, self._limits
        if self._begun is None:
            ending = driver.execute("COMMIT" if last is None else f"{last};COMMIT")
        else:
            if last is not None:
                await _in_time(driver, driver.execute(last), limits.statement_seconds)
            ending = self._begun.commit()
        await _in_time(driver, ending, limits.commit_seconds, self._notices)

    async def rollback(self) -> None:
        if not self._is_over:
            begun, driver = self._begun, self._driver
            ending = driver.execute("ROLLBACK") if begun is None else begun.rollback()
            await _in_time(driver, ending, _ROLLBACK_SECONDS)


class time_limit:  # noqa: N801 - used like a function; a generator would cost more
    """``asyncio.timeout`` for a block of blocking code in SQLAlchemy's greenlet."""

    __slots__ = ("_timeout",)

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)

    def __enter__(self) -> None:
        await_only(self._timeout.__aenter__())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await_only(self._timeout.__aexit__(kind, error, trace))


def _on_checkin(_adapter: Any, record: Any) -> None:
    """End the limit of a connection that returns to the pool; a listener of the pool."""
    end: Callable[[], object] | None = record.info.pop(_LIMIT, None)
    if end is not None:
        end()


class AsyncpgMessages(Messages):
    """Messages on the connections of an engine with asyncpg, in SQLAlchemy's greenlet."""

    has_limits = True
    listeners = (("checkin", _on_checkin),)

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits

    def connecting(self, pool: Any = None) -> AbstractContextManager[Any]:
        """Limit the time to connect during the block, unless the pool has a connection."""
        if pool is not None and _has_idle_connection(pool):
            return nullcontext()
        return time_limit(self._limits.claim_seconds)

    def rolling_back(self) -> AbstractContextManager[Any]:
        return time_limit(_ROLLBACK_SECONDS + 1)

    def limit(self, connection: Any, unit: Sent | None = None) -> None:
        pooled, late = connection.connection, _late_connections()
        seconds = self._limits.statement_seconds
        if unit is None:
            driver = pooled.driver_connection
            late.add(driver, seconds)
            pooled.info[_LIMIT] = partial(late.remove, driver)
        else:
            unit.statement_at = time.monotonic()
            adapter = pooled.dbapi_connection
            late.add_unit(adapter, unit, seconds)
            pooled.info[_LIMIT] = partial(late.remove_unit, adapter)

    def notices_of(self, connection: Any) -> CommitNotices | None:
        return notices_of(connection.connection)

    def begin_and_claim(self, connection: Any, call: str) -> int | None:
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
        _set_transaction(adapter, SharedTransaction(pooled, self._limits))
        try:
            message = driver.execute(f"BEGIN;{call}")
            return rows_changed(await_only(_in_time(driver, message, self._limits.claim_seconds)))
        except Exception:
            if driver.is_closed():
                _set_transaction(adapter, None)
            raise

    def refuse_autocommit(self, connection: Any) -> None:
        if not connection.connection.driver_connection.is_in_transaction():
            raise autocommit_refusal()

    def is_closed(self, connection: Any) -> bool:
        return bool(connection.connection.driver_connection.is_closed())

    def confirm(self, connection: Any) -> None:
        pooled = connection.connection
        transaction = self._limited(pooled)
        if transaction is not None:
            await_only(transaction.confirm())
            return
        driver, notices, limits = pooled.driver_connection, notices_of(pooled), self._limits
        with watching_commit(notices, limits.abandoned, is_read=True):
            message = driver.execute(CONFIRM)
            await_only(_in_time(driver, message, limits.commit_seconds, notices))

    def can_finish(self, connection: Any) -> bool:
        adapter = connection.connection.dbapi_connection
        begun = getattr(adapter, "_transaction", None)
        return (
            isinstance(begun, SharedTransaction)
            and begun._begun is None  # noqa: SLF001
            and not adapter.driver_connection.is_closed()
        )

    def finish_and_commit(self, connection: Any, statement: str) -> None:
        pooled = connection.connection
        adapter = pooled.dbapi_connection
        shared: SharedTransaction = adapter._transaction  # noqa: SLF001
        shared.last_statement = statement
        _set_transaction(adapter, None)
        try:
            await_only(shared.commit())
        except CommitUnknownError:
            raise
        except Exception as error:
            if _is_unsent(error):
                raise
            is_lost = adapter.driver_connection.is_closed() or is_outage(error)
            if is_lost or is_unknown_commit(error):
                is_cut = notices_of(pooled).was_cut
                lost = f"the connection was lost in COMMIT: {error}"
                raise CommitUnknownError(lost, is_cut=is_cut) from error
            raise

    def committing(
        self,
        connection: Any,
        *,
        is_read: bool = False,  # noqa: ARG002
        seconds: float | None = None,  # noqa: ARG002
    ) -> AbstractContextManager[Any]:
        """Have the transaction that the adapter has begun limit its COMMIT."""
        self._limited(connection.connection)
        return nullcontext()

    def _limited(self, pooled: Any) -> SharedTransaction | None:
        """Limit the transaction that SQLAlchemy's adapter has begun; None if there is none."""
        adapter: Any = pooled.dbapi_connection
        begun = getattr(adapter, "_transaction", None)
        if begun is None or isinstance(begun, SharedTransaction):
            return begun
        limited = adapter._transaction = SharedTransaction(  # noqa: SLF001
            pooled, self._limits, begun
        )
        return limited


def _set_transaction(adapter: Any, transaction: SharedTransaction | None) -> None:
    """Set the transaction that an adapter believes to have begun."""
    adapter._transaction = transaction  # noqa: SLF001 - see the first lines of this module
    if hasattr(adapter, "_started"):  # SQLAlchemy 2.0
        adapter._started = transaction is not None  # noqa: SLF001


def _has_idle_connection(pool: Any) -> bool:
    """Return whether a pool has a connection that it lends without a message to the server.

    Then there is nothing to limit, and a time limit costs some twenty function calls. Attributes of
    SQLAlchemy's pools say whether a connection is tested or may be too old.
    """
    idle: Callable[[], int] | None = getattr(pool, "checkedin", None)
    is_tested = getattr(pool, "_pre_ping", True) or getattr(pool, "_recycle", 0) != -1
    return idle is not None and not is_tested and idle() > 0
