"""Protocols implemented by adapters, and the values they exchange."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

import msgspec

from onceward.errors import StoreUnavailableError
from onceward.records import AuditEvent, Record, RecordId
from onceward.tenants import ALL_TENANTS, TenantFilter, tenant_or_none
from onceward_protocol.clock import Clock
from onceward_protocol.fault_points import FaultPoints, SyncFaultPoints

__all__ = [
    "HELD",
    "BlockingGate",
    "BreakerMetrics",
    "BrokerEngine",
    "BrokerMetrics",
    "Chunk",
    "Claim",
    "Claimed",
    "Clock",
    "CommitFailure",
    "Delivery",
    "DurabilityMetrics",
    "Ending",
    "Engine",
    "EpochReading",
    "FaultPoints",
    "Finished",
    "Found",
    "Gate",
    "Held",
    "JobMetrics",
    "JobOutcome",
    "KeyClaimed",
    "Metrics",
    "Notifier",
    "Outcome",
    "Params",
    "PositionCache",
    "RecordCache",
    "RecordQuery",
    "Retry",
    "Row",
    "Store",
    "StoreMetrics",
    "SweepMetrics",
    "SyncFaultPoints",
    "Transaction",
    "TransactionT_co",
    "UnitOfWork",
]

# What handlers get as their transaction: a ``Transaction``, or a session of the app. Any, where the
# type of a store does not say.
if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from onceward.jobs.job import LeasedJob
    from onceward.stores.parts import Schema
    from onceward.stores.table_names import TableNames

    # The type of a store's transactions.
    TransactionT_co = TypeVar("TransactionT_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    TransactionT_co = TypeVar("TransactionT_co", covariant=True)

# Values by name, for the placeholders ``:name``.
Params = Mapping[str, Any] | None
# One row, by column.
Row = Mapping[str, Any]

# How a request ended, as metrics count it.
Outcome = Literal[
    "fresh",
    "replayed",
    "mismatched",
    "in_progress",
    "rolled_back",
    "stale",
    "refused",
    "limited",
    "unavailable",
]


# How an attempt of a job ended, as metrics count it.
JobOutcome = Literal["done", "duplicate", "retried", "dead", "lease_lost", "given_back", "unknown"]


# A commit that failed: rolled back, or with an unknown outcome.
CommitFailure = Literal["rolled_back", "unknown"]


class Transaction(Protocol):
    """The transaction of a handler. Commits together with the record, or not at all.

    Statements are in the SQL of the database, with named parameters (``:name``) everywhere.
    """

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""


class UnitOfWork(Protocol[TransactionT_co]):
    """An open transaction, with a claimed key if there is one. Ends in one commit or rollback."""

    @property
    def transaction(self) -> TransactionT_co:
        """Unit of the handler: a ``Transaction``, or a session or connection of the app."""

    @property
    def statements(self) -> Transaction:
        """The same transaction, for Onceward's statements."""

    # True if another request has committed this key since the claim: it cannot commit.
    superseded: bool
    # Whether the handler uses ``transaction`` without ``await``.
    is_sync: bool

    @property
    def is_lost(self) -> bool:
        """Whether the connection is known to have been lost while the handler ran."""

    @property
    def holds_write_lock(self) -> bool:
        """Whether nothing else can write to the database until it has ended."""

    # Whether it has ``commit_after``.
    can_commit_after: bool

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event, and commit them together with the handler's rows.

        Raises ``SupersededError`` or ``StoreUnavailableError`` (both after a rollback), or
        ``CommitUnknownError`` if it may or may not have been committed.
        """

    async def rollback(self) -> None:
        """Roll back. Never raises: if the rollback fails, the connection is closed."""

    async def has_written(self) -> bool:
        """Return whether the handler has written. Decides about responses that are not stored."""

    async def keep_alive(self) -> None:
        """Keep the database from ending an idle transaction. Never raises."""

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if the connection was lost and so raised ``error``."""

    async def commit_after(self, statement: str) -> None:
        """Run a statement without parameters and commit, in one message: both or neither.

        Raises as ``commit`` does, and ``LeaseLostError`` if the statement reports that.
        """


class Claimed(msgspec.Struct, frozen=True):
    """The key is claimed until the unit ends; no other request runs it."""

    # The transaction; its commit stores the response.
    unit: UnitOfWork
    # The key has a record, but an expired one.
    after_expiry: bool = False


class Found(msgspec.Struct, frozen=True):
    """The key has a record that is not expired."""

    # The record of the key.
    record: Record


class Held:
    """Another request with this key is running and has not committed yet."""


# The only one that is needed.
HELD: Final = Held()

# The outcome of ``Store.claim``.
Claim = Claimed | Found | Held


class KeyClaimed(msgspec.Struct, frozen=True):
    """The key is claimed until the chunk ends."""

    # The key has a record, but an expired one.
    after_expiry: bool = False


class Chunk(Protocol):
    """A transaction for several requests of one batch."""

    @property
    def is_broken(self) -> bool:
        """True if it cannot commit any more, e.g. because the connection was lost."""

    @property
    def needs_savepoints(self) -> bool:
        """True if it is broken because a request was to be undone alone and had no savepoint."""

    @property
    def must_end(self) -> bool:
        """True if a request has changed what the next one would see, such as a setting."""

    async def claim(
        self, record_ids: Sequence[RecordId], now: datetime
    ) -> Sequence[KeyClaimed | Found]:
        """Claim different keys in this order, up to the first that another holder has.

        Never waits for another holder. Keys after the first that is held are not claimed.
        """

    async def statements(self) -> Transaction:
        """Return the transaction for Onceward's statements between two requests.

        After a statement that has failed, the chunk must be rolled back.
        """

    async def begin_item(self) -> "UnitOfWork":
        """Begin the part of one request. Its end is not the end of the transaction.

        ``commit(None, None)`` of the unit raises ``AbortedTransactionError`` after a statement that
        has failed. Neither it nor ``rollback`` raises if the connection is lost: see ``is_broken``.
        """

    async def commit(self, records: Sequence[Record], audits: Sequence[AuditEvent]) -> None:
        """Write records and audit events, and commit all. Raises what a unit's commit raises."""

    async def rollback(self) -> None:
        """Roll everything back. Never raises."""


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Selects records for operators. ``after`` is the last record of the previous page."""

    # Only records of this tenant.
    tenant: TenantFilter = ALL_TENANTS
    # Only records of this endpoint.
    endpoint: str | None = None
    # Only records with this key.
    key: str | None = None
    # The size of a page.
    limit: int = 50
    # The last record of the page before.
    after: tuple[datetime, str, str, str] | None = None

    def __post_init__(self) -> None:
        tenant_or_none(self.tenant)

    @property
    def only_tenant(self) -> str | None:
        """The tenant for SQL in which NULL matches all tenants."""
        return tenant_or_none(self.tenant)


class EpochReading(msgspec.Struct, frozen=True):
    """Which database a connection has reached. Copies of records count for one epoch only."""

    # Differs between two databases, and before and after a restore or a failover. None: unknown,
    # so that nothing may be cached.
    identity: str | None
    # The value in the database that ``onceward restore``, ``restored`` and ``keys rm`` renew.
    cache_epoch: str = ""
    # How far its log has been written. None, if that is not known.
    position: int | None = None
    # The position is below one that was seen before: commits were lost.
    went_back: bool = False
    # Another server was promoted since; the connection must not be used.
    is_replaced: bool = False
    # The database's clock; None if it has none or was slow to respond.
    time: datetime | None = None
    # When the newest record was created, where the database has no clock.
    newest: datetime | None = None


class Gate(Protocol):
    """Admits guarded requests to a pool of connections, so that they cannot deadlock."""

    def begin(self) -> None:
        """Count the connections that this task takes from now on."""

    async def enter(self, operation: str) -> None:
        """Count the connections of this task; wait until its dependencies may take one."""


class BlockingGate(Protocol):
    """A ``Gate`` for sync frameworks, which have a thread for each request."""

    def begin(self) -> None:
        """Count the connections that this thread takes from now on."""

    def enter(self, operation: str, *, is_guarded: bool) -> None:
        """Count the connections of this thread; wait until its hooks may take one."""


class Store(Protocol[TransactionT_co]):
    """A database that holds records, audit events and the app's rows.

    ``onceward.stores.base.BaseStore`` has the defaults of what is optional.
    """

    # ``sqlite`` or ``postgresql``, for logs and metrics.
    name: str
    # How Onceward's tables are named in this database; final when the store is open.
    table_names: "TableNames"
    # The parts of the schema that are wanted, and those that the database has.
    schema: "Schema"

    async def open(self) -> None:
        """Connect and create the parts of the schema that are wanted and missing. Idempotent."""

    async def close(self) -> None:
        """Disconnect. Idempotent."""

    async def ping(self) -> None:
        """Raise ``StoreUnavailableError`` unless a query succeeds."""

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Return the record of a key unless it is expired, outside any transaction."""

    async def claim(self, record_id: RecordId, now: datetime) -> Claim:
        """Claim a key atomically; never waits for another holder.

        With ``has_sessions`` it also takes ``session``.
        """

    async def begin(self, *, idle_seconds: float | None = None) -> UnitOfWork[TransactionT_co]:
        """Open a transaction without a key, for endpoints where the key is optional.

        If the process hangs, PostgreSQL ends the transaction after ``idle_seconds``. With
        ``has_sessions`` it also takes ``session``.
        """

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in its own transaction and return its rows, if it has any."""

    def notifier(self) -> "Notifier":
        """Return a new notifier for the workers of this database."""

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete up to ``limit`` expired records and return how many were deleted."""

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records, newest first, for operators."""

    async def secret(self) -> bytes:
        """Return the random secret that was created with the schema."""

    def report_to(self, metrics: "StoreMetrics") -> None:
        """Report waits for a connection to ``metrics``. Call it before ``open``."""

    # -- which database it is ---------------------------------------------------------------

    def report_epochs(self, report: Callable[[EpochReading], None]) -> None:
        """Call ``report`` after each reading, in any thread. It must not block."""

    async def read_epoch(self) -> EpochReading:
        """Read the epoch on a connection that may be an old one."""

    # -- optional ---------------------------------------------------------------------------

    # Whether it has one writer at a time, so that other writes give way to requests.
    is_one_writer: bool
    # How many requests of a batch share a transaction, so that others do not wait long for it.
    # 0 if none can.
    chunk_items: int
    # Whether sync frameworks need no event loop for it.
    runs_in_request_thread: bool
    # Whether it is on the app's own connection pool.
    is_gated: bool
    # Whether transactions are sessions of the app, so that a request can share one.
    has_sessions: bool
    # Whether it shares the session that a sync app has in the thread of a request.
    has_thread_sessions: bool
    # Whether it reads if its database is replicated.
    knows_durability: bool

    async def write_unless_busy(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Do as ``write``, but raise ``StoreUnavailableError`` if another process writes."""

    @property
    def max_chunks(self) -> int:
        """How many chunks may run at once, so that other requests get a connection."""

    async def begin_chunk(self, *, has_savepoints: bool = True) -> Chunk:
        """Return a new transaction, with a savepoint for each request.

        Without ``has_savepoints`` it may do without them, where that is faster.
        """

    @property
    def gate(self) -> Gate | None:
        """Limits how many guarded requests use that pool at once.

        None in the thread of a request of a sync framework, where ``thread_gate`` does.
        """

    @property
    def thread_gate(self) -> BlockingGate | None:
        """Limits how many guarded requests of a sync framework use that pool at once."""

    def new_session(self) -> Any:
        """Return a session for one request: a plain one until it is given to ``claim``."""

    async def release_session(self, session: Any) -> bool:
        """End the session's transaction before the claim; keep what it has loaded.

        Returns False if it had written something, which is rolled back.
        """

    async def close_session(self, session: Any) -> None:
        """Roll back what was not committed and return the connection. Never raises."""

    def outage_of(self, session: Any, error: Exception) -> StoreUnavailableError | None:
        """Return the client's error, if a method of the session raised ``error`` in an outage."""

    async def release_connection(self) -> None:
        """Return the connection of that session to the pool, if the session has only read.

        Called before the request waits for another one, which needs a connection itself.
        """

    @property
    def is_replicated(self) -> bool | None:
        """Whether acknowledged commits outlive the loss of the server; None if unknown."""

    async def read_durability(self) -> None:
        """Read that again, and report it to the metrics. Raises ``StoreUnavailableError``."""

    def require_durability(self) -> None:
        """Refuse a database that is not replicated. Call it before ``open``."""


class Notifier(Protocol):
    """Wakes workers, in this and other processes, after jobs were committed.

    A notification may be lost, e.g. by a crash right after the commit: workers also poll.
    """

    async def open(self) -> None:
        """Start to listen. Not needed in order to notify."""

    async def close(self) -> None:
        """Stop listening. Idempotent."""

    def notify(self) -> None:
        """Wake all listeners. Returns at once, never raises; several calls may become one."""

    async def wait(self, seconds: float) -> bool:
        """Wait for a notification; return whether there was one. An earlier one counts, once."""


class Delivery(msgspec.Struct, frozen=True):
    """A leased job, and what the engine needs in order to acknowledge it."""

    # The job to run.
    job: "LeasedJob"
    # What the engine needs to acknowledge it.
    receipt: Any = None


class Finished(msgspec.Struct, frozen=True):
    """The job is completed or dead-lettered and is not delivered again."""


class Retry(msgspec.Struct, frozen=True):
    """The job is delivered again after this time."""

    # The delay before the next attempt.
    seconds: float = 0.0


# How an attempt of a job ended.
Ending = Finished | Retry


class Engine(Protocol):
    """Delivers jobs to a worker. The job tables decide who may run them."""

    @property
    def name(self) -> str:
        """``sql`` or ``jetstream``."""

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Disconnect. Idempotent."""

    async def take(
        self,
        limit: int,
        wait_seconds: float,
        *,
        alone: bool = True,
        skipped: Collection[str] = (),
    ) -> Sequence[Delivery]:
        """Lease up to ``limit`` jobs, waiting for the first; may return none.

        ``alone``: the worker runs no other job. It is recorded with the lease. Jobs of the
        ``skipped`` queues are not leased, as far as the engine can choose.
        """

    async def renew(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        """Renew the leases; return the jobs (tenant, id) that are still held."""

    async def settle(self, delivery: Delivery, ending: Ending) -> None:
        """Acknowledge a delivery, after the job tables were updated."""

    def notify(self) -> None:
        """Announce that this process has committed jobs."""

    def wake(self) -> None:
        """Make a waiting ``take`` return soon, because the worker is stopping."""


class RecordCache(Protocol):
    """A cache of committed records. If it is stale or down, requests only get slower."""

    async def get(self, record_id: RecordId, now: datetime, *, epoch: str) -> Record | None:
        """Return a verified record that was put under this epoch, or None."""

    async def put(self, record: Record, now: datetime, *, epoch: str) -> None:
        """Cache a record that was committed in this epoch, until it expires."""

    async def forget(self, record_ids: Iterable[RecordId]) -> None:
        """Drop records."""

    async def close(self) -> None:
        """Disconnect."""


@runtime_checkable
class PositionCache(Protocol):
    """Keeps the highest position of an epoch, for processes that start after a restore.

    Optional: a ``RecordCache`` that has these methods gets the calls.
    """

    async def highest_position(self, epoch: str) -> int | None:
        """Return the position that was kept for this epoch, 0 without one; None if unavailable."""

    async def keep_position(self, epoch: str, position: int) -> None:
        """Keep a position. Never raises."""


class Metrics(Protocol):
    """Records metrics of requests; must not raise and must not block."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count the outcome of a guarded request."""

    def waited(self, endpoint: str, seconds: float) -> None:
        """Record for how long a duplicate waited for the first request."""

    def expired(self, endpoint: str) -> None:
        """Count an expired record that was found."""

    def store_time(self, operation: str, seconds: float) -> None:
        """Record the duration of a call to the store."""

    def swept(self, records: int, seconds: float) -> None:
        """Record how many records a sweep deleted, and how long it took."""


@runtime_checkable
class SweepMetrics(Protocol):
    """Is called when a process starts to sweep; must not raise and must not block.

    Optional: a ``Metrics`` object that has this method gets the call.
    """

    def sweep_started(self) -> None:
        """Export the series of sweeps: this process sweeps periodically."""


@runtime_checkable
class StoreMetrics(Protocol):
    """Records problems of the store; must not raise and must not block.

    Optional: a ``Metrics`` object that has these methods gets the calls.
    """

    def pool_waited(self, seconds: float) -> None:
        """Record how long a caller waited for a connection, because none was free."""

    def commit_failed(self, of: Literal["request", "job"], failure: CommitFailure) -> None:
        """Count a commit that the database refused, or whose outcome is unknown."""


@runtime_checkable
class BreakerMetrics(Protocol):
    """Is called when the circuit breaker of the store changes; must not raise or block.

    Optional: a ``Metrics`` object that has this method gets the calls.
    """

    def breaker_changed(self, *, is_open: bool) -> None:
        """Count that the breaker has opened, or note that it is closed again."""


@runtime_checkable
class BrokerMetrics(Protocol):
    """Records how a broker of jobs is bypassed; must not raise and must not block.

    Optional: a ``JobMetrics`` object that has these methods gets the calls.
    """

    def broker_changed(self, *, is_silent: bool) -> None:
        """Count that the broker has fallen silent, or note that it responds again."""

    def jobs_bypassed_broker(self, jobs: int) -> None:
        """Count jobs that were leased from the table although there is a broker."""


@runtime_checkable
class BrokerEngine(Protocol):
    """An engine with a broker. Optional: an ``Engine`` that has this method gets the call."""

    def report_to(self, metrics: BrokerMetrics) -> None:
        """Report silence of the broker to these metrics."""


@runtime_checkable
class DurabilityMetrics(Protocol):
    """Is called with what the database guarantees; must not raise or block.

    Optional: a ``Metrics`` object that has these methods gets the calls.
    """

    def durability_read(self, *, is_replicated: bool) -> None:
        """Note whether acknowledged commits outlive the loss of the database server."""

    def commits_abandoned(self, count: int) -> None:
        """Note how many commits were cut that the server may still work on."""


@runtime_checkable
class JobMetrics(Protocol):
    """Records metrics of jobs; must not raise and must not block."""

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        """Count the outcome of one attempt, and record its duration."""

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        """Set, per queue: waiting, running, dead, and the age of the oldest due job in seconds."""
