"""The connections of a store on PostgreSQL: the pool, what is checked of each, and replication."""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Literal, Self, TypeVar

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.ports import DurabilityMetrics, EpochReading, StoreMetrics
from onceward.stores.errors import unavailable
from onceward.stores.parts import Schema
from onceward.stores.postgres.driver import NEVER, Driver, Pool
from onceward.stores.postgres.epoch import EpochReader
from onceward.stores.postgres.hosts import replaced
from onceward.stores.postgres.session import UsedSession
from onceward.stores.replication import (
    CONFIRMING_COMMIT,
    AbandonedCommits,
    CommitWatch,
    ConfirmedCommits,
    ReplicationBarrier,
    unconfirmed,
)

T = TypeVar("T")

# How old a reading of the server's settings may be when a record is replayed, and how long after a
# probe of a silent server the next one begins.
_SETTINGS_SECONDS: Final = 1.0
_PROBE_SECONDS: Final = 1.0

# The process id alone may be the same on two servers behind one proxy.
_BACKEND: Final = "SELECT pg_backend_pid(), pg_postmaster_start_time()::text"
# How long a notification may take. If it is late because the server is slow, it comes with the
# response to the next statement.
_NOTIFICATION_SECONDS: Final = 2.0
# Poolers without support of prepared statements: the statement of another client is there, or
# one's own is not.
_FOREIGN_STATEMENTS: Final = ("26000", "42P05")

_POOLER: Final = (
    "the connection pooler in front of PostgreSQL gives each transaction another connection: "
    "use session pooling (PgBouncer: pool_mode = session), or connect without the pooler"
)


class Connections:
    """Lends connections to the writable server, and knows what it guarantees about commits."""

    def __init__(
        self,
        driver: Driver,
        schema: Schema,
        epochs: EpochReader,
        *,
        max_connections: int,
        acquire_seconds: float,
        required: Literal["replicated"] | None,
    ) -> None:
        self.driver = driver
        self.epochs = epochs
        self.limit = max_connections
        # What the server has to guarantee.
        self.required = required
        self.abandoned = AbandonedCommits(max_connections)
        self._schema = schema
        self._acquire_seconds = acquire_seconds
        self._pool: Pool | None = None
        self._metrics: StoreMetrics | None = None
        self._durability_metrics: DurabilityMetrics | None = None
        # From the first check on, each acquisition checks again.
        self._is_checked = False
        self.commits = ConfirmedCommits()
        self._barrier = ReplicationBarrier(self.commits, self._confirm)
        self._probe: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        # False until the tables exist.
        self._reads_epochs = False
        # Whether connections have other process ids than their backends: of a pooler.
        self._has_pooler = False

    def report_to(self, metrics: StoreMetrics) -> None:
        self._metrics = metrics
        self._durability_metrics = metrics if isinstance(metrics, DurabilityMetrics) else None
        if self._durability_metrics is not None:
            self.abandoned.report = self._durability_metrics.commits_abandoned

    @property
    def is_open(self) -> bool:
        return self._pool is not None

    async def open(self) -> None:
        """Open a connection, for the migrations, and refuse a pooler that shares it."""
        on_wait = None if self._metrics is None else self._metrics.pool_waited
        self._reads_epochs = self._is_checked = self._has_pooler = False
        pool = self.driver.new_pool(self.limit, on_wait, self._on_connect, self._on_silence)
        try:
            await self._fill(pool, 1)
        except BaseException:
            # Its timer and threads would outlive it.
            await pool.close(timeout_seconds=0)
            raise
        self._pool = pool
        await self._refuse_transaction_pooling()

    async def check(self, least: int) -> None:
        """Open the ``least`` connections that are kept, now that the tables exist.

        Raises ``ConfigurationError`` if the server guarantees too little.
        """
        assert self._pool is not None  # noqa: S101 - it is open
        self._reads_epochs = True
        # Their server is not known yet: another one may have been promoted since.
        self._pool.renew()
        await self._fill(self._pool, least)
        await self.apart(self.read_epoch)
        problem = self._missing_durability()
        if problem is not None:
            raise ConfigurationError(f"the database is not replicated as required: {problem}")
        self._is_checked = True

    async def _refuse_transaction_pooling(self) -> None:
        """Raise ``ConfigurationError`` if a pooler gives each transaction another connection.

        Needs as many connections as the migrations: one of the pool, and one more.
        """
        connection = await self.acquire()
        try:
            backend = await _session_backend(self.driver, connection)
            self._has_pooler = backend != connection.backend
            connection.backend = backend
        except BaseException as error:
            connection.terminate()
            if isinstance(error, (*self.driver.outages, *self.driver.errors)):
                raise unavailable(error) from error
            raise
        finally:
            self.release(connection)

    async def _fill(self, pool: Pool, least: int) -> None:
        outages, errors = self.driver.outages, self.driver.errors
        refusals: tuple[type[BaseException], ...] = (*outages, *errors, ValueError)
        try:
            await pool.fill(least)
        except refusals as error:
            # asyncpg raises outages that are a ValueError, too: for the URL, not for the server.
            if isinstance(error, outages) and not isinstance(error, ValueError):
                raise unavailable(error) from error
            raise ConfigurationError(f"cannot connect to PostgreSQL: {error}") from error

    async def close(self) -> None:
        """Wait for running transactions, then disconnect."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.cancel()
            await asyncio.wait({probe})
        if self._pool is not None:
            try:
                await self._pool.close(timeout_seconds=10)
            finally:
                self._pool = None  # not earlier: running units return their connections

    # -- lending ------------------------------------------------------------------------------

    def take(self) -> Any:
        """Return a connection that is free now, or None: then use ``acquire``."""
        pool = self._pool
        if pool is None or self.abandoned.is_full or self.required is not None:
            return None
        return pool.take()

    async def acquire(self) -> Any:
        if self._pool is None:
            raise StoreUnavailableError("the store is not open")
        try:
            if self.abandoned.is_full:
                await self.abandoned.check(self.driver.connect)
            connection = await self._pool.acquire(self._acquire_seconds)
        except (*self.driver.outages, *self.driver.errors) as error:
            raise unavailable(error) from error
        if self.required is not None and self._is_checked:
            await self._refuse_weak_server(connection)
        return connection

    async def apart(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run a function with a connection, outside any guarded request."""
        connection = await self.acquire()
        try:
            return await work(connection)
        except self.driver.outages as error:
            raise unavailable(error) from error
        except asyncio.CancelledError:
            # Without this, asyncpg asks the server over a second connection to cancel the query,
            # and a loop that is ending would leave both open.
            connection.terminate()
            raise
        finally:
            self.release(connection)

    def release(self, connection: Any) -> None:
        """Return the connection of a unit that has ended to the pool; close it if there is none."""
        if self._pool is None:
            connection.terminate()
        else:
            self._pool.release(connection)

    async def undo(self, connection: Any, used: UsedSession | None = None) -> None:
        """Roll back, clean and release the connection; close it if that fails."""
        if connection.is_read_only:
            connection.terminate()
            if self._pool is not None:
                self._pool.renew()
        await self.clean_and_release(connection, used or UsedSession())

    async def clean_and_release(
        self, connection: Any, used: UsedSession, tag: str | None = None
    ) -> None:
        """Clean and release a connection; without the ``tag`` of COMMIT, roll back first.

        It is closed if that fails.
        """
        try:
            if tag is None:
                tag = await self.driver.roll_back(connection, used.ending("ROLLBACK"))
            await used.drop_names(connection, tag)
            if used.is_raw and not self.driver.restore(connection):
                connection.terminate()
        except BaseException as error:
            with suppress(*self.driver.outages):  # closed already
                connection.terminate()
            self.release(connection)
            if not isinstance(error, Exception):
                raise
        else:
            self.release(connection)

    # -- which server it is -------------------------------------------------------------------

    async def _on_connect(self, connection: Any) -> None:
        if self._has_pooler:
            connection.backend = (await connection.fetchrow("SELECT pg_backend_pid()"))[0]
        if not self._reads_epochs:
            return
        before = self.epochs.identity
        reading = await self.read_epoch(connection)
        is_other = reading.identity is not None and reading.identity != before
        if (is_other or reading.went_back) and before is not None and self._pool is not None:
            # Older connections may lead to a server that was replaced.
            is_promoted = _server_of(reading.identity) != _server_of(before)
            self._pool.renew(cut=is_promoted)
            if is_promoted:
                self.abandoned.clear()

    def _on_silence(self) -> None:
        """Look for a promoted server while this one does not respond."""
        now = time.monotonic()
        if self._probe is None and self._reads_epochs and now >= self._probe_at:
            self._probe_at = now + _PROBE_SECONDS
            self._probe = asyncio.create_task(self._find_promoted())

    async def _find_promoted(self) -> None:
        """Open a connection: if it leads to another server, the pool is renewed."""
        try:
            connection = await self.driver.connect()
            try:
                await self._on_connect(connection)
            finally:
                connection.terminate()
        except (*self.driver.outages, *self.driver.errors):
            pass  # requests report it
        finally:
            self._probe = None

    async def read_epoch(self, connection: Any) -> EpochReading:
        """Read the epoch, and with it what the server guarantees.

        Raises an outage if another server was promoted, and closes the connection.
        """
        reading = await self.epochs.read(
            self._schema.names, connection.fetchrow, self.driver.errors, self.driver.outages
        )
        durability = self.epochs.durability
        if self._durability_metrics is not None and durability is not None:
            self._durability_metrics.durability_read(is_replicated=durability.is_replicated)
        if reading.is_replaced:
            connection.terminate()
            raise replaced()
        return reading

    # -- replication --------------------------------------------------------------------------

    @property
    def waits_for_standby(self) -> bool:
        """Whether COMMIT waits for a synchronous standby, as far as is known."""
        durability = self.epochs.durability
        return durability is not None and durability.waits_for_standby

    async def read_durability(self) -> None:
        """Read what the server guarantees, and which of the cut commits have ended."""
        if len(self.abandoned):
            with suppress(StoreUnavailableError, *self.driver.outages, *self.driver.errors):
                await self.abandoned.check(self.driver.connect)
        await self.apart(self.read_epoch)

    def _missing_durability(self) -> str | None:
        durability = self.epochs.durability
        if self.required is None or (durability is not None and durability.is_replicated):
            return None
        if durability is None:
            return "its settings are unknown"
        return "; ".join(durability.weaknesses())

    async def _refuse_weak_server(self, connection: Any) -> None:
        """Raise if the server does not guarantee what is required; read it again once a second."""
        try:
            if self.epochs.durability_at + _SETTINGS_SECONDS <= time.monotonic():
                await self.read_epoch(connection)
            problem = self._missing_durability()
        except BaseException as error:
            connection.terminate()
            self.release(connection)
            if isinstance(error, self.driver.outages):
                raise unavailable(error) from error
            raise
        if problem is not None:
            self.release(connection)
            raise StoreUnavailableError(
                f"the database is not replicated as required: {problem}", reason="not_replicated"
            )

    def is_outdated(self, connection: Any) -> bool:
        """Check whether another server was reached since the connection was opened."""
        return self._pool is not None and self._pool.is_outdated(connection)

    async def confirm_replicated(self) -> None:
        """Wait until what was read before is on the synchronous standby, if there is one.

        Raises ``StoreUnavailableError`` if that is not known in time.
        """
        epochs = self.epochs
        if epochs.durability is None or epochs.durability_at + _SETTINGS_SECONDS < time.monotonic():
            await self.apart(self.read_epoch)
        if not self.waits_for_standby:
            return
        if self.driver.is_sync:  # in the thread of a request there is no event loop
            started = self.commits.mark()
            await self._confirm()
            self.commits.confirm(started)
        else:
            await self._barrier.wait()

    async def _confirm(self) -> None:
        """Commit something that waits for the standby."""
        connection, driver = await self.acquire(), self.driver
        try:
            with sending_commit(self, connection) as commit:
                await connection.fetch(CONFIRMING_COMMIT)
            commit.raise_if_unknown(is_read=True)
        except driver.outages as error:
            raise unconfirmed(str(error) or type(error).__name__) from error
        except driver.errors as error:
            raise unconfirmed(
                f"{error} (GRANT EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text))"
            ) from error
        finally:
            self.release(connection)


async def _session_backend(driver: Driver, first: Any) -> int:
    """Return the process id of the backend of a connection, which it keeps while it is idle.

    Raises ``ConfigurationError`` if a connection pooler gives each transaction another server
    connection, and what the driver raises. Onceward remembers facts about a connection: the
    timeline of its server, its backend, prepared statements, ``LISTEN``. With transaction pooling
    they are about a server connection that the next transaction may not get.

    Which server connection a pooler takes for a transaction cannot be controlled from outside: two
    statements may reach the same one by chance. A notification can tell. PostgreSQL sends it to the
    server connection that has run ``LISTEN``, at any time; a pooler can pass it on to the client
    only if the two belong together while the client is idle, which is session pooling.
    """
    second = await driver.connect()
    try:
        backend = await _kept_backend(driver, first, second)
    except Exception as error:
        if getattr(error, "sqlstate", None) not in _FOREIGN_STATEMENTS:
            raise
        backend = None
    finally:
        second.terminate()
    if backend is None:
        raise ConfigurationError(_POOLER)
    return backend


async def _kept_backend(driver: Driver, first: Any, second: Any) -> int | None:
    """Return the backend of ``first``; None if it belongs to other clients, too."""
    backend = tuple(await first.fetchrow(_BACKEND))
    # Mostly enough to see a pooler: it gives the server connection that was used last to the next
    # client.
    if tuple(await second.fetchrow(_BACKEND)) == backend:
        return None
    channel = f"onceward_pooling_{secrets.token_hex(8)}"

    async def notify() -> None:
        # Not like other commits: it would wait for a synchronous standby that is away.
        await second.execute(
            f"BEGIN;SET LOCAL synchronous_commit = off;SELECT pg_notify('{channel}', '');COMMIT"
        )

    is_kept = await driver.is_notified(first, channel, notify, _NOTIFICATION_SECONDS)
    return int(backend[0]) if is_kept else None


class sending_commit(CommitWatch):  # noqa: N801 - used like a function
    """Watch a COMMIT on a connection of the pool, within its own time limit."""

    __slots__ = ("_connection", "_connections")

    def __init__(self, connections: Connections, connection: Any) -> None:
        super().__init__(connection, connections.abandoned)
        self._connections = connections
        self._connection = connection

    def __enter__(self) -> Self:
        super().__enter__()
        driver = self._connections.driver
        self._connection.deadline = driver.time.now + driver.deadlines.commit_seconds
        return self

    def __exit__(self, kind: object, *raised: object) -> None:
        connection, driver = self._connection, self._connections.driver
        connection.deadline = NEVER
        if kind is None:
            self.is_outdated = self._connections.is_outdated(connection)
        elif not (isinstance(kind, type) and issubclass(kind, (*driver.errors, *driver.outages))):
            # Cancelled while COMMIT may wait for a standby. A request to cancel would end the wait.
            # Not cut: that would say that the server is silent, and close idle connections.
            connection.terminate()
            self._connections.abandoned.add(connection.backend)
        super().__exit__(kind, *raised)


def _server_of(identity: str | None) -> list[str]:
    """Return the part of an identity that differs between servers: cluster and timeline."""
    return [] if identity is None else identity.split("/")[:2]
