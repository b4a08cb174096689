"""The store on PostgreSQL. Guarding a request costs no additional round trip."""

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Literal, TypedDict, TypeVar, Unpack

from onceward.core.decision import HELD, Held
from onceward.core.idempotency_record import Record, RecordId
from onceward.core.storable_text import check_storable
from onceward.core.table_names import TableNames
from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.ports import (
    Claimed,
    DurabilityMetrics,
    EpochReading,
    Found,
    KeyClaimed,
    Notifier,
    Params,
    Row,
    StoreMetrics,
    TransactionT_co,
)
from onceward.stores.base import BaseStore
from onceward.stores.errors import is_read_only, statement_error, unavailable
from onceward.stores.migrations import MIGRATION_LOCK
from onceward.stores.postgres.chunk import PostgresChunk
from onceward.stores.postgres.driver import NEVER, Connection, Deadlines, Driver, DriverMaker, Pool
from onceward.stores.postgres.epoch import EpochReader
from onceward.stores.postgres.hosts import check_dsn, replaced
from onceward.stores.postgres.params import (
    claim_literals,
    instant_literal,
    positional,
)
from onceward.stores.postgres.pooling import refuse_transaction_pooling
from onceward.stores.postgres.session import UsedSession, outlives_statement
from onceward.stores.postgres.unit_of_work import PostgresTransaction, PostgresUnit
from onceward.stores.replication import (
    CONFIRMING_COMMIT,
    AbandonedCommits,
    ConfirmedCommits,
    Durability,
    ReplicationBarrier,
    unconfirmed,
)
from onceward.stores.rows import record_of
from onceward.stores.urls import parse_store_url
from onceward_protocol.storage.migrations import Migration, run_steps_async
from onceward_protocol.storage.sql_files import Queries

__all__ = ["BasePostgresStore", "ChunkPostgresStore", "PostgresOptions", "PostgresStore"]

_log = logging.getLogger("onceward.stores")

T = TypeVar("T")

# onceward_claim returns its result as a number of rows. Claimed: whether it has an expired record.
_CLAIMED_TAGS: Final = {"SELECT 0": False, "SELECT 3": True}
_HELD_TAG: Final = "SELECT 2"

# How old a reading of the server's settings may be when a record is replayed, and how long after a
# probe of a silent server the next one begins.
_SETTINGS_SECONDS: Final = 1.0
_PROBE_SECONDS: Final = 1.0

# How long migrations wait for those of another process without a word.
_LOCK_SECONDS: Final = 10.0
_LOCK_IS_HELD: Final = (
    "waiting for the migrations of another process. If none is running, its commit waits for a "
    "synchronous standby: SELECT pid, wait_event FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
)
_COMMIT_WAITS: Final = (
    "the server waits for a synchronous standby that is absent (SELECT * FROM "
    "pg_stat_replication), or does not respond. When it is back, the migrations are there; start "
    "again then"
)


class PostgresOptions(TypedDict, total=False):
    """Options of the stores on PostgreSQL; see ``BasePostgresStore``."""

    table_prefix: str | None
    schema: str | None
    migrations: Sequence[Migration]
    min_connections: int
    max_connections: int
    acquire_seconds: float
    connect_seconds: float
    claim_seconds: float
    statement_seconds: float
    commit_seconds: float
    require_durability: Literal["replicated"] | None


class BasePostgresStore(BaseStore[TransactionT_co]):
    """The store on PostgreSQL, on any driver.

    BEGIN and the claim share one message; so do the record, the audit event and COMMIT. Both are
    sent as text with literals (see ``params``), because asyncpg cannot pipeline.
    """

    knows_durability = True

    def __init__(
        self,
        url: str,
        *,
        driver: DriverMaker,
        table_prefix: str | None = None,
        schema: str | None = None,
        migrations: Sequence[Migration] = (),
        min_connections: int = 1,
        max_connections: int = 16,
        acquire_seconds: float = 10.0,
        connect_seconds: float = 5.0,
        claim_seconds: float = 5.0,
        statement_seconds: float = 30.0,
        commit_seconds: float = 10.0,
        require_durability: Literal["replicated"] | None = None,
    ) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects.

        A connection whose server is silent for longer than ``claim_seconds``, ``commit_seconds``
        or, in any other statement, ``statement_seconds`` is closed; 0 is no limit. The URL may have
        several hosts: the writable one is used, and the newest of two. ``require_durability``
        refuses a server that does not wait for a synchronous standby.

        Onceward's tables are in ``schema`` (default: ``onceward``), which is created if it is
        missing. In ``public`` their names begin with ``onceward_``, and wherever ``table_prefix``
        is given, with that. Both may be options of the URL instead.
        """
        target = parse_store_url(url)
        if target.database != "postgresql":
            raise ConfigurationError(
                f"{type(self).__name__} needs a URL such as postgresql://user@host/name"
            )
        check_dsn(target.location)
        super().__init__("postgresql", target.names(table_prefix, schema), migrations)
        self._epochs = EpochReader()
        self.driver: Driver = driver(
            target.location,
            Deadlines(
                connect_seconds,
                claim_seconds or math.inf,
                statement_seconds or math.inf,
                commit_seconds or math.inf,
                self._epochs.timelines,
            ),
        )
        self._min = min_connections
        self._max = max_connections
        self._acquire_seconds = acquire_seconds
        self._pool: Pool | None = None
        self._metrics: StoreMetrics | None = None
        self._durability_metrics: DurabilityMetrics | None = None
        self._required = require_durability
        # From the first check on, each acquisition checks again.
        self._is_checked = False
        self._commits = ConfirmedCommits()
        self._barrier = ReplicationBarrier(self._commits, self._commit_and_confirm)
        self._abandoned = AbandonedCommits(max_connections)
        self._probe: asyncio.Task[None] | None = None
        self._probe_at = 0.0
        # False until the tables exist.
        self._reads_epochs = False
        # Whether connections have other process ids than their backends: of a pooler.
        self._has_pooler = False

    @property
    def max_connections(self) -> int:
        """How many transactions can be open at once."""
        return self._max

    def report_to(self, metrics: StoreMetrics) -> None:
        """Report waits for a connection to ``metrics``. Call it before ``open``.

        If they are ``DurabilityMetrics``, what the database guarantees is reported, too.
        """
        self._metrics = metrics
        self._durability_metrics = metrics if isinstance(metrics, DurabilityMetrics) else None
        if self._durability_metrics is not None:
            self._abandoned.report = self._durability_metrics.commits_abandoned

    async def open(self) -> None:
        """Connect and bring the schema up to date. Idempotent."""
        if self._pool is not None:
            if not self.schema.is_complete:
                await self._migrate()
            return
        on_wait = None if self._metrics is None else self._metrics.pool_waited
        self._reads_epochs = self._is_checked = self._has_pooler = False
        pool = self.driver.new_pool(self._max, on_wait, self._on_connect, self._on_silence)
        try:
            await self._fill(pool)
        except BaseException:
            # Its timer and threads would outlive it.
            await pool.close(timeout_seconds=0)
            raise
        self._pool = pool
        try:
            await self._refuse_transaction_pooling()
            await self._migrate()
            self._reads_epochs = True
            await self.read_epoch()
            self._check_required()
            self._is_checked = True
        except BaseException:
            await self.close()
            raise

    async def _refuse_transaction_pooling(self) -> None:
        """Raise ``ConfigurationError`` if a pooler gives each transaction another connection.

        Needs as many connections as the migrations: one of the pool, and one more.
        """
        connection = await self._acquire()
        try:
            backend = await refuse_transaction_pooling(self.driver, connection)
            self._has_pooler = backend != connection.backend
            connection.backend = backend
        except BaseException as error:
            connection.terminate()
            if isinstance(error, (*self.driver.outages, *self.driver.errors)):
                raise unavailable(error) from error
            raise
        finally:
            self.release(connection)

    async def _fill(self, pool: Pool) -> None:
        refusals: tuple[type[Exception], ...] = (*self.driver.errors, ValueError)
        try:
            await pool.fill(self._min)
        except self.driver.outages as error:
            if isinstance(error, ValueError):  # asyncpg: the URL, not the server
                raise ConfigurationError(f"cannot connect to PostgreSQL: {error}") from error
            raise unavailable(error) from error
        except refusals as error:
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

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Look a key up outside any transaction."""
        check_storable(*record_id)
        rows = await self._fetch(self.sql["find_record"], *record_id, now)
        if not rows:
            return None
        await self.confirm_replicated()
        return record_of(record_id, rows[0])

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Begin, lock and look up in one round trip. Never waits for another holder."""
        message = (
            f"BEGIN;SELECT {self.claim_function}({self.table_names.lock_number(*record_id)},"
            f"{claim_literals(*record_id)},{instant_literal(now)})"
        )
        pool, driver = self._pool, self.driver
        is_open = pool is not None and not self._abandoned.is_full and self._required is None
        connection = pool.take() if is_open and pool is not None else None
        if connection is None:
            connection = await self._acquire()
        try:
            connection.deadline = driver.time.now + driver.deadlines.claim_seconds
            tag = await connection.execute(message)
            if tag in _CLAIMED_TAGS:
                connection.deadline = NEVER
                return Claimed(PostgresUnit(self, connection), _CLAIMED_TAGS[tag])
            row = None
            if tag != _HELD_TAG:
                row = await connection.fetchrow(self.sql["find_record"], *record_id, now)
            await connection.execute("ROLLBACK")
            connection.deadline = NEVER
        except BaseException as error:  # or cancelled: the state of the connection is unknown
            connection.deadline = NEVER
            if isinstance(error, asyncio.CancelledError):
                connection.terminate()
            connection.is_read_only = is_read_only(error)
            await self.undo(connection)
            if isinstance(error, self.driver.outages):
                self.driver.translate_error(error)
            if isinstance(error, self.driver.errors):
                raise statement_error(error) from error
            raise
        self.release(connection)
        if row is not None:
            await self.confirm_replicated()
        # No row although there was one: it expired and was swept in between.
        return Found(record_of(record_id, row)) if row is not None else HELD

    async def begin(self, *, idle_seconds: float | None = None) -> PostgresUnit[TransactionT_co]:
        """Open a transaction without a key."""
        connection = await self._acquire()
        begin = "BEGIN"
        if idle_seconds is not None:
            begin = f"BEGIN;SET LOCAL idle_in_transaction_session_timeout={idle_seconds * 1000:.0f}"
        try:
            await connection.execute(begin)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                connection.terminate()
            await self.undo(connection)
            if isinstance(error, self.driver.outages):
                raise unavailable(error) from error
            raise
        return PostgresUnit(self, connection, is_kept_alive=idle_seconds is not None)

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""
        connection = await self._acquire()
        try:
            text, values = positional(sql, params)
            connection.has_warned = False
            rows = [dict(row) for row in await connection.fetch(text, *values)]
            if outlives_statement(sql):
                await self._clean(connection, sql)
            if connection.has_warned and self.durability is not None:
                self._refuse_unreplicated(self.durability)
            return rows  # noqa: TRY300 - an outage of the cleaning is reported too
        except self.driver.outages as error:
            self.driver.translate_error(error)
        except asyncio.CancelledError:
            connection.terminate()
            raise
        finally:
            self.release(connection)

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement, which commits at once."""
        return await self.read(sql, params)

    def notifier(self) -> Notifier:
        """Return a notifier for the processes that use this database."""
        return self.driver.notifier(self.read, self.table_names.channel)

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete one batch of expired records."""
        return int((await self._fetch(self.sql["sweep_records"], now, limit))[0][0])

    async def _list(self, sql: str, values: Any) -> Sequence[Any]:
        return await self._fetch(sql, *values)

    async def _fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        async def fetch(connection: Any) -> Sequence[Any]:
            rows: Sequence[Any] = await connection.fetch(sql, *values)
            return rows

        return await self._apart(fetch)

    async def _apart(self, work: Callable[[Any], Awaitable[T]]) -> T:
        """Run a function with a connection, outside any guarded request."""
        connection = await self._acquire()
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

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Report the epoch of each new connection."""
        self._epochs.report_to(report)

    async def read_epoch(self) -> EpochReading:
        """Read the epoch on a connection of the pool."""
        return await self._apart(self._read_epoch)

    # -- replication ----------------------------------------------------------------------

    @property
    def durability(self) -> Durability | None:
        """What the server guarantees, as far as it was read; None before ``open``."""
        return self._epochs.durability

    @property
    def is_replicated(self) -> bool | None:
        """Whether acknowledged commits outlive the loss of the server; None if unknown."""
        durability = self._epochs.durability
        return None if durability is None else durability.is_replicated

    async def read_durability(self) -> None:
        """Read what the server guarantees, and which of the cut commits have ended."""
        if len(self._abandoned):
            with suppress(StoreUnavailableError, *self.driver.outages, *self.driver.errors):
                await self._abandoned.check(self.driver.connect)
        await self.read_epoch()

    def require_durability(self) -> None:
        """Refuse a database that is not replicated. Call it before ``open``."""
        self._required = "replicated"

    def lift_statement_limit(self) -> None:
        """Let statements take any time, as those of a command do. Call it before ``open``."""
        self.driver.deadlines = dataclasses.replace(
            self.driver.deadlines, statement_seconds=math.inf
        )

    @property
    def abandoned_commits(self) -> int:
        """How many commits were cut that the server may still work on."""
        return len(self._abandoned)

    def begin_commit(self) -> int:
        """Return a number for a commit that begins now; 0 if it waits for no standby."""
        durability = self._epochs.durability
        waits = durability is not None and durability.waits_for_standby
        return self._commits.mark() if waits else 0

    def confirm_commit(self, started: int) -> None:
        """Note that a commit that began at ``started`` wrote WAL and ended without a warning."""
        self._commits.confirm(started)

    async def confirm_replicated(self) -> None:
        """Wait until what was read before is on the synchronous standby, if there is one.

        Raises ``StoreUnavailableError`` if that is not known in time.
        """
        durability = self._epochs.durability
        if durability is None or self._epochs.durability_at + _SETTINGS_SECONDS < time.monotonic():
            await self.read_epoch()
            durability = self._epochs.durability
        if durability is None or not durability.waits_for_standby:
            return
        if self.driver.is_sync:  # in the thread of a request there is no event loop
            started = self._commits.mark()
            await self._commit_and_confirm()
            self._commits.confirm(started)
        else:
            await self._barrier.wait()

    async def _commit_and_confirm(self) -> None:
        """Commit something that waits for the standby."""
        connection, driver = await self._acquire(), self.driver
        try:
            connection.has_warned = False
            connection.deadline = driver.time.now + driver.deadlines.commit_seconds
            await connection.fetch(CONFIRMING_COMMIT)
            if connection.has_warned or self.is_outdated(connection):
                raise unconfirmed("the wait for the standby was ended")
        except driver.outages as error:
            if connection.was_cut:
                self.abandon(connection)
            raise unconfirmed(str(error) or type(error).__name__) from error
        except driver.errors as error:
            raise unconfirmed(
                f"{error} (GRANT EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text))"
            ) from error
        except asyncio.CancelledError:
            connection.terminate()
            self.abandon(connection)
            raise
        finally:
            connection.deadline = NEVER
            self.release(connection)

    def _refuse_unreplicated(self, durability: Durability) -> None:
        """Raise if a statement that has committed may be on the primary only."""
        if durability.waits_for_standby:
            raise StoreUnavailableError(
                "the commit may not have been replicated", is_outage=False, reason="outcome_unknown"
            )

    def _check_required(self) -> None:
        """Raise ``ConfigurationError`` if the server does not guarantee what is required."""
        problem = self._missing_durability()
        if problem is not None:
            raise ConfigurationError(f"the database is not replicated as required: {problem}")

    def _missing_durability(self) -> str | None:
        durability = self._epochs.durability
        if self._required is None or (durability is not None and durability.is_replicated):
            return None
        if durability is None:
            return "its settings are unknown"
        return "; ".join(durability.weaknesses())

    # -- connections ----------------------------------------------------------------------

    async def _on_connect(self, connection: Any) -> None:
        if self._has_pooler:
            connection.backend = (await connection.fetchrow("SELECT pg_backend_pid()"))[0]
        if not self._reads_epochs:
            return
        before = self._epochs.identity
        reading = await self._read_epoch(connection)
        if reading.is_replaced:
            raise replaced()
        is_other = reading.identity is not None and reading.identity != before
        if (is_other or reading.went_back) and before is not None and self._pool is not None:
            # Older connections may lead to a server that was replaced.
            is_promoted = _server_of(reading.identity) != _server_of(before)
            self._pool.renew(cut=is_promoted)
            if is_promoted:
                self._abandoned.clear()

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

    async def _read_epoch(self, connection: Any) -> EpochReading:
        reading = await self._epochs.read(
            self.table_names, connection.fetchrow, self.driver.errors, self.driver.outages
        )
        if self._durability_metrics is not None and self.is_replicated is not None:
            self._durability_metrics.durability_read(is_replicated=self.is_replicated)
        return reading

    async def _acquire(self) -> Any:
        if self._pool is None:
            raise StoreUnavailableError("the store is not open")
        try:
            if self._abandoned.is_full:
                await self._abandoned.check(self.driver.connect)
            connection = await self._pool.acquire(self._acquire_seconds)
        except self.driver.outages as error:
            raise unavailable(error) from error
        except self.driver.errors as error:
            raise unavailable(error) from error
        if self._required is not None and self._is_checked:
            await self._refuse_weak_server(connection)
        return connection

    async def _refuse_weak_server(self, connection: Any) -> None:
        """Raise if the server does not guarantee what is required; read it again once a second."""
        is_known = self._epochs.durability_at + _SETTINGS_SECONDS > time.monotonic()
        try:
            if not is_known:
                await self._read_epoch(connection)
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

    def abandon(self, connection: Any) -> None:
        """Note a connection that was cut during COMMIT: the server still works on it."""
        self._abandoned.add(connection.backend)

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
        try:
            if used is None or not used.is_used:
                await self.driver.roll_back(connection, "ROLLBACK")
            else:
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

    async def _clean(self, connection: Any, sql: str) -> None:
        """Remove what a statement outside a transaction has left; close the connection if not."""
        used = UsedSession()
        used.note_statement(sql)
        try:
            await used.clean(connection)
        except BaseException:
            connection.terminate()
            raise

    async def _migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        connection = await self._connect_unlimited()

        async def execute(sql: str, values: tuple[Any, ...]) -> Sequence[Any]:
            if not values and not sql.startswith("SELECT"):
                await connection.execute(sql)
                return ()
            rows: Sequence[Any] = await connection.fetch(sql, *values)
            return rows

        migration = self.schema.migration()
        try:
            await connection.execute("BEGIN")
            lock = f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"
            waiting = asyncio.ensure_future(connection.execute(lock))
            if not await _ends_within(waiting, _LOCK_SECONDS, connection):
                _log.warning("%s", _LOCK_IS_HELD)
            await waiting
            await run_steps_async(migration.apply(), execute)
            committing = asyncio.ensure_future(connection.execute("COMMIT"))
            limit = self.driver.deadlines.commit_seconds
            if not await _ends_within(committing, limit, connection):
                connection.terminate()
                await asyncio.wait({committing})
                committing.exception()
                raise StoreUnavailableError(
                    f"the migrations were not committed within {limit:g} seconds: {_COMMIT_WAITS}",
                    reason="outcome_unknown",
                )
            await committing
        except self.driver.outages as error:
            raise unavailable(error) from error
        finally:
            connection.terminate()
        self.schema.committed(migration)
        self._use_names(migration.names)

    async def _connect_unlimited(self) -> Any:
        """Open a connection for statements that may take long."""
        try:
            return await self.driver.connect(is_limited=False)
        except (*self.driver.outages, *self.driver.errors) as error:
            raise unavailable(error) from error


class ChunkPostgresStore(BasePostgresStore[TransactionT_co]):
    """A store whose transactions can hold several requests of a batch: on async drivers."""

    # Fewer than the 64 savepoints that PostgreSQL keeps in memory for a transaction.
    chunk_items = 50

    @property
    def max_chunks(self) -> int:
        """Half of the connections: the others are for single requests.

        It also bounds the advisory locks that a process holds, of which a server has thousands.
        """
        return max(1, self.max_connections // 2)

    async def begin_chunk(self, *, has_savepoints: bool = True) -> PostgresChunk:
        """Return a transaction for several requests."""
        return _ConfirmedChunk(
            await self.begin(),
            self.driver,
            self.sql,
            self.table_names,
            confirm=self.confirm_replicated,
            # A sync driver's statements are not seen to fail.
            has_savepoints=has_savepoints or self.driver.is_sync,
        )


class _ConfirmedChunk(PostgresChunk):
    """Returns records that were found when they are on the synchronous standby, too."""

    def __init__(
        self,
        unit: PostgresUnit[Any],
        driver: Driver,
        sql: Queries,
        names: TableNames,
        *,
        confirm: Callable[[], Awaitable[None]],
        has_savepoints: bool,
    ) -> None:
        super().__init__(unit, driver, sql, names, has_savepoints=has_savepoints)
        self._confirm = confirm

    async def claim(
        self, record_ids: Sequence[RecordId], now: datetime
    ) -> Sequence[KeyClaimed | Found]:
        """Claim as far as possible; see ``PostgresChunk``."""
        claims = await super().claim(record_ids, now)
        if any(isinstance(claim, Found) for claim in claims):
            await self._confirm()
        return claims


class PostgresStore(ChunkPostgresStore[PostgresTransaction]):
    """The store for many processes, on asyncpg. A handler gets a ``PostgresTransaction``."""

    def __init__(self, url: str, **options: Unpack[PostgresOptions]) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects."""
        super().__init__(url, driver=_asyncpg_driver(), **options)


async def _ends_within(
    running: "asyncio.Future[Any]", seconds: float, connection: Connection
) -> bool:
    """Return whether a statement has ended in time. If cancelled, cut its connection."""
    try:
        limit = None if seconds == math.inf else seconds
        await asyncio.wait({running}, timeout=limit)
    except asyncio.CancelledError:
        connection.terminate()
        running.cancel()
        raise
    return running.done()


def _server_of(identity: str | None) -> list[str]:
    """Return the part of an identity that differs between servers: cluster and timeline."""
    return [] if identity is None else identity.split("/")[:2]


def _asyncpg_driver() -> DriverMaker:
    """Return the driver asyncpg. Raises ``ConfigurationError`` if it is not installed."""
    try:
        from onceward.stores.postgres.asyncpg_driver import AsyncpgDriver  # noqa: PLC0415
    except ImportError as error:
        raise ConfigurationError(
            'PostgreSQL needs a driver: pip install "onceward[postgres]" for asyncpg, or '
            '"onceward[psycopg]" and a URL such as postgresql+psycopg://user@host/name'
        ) from error
    return AsyncpgDriver
