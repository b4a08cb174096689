"""The store on PostgreSQL. Guarding a request costs no additional round trip."""

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, TypedDict, Unpack

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.ports import (
    HELD,
    Claimed,
    EpochReading,
    Found,
    Held,
    Notifier,
    Params,
    Row,
    StoreMetrics,
    TransactionT_co,
)
from onceward.records import Record, RecordId
from onceward.stores.base import BaseStore
from onceward.stores.errors import is_read_only, statement_error, unavailable
from onceward.stores.factory import parse_store_url
from onceward.stores.parts import MIGRATION_LOCK
from onceward.stores.postgres.connections import Connections
from onceward.stores.postgres.driver import NEVER, Deadlines, DriverMaker
from onceward.stores.postgres.epoch import EpochReader
from onceward.stores.postgres.hosts import check_dsn
from onceward.stores.postgres.params import claim_literals, instant_literal, positional
from onceward.stores.postgres.session import UsedSession, outlives_statement
from onceward.stores.postgres.unit_of_work import (
    PostgresChunk,
    PostgresTransaction,
    PostgresUnit,
)
from onceward.stores.replication import Durability
from onceward.stores.rows import check_storable, record_of
from onceward_protocol.storage.migrations import Migration, run_steps_async

_log = logging.getLogger("onceward.stores")

# onceward_claim returns its result as a number of rows. Claimed: whether it has an expired record.
_CLAIMED_TAGS: Final = {"SELECT 0": False, "SELECT 3": True}
_HELD_TAG: Final = "SELECT 2"

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
    """Options of the stores on PostgreSQL, for type checkers; see ``Options``."""

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
    idle_seconds: float
    require_durability: Literal["replicated"] | None


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the stores on PostgreSQL."""

    # Onceward's tables are in ``schema`` (default: ``onceward``), which is created if it is
    # missing. In ``public`` their names begin with ``onceward_``, and wherever ``table_prefix`` is
    # given, with that. Both may be options of the URL instead.
    table_prefix: str | None = None
    schema: str | None = None
    migrations: Sequence[Migration] = ()
    min_connections: int = 1
    max_connections: int = 16
    acquire_seconds: float = 10.0
    connect_seconds: float = 5.0
    # A connection whose server is silent for longer than ``claim_seconds``, ``commit_seconds`` or,
    # in any other statement, ``statement_seconds`` is closed; 0 is no limit.
    claim_seconds: float = 5.0
    statement_seconds: float = 30.0
    commit_seconds: float = 10.0
    # A transaction without a statement for so long is ended by the server: a process that was
    # stopped must not keep its locks; 0 is no limit.
    idle_seconds: float = 60.0
    # Refuses a server that does not wait for a synchronous standby.
    require_durability: Literal["replicated"] | None = None


class BasePostgresStore(BaseStore[TransactionT_co]):
    """The store on PostgreSQL, on any driver.

    BEGIN and the claim share one message; so do the record, the audit event and COMMIT. Both are
    sent as text with literals (see ``params``), because asyncpg cannot pipeline.
    """

    knows_durability = True
    # Fewer than the 64 savepoints that PostgreSQL keeps in memory for a transaction.
    chunk_items = 50

    def __init__(
        self, url: str, *, driver: DriverMaker, **options: Unpack[PostgresOptions]
    ) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects.

        The URL may have several hosts: the writable one is used, and the newest of two.
        """
        target, chosen = parse_store_url(url), Options(**options)
        if target.database != "postgresql":
            raise ConfigurationError(
                f"{type(self).__name__} needs a URL such as postgresql://user@host/name"
            )
        check_dsn(target.location)
        names = target.names(chosen.table_prefix, chosen.schema)
        super().__init__("postgresql", names, chosen.migrations)
        epochs = EpochReader()
        deadlines = Deadlines(
            chosen.connect_seconds,
            chosen.claim_seconds or math.inf,
            chosen.statement_seconds or math.inf,
            chosen.commit_seconds or math.inf,
            chosen.idle_seconds or math.inf,
            epochs.timelines,
        )
        self.driver = driver(target.location, deadlines)
        self._min = chosen.min_connections
        # How many transactions can be open at once.
        self.max_connections = chosen.max_connections
        self.connections = Connections(
            self.driver,
            self.schema,
            epochs,
            max_connections=chosen.max_connections,
            acquire_seconds=chosen.acquire_seconds,
            required=chosen.require_durability,
        )

    def report_to(self, metrics: StoreMetrics) -> None:
        """Report waits for a connection to ``metrics``. Call it before ``open``.

        If they are ``DurabilityMetrics``, what the database guarantees is reported, too.
        """
        self.connections.report_to(metrics)

    async def open(self) -> None:
        if self.connections.is_open:
            if not self.schema.is_complete:
                await self._migrate()
            return
        try:
            await self.connections.open()
            await self._migrate()
            await self.connections.check(self._min)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self.connections.close()

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        check_storable(*record_id)
        rows = await self._list(self.sql["find_record"], (*record_id, now))
        if not rows:
            return None
        await self.connections.confirm_replicated()
        return record_of(record_id, rows[0])

    async def claim(self, record_id: RecordId, now: datetime) -> Claimed | Found | Held:
        """Begin, lock and look up in one round trip. Never waits for another holder."""
        message = (
            f"BEGIN;SELECT {self.claim_function}({self.table_names.lock_number(*record_id)},"
            f"{claim_literals(*record_id)},{instant_literal(now)})"
        )
        connections, driver = self.connections, self.driver
        connection = connections.take()
        if connection is None:
            connection = await connections.acquire()
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
            await connections.undo(connection)
            if isinstance(error, driver.outages):
                driver.translate_error(error)
            if isinstance(error, driver.errors):
                raise statement_error(error) from error
            raise
        connections.release(connection)
        if row is not None:
            await connections.confirm_replicated()
        # No row although there was one: it expired and was swept in between.
        return Found(record_of(record_id, row)) if row is not None else HELD

    async def begin(self, *, idle_seconds: float | None = None) -> PostgresUnit[TransactionT_co]:
        connection = await self.connections.acquire()
        begin = "BEGIN"
        if idle_seconds is not None:
            begin = f"BEGIN;SET LOCAL idle_in_transaction_session_timeout={idle_seconds * 1000:.0f}"
        try:
            await connection.execute(begin)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                connection.terminate()
            await self.connections.undo(connection)
            if isinstance(error, self.driver.outages):
                raise unavailable(error) from error
            raise
        return PostgresUnit(self, connection, is_kept_alive=idle_seconds is not None)

    @property
    def max_chunks(self) -> int:
        """Half of the connections: the others are for single requests.

        It also bounds the advisory locks that a process holds, of which a server has thousands.
        """
        return max(1, self.max_connections // 2)

    async def begin_chunk(self, *, has_savepoints: bool = True) -> PostgresChunk:
        return PostgresChunk(self, await self.begin(), has_savepoints=has_savepoints)

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        connection = await self.connections.acquire()
        try:
            text, values = positional(sql, params)
            connection.has_warned = False
            rows = [dict(row) for row in await connection.fetch(text, *values)]
            if outlives_statement(sql):
                await _clean(connection, sql)
            if connection.has_warned and self.connections.waits_for_standby:
                raise StoreUnavailableError(
                    "the commit may not have been replicated",
                    is_outage=False,
                    reason="outcome_unknown",
                )
            return rows  # noqa: TRY300 - an outage of the cleaning is reported too
        except self.driver.outages as error:
            self.driver.translate_error(error)
        except asyncio.CancelledError:
            connection.terminate()
            raise
        finally:
            self.connections.release(connection)

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await self.read(sql, params)

    def notifier(self) -> Notifier:
        return self.driver.notifier(self.read, self.table_names.channel)

    async def sweep(self, now: datetime, limit: int) -> int:
        return int((await self._list(self.sql["sweep_records"], (now, limit)))[0][0])

    async def _list(self, sql: str, values: Any) -> Sequence[Any]:
        async def fetch(connection: Any) -> Sequence[Any]:
            rows: Sequence[Any] = await connection.fetch(sql, *values)
            return rows

        return await self.connections.apart(fetch)

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Report the epoch of each new connection."""
        self.connections.epochs.report_to(report)

    async def read_epoch(self) -> EpochReading:
        return await self.connections.apart(self.connections.read_epoch)

    @property
    def durability(self) -> Durability | None:
        """Guarantees of the server, as far as they were read; None before ``open``."""
        return self.connections.epochs.durability

    @property
    def is_replicated(self) -> bool | None:
        durability = self.durability
        return None if durability is None else durability.is_replicated

    async def read_durability(self) -> None:
        await self.connections.read_durability()

    def require_durability(self) -> None:
        self.connections.required = "replicated"

    def lift_statement_limit(self) -> None:
        """Let statements take any time, as those of a command do. Call it before ``open``."""
        self.driver.deadlines = dataclasses.replace(
            self.driver.deadlines, statement_seconds=math.inf, idle_seconds=math.inf
        )

    @property
    def abandoned_commits(self) -> int:
        """How many commits were cut that the server may still work on."""
        return len(self.connections.abandoned)

    async def _migrate(self) -> None:
        """Apply missing migrations. Processes that start at once wait for the lock."""
        try:
            connection = await self.driver.connect(is_limited=False)
        except (*self.driver.outages, *self.driver.errors) as error:
            raise unavailable(error) from error

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


class PostgresStore(BasePostgresStore[PostgresTransaction]):
    """The store for many processes, on asyncpg. A handler gets a ``PostgresTransaction``."""

    def __init__(self, url: str, **options: Unpack[PostgresOptions]) -> None:
        """Check the URL, which may raise ``ConfigurationError``. ``open`` connects."""
        super().__init__(url, driver=_asyncpg_driver(), **options)


async def _ends_within(running: "asyncio.Future[Any]", seconds: float, connection: Any) -> bool:
    """Return whether a statement has ended in time. If cancelled, cut its connection."""
    try:
        limit = None if seconds == math.inf else seconds
        await asyncio.wait({running}, timeout=limit)
    except asyncio.CancelledError:
        connection.terminate()
        running.cancel()
        raise
    return running.done()


async def _clean(connection: Any, sql: str) -> None:
    """Remove what a statement outside a transaction has left; close the connection if not."""
    used = UsedSession()
    used.note_statement(sql)
    try:
        await used.clean(connection)
    except BaseException:
        connection.terminate()
        raise


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
