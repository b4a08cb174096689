"""What the rules need from the world: stores, transactions, time, eyes. Protocols only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from holdfast.core.decision import Held
from holdfast.core.idempotency_record import AuditEvent, Record, RecordId
from holdfast.core.job import LeasedJob

__all__ = [
    "Claim",
    "Claimed",
    "Clock",
    "Delivery",
    "Ending",
    "Engine",
    "FaultPoints",
    "Finished",
    "Found",
    "JobMetrics",
    "JobOutcome",
    "Metrics",
    "Notifier",
    "Outcome",
    "Params",
    "RecordCache",
    "RecordQuery",
    "Retry",
    "Row",
    "Store",
    "SyncFaultPoints",
    "Transaction",
    "UnitOfWork",
]

Params = Mapping[str, Any] | None
Row = Mapping[str, Any]

Outcome = Literal[
    "fresh",
    "replayed",
    "mismatched",
    "in_progress",
    "rolled_back",
    "stale",
    "refused",
    "unavailable",
]


JobOutcome = Literal["done", "duplicate", "retried", "dead", "lease_lost", "given_back", "unknown"]


class Clock(Protocol):
    """Time, so that tests can hold it."""

    def now(self) -> datetime:
        """Return the wall clock, aware and in UTC."""

    def monotonic(self) -> float:
        """Return seconds that never go back."""


class Transaction(Protocol):
    """What a guarded handler writes in. Commits with the record, or not at all.

    SQL is the database's own, with named parameters (``:name``) on every database.
    """

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""


class UnitOfWork(Protocol):
    """An open transaction, with the key claimed if there is one. Ends in exactly one of the two."""

    @property
    def transaction(self) -> Any:
        """What the handler writes in: a ``Transaction``, or what the user's own adapter gives."""

    @property
    def statements(self) -> Transaction:
        """The same transaction for statements of Holdfast's own, whatever ``transaction`` is."""

    @property
    def superseded(self) -> bool:
        """True when another's record was seen after the claim: this unit may not commit."""

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event beside the business rows and commit all of it.

        Raises ``SupersededError`` (rolled back), ``CommitUnknownError`` (nobody knows yet) or
        ``StoreUnavailableError`` (rolled back).
        """

    async def rollback(self) -> None:
        """Undo everything. Never raises: what cannot be rolled back is cut off."""

    async def touch(self) -> None:
        """Show the database that whoever holds this is alive. Never raises."""


class Claimed(msgspec.Struct, frozen=True):
    """The key is ours until the unit ends; nobody else runs it."""

    unit: UnitOfWork
    # There is a record, but it is past its time.
    after_expiry: bool = False


class Found(msgspec.Struct, frozen=True):
    """There is a live record."""

    record: Record


Claim = Claimed | Found | Held


@dataclass(frozen=True, slots=True)
class RecordQuery:
    """Which records an operator wants to see. Keyset paging: ``after`` is the last one seen."""

    tenant: str | None = None
    endpoint: str | None = None
    key: str | None = None
    limit: int = 50
    after: tuple[datetime, str, str, str] | None = None


@runtime_checkable
class Store(Protocol):
    """Where records, audit events and the business rows live together."""

    @property
    def name(self) -> str:
        """``sqlite`` or ``postgresql``, for logs and metrics."""

    async def open(self) -> None:
        """Connect and bring the schema up to date."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""

    async def ping(self) -> None:
        """Raise ``StoreUnavailableError`` unless a query goes through."""

    async def find(self, record_id: RecordId, now: datetime) -> Record | None:
        """Return the live record of this key, read outside any transaction."""

    async def claim(self, record_id: RecordId, now: datetime) -> Claim:
        """Take the key, in one atomic call; never waits for another holder."""

    async def begin(self, *, idle_seconds: float | None = None) -> UnitOfWork:
        """Open a transaction without a key, for endpoints where the key is optional.

        One that is left alone for ``idle_seconds``, by a process that hangs, is ended by the
        database where the database can do so.
        """

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""

    async def write(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run one statement in a transaction of its own and return its rows, if it gives any."""

    def notifier(self) -> "Notifier":
        """Return what workers of this database are woken with."""

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete up to ``limit`` expired records and return how many went."""

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records, newest first, for operators."""

    async def secret(self) -> bytes:
        """Return this database's own random secret, made with its schema."""


class Notifier(Protocol):
    """Wakes workers, here and in other processes, when jobs were committed. Never the truth.

    A ring may be lost (a crash right after the commit): workers also look by themselves, seldom.
    """

    async def open(self) -> None:
        """Begin to listen. Who only rings need not."""

    async def close(self) -> None:
        """Stop listening and let go of everything. Idempotent."""

    def notify(self) -> None:
        """Wake whoever waits. Returns at once, never raises; many rings may become one."""

    async def wait(self, seconds: float) -> bool:
        """Wait for a ring; returns whether there was one. One rung before the wait counts."""


class Delivery(msgspec.Struct, frozen=True):
    """A job that is ours to run, and what the engine needs to speak of it again."""

    job: LeasedJob
    receipt: Any = None


class Finished(msgspec.Struct, frozen=True):
    """The job is off the table: done, or given up. It is not to be delivered again."""


class Retry(msgspec.Struct, frozen=True):
    """The job stays, and is to be delivered again after this time."""

    seconds: float = 0.0


Ending = Finished | Retry


class Engine(Protocol):
    """Brings jobs to a worker. The tables of jobs decide; an engine only says what to look at."""

    @property
    def name(self) -> str:
        """``sql`` or ``jetstream``."""

    async def open(self) -> None:
        """Connect."""

    async def close(self) -> None:
        """Let go of everything. Idempotent."""

    async def take(self, limit: int, wait_seconds: float) -> Sequence[Delivery]:
        """Take leases on up to ``limit`` jobs, waiting so long for the first; may be empty."""

    async def renew(self, deliveries: Sequence[Delivery]) -> set[tuple[str, str]]:
        """Renew the leases; returns the jobs (tenant, id) that are still held."""

    async def settle(self, delivery: Delivery, ending: Ending) -> None:
        """Hear what became of a delivery, after the tables know."""

    def notify(self) -> None:
        """Hear that jobs were committed in this process."""

    def wake(self) -> None:
        """Make a waiting ``take`` return soon, because the worker stops."""


class RecordCache(Protocol):
    """A cache of committed records. Never the truth: wrong, stale or down, it costs time."""

    async def get(self, record_id: RecordId, now: datetime) -> Record | None:
        """Return a record that is certainly what was put, or None."""

    async def put(self, record: Record, now: datetime) -> None:
        """Remember a committed record until it expires."""

    async def forget(self, record_ids: Iterable[RecordId]) -> None:
        """Drop records."""

    async def close(self) -> None:
        """Let go of the connection."""


class Metrics(Protocol):
    """Sees what happens; must not fail and must not block."""

    def outcome(self, endpoint: str, outcome: Outcome) -> None:
        """Count how a guarded request ended."""

    def waited(self, endpoint: str, seconds: float) -> None:
        """Note that a duplicate waited for the first one."""

    def expired(self, endpoint: str) -> None:
        """Note that a record was found past its time."""

    def store_time(self, operation: str, seconds: float) -> None:
        """Note how long a call to the store took."""

    def swept(self, records: int, seconds: float) -> None:
        """Note how many records a sweep removed."""


class JobMetrics(Protocol):
    """Sees what becomes of jobs; must not fail and must not block."""

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        """Count how one attempt ended, and how long it took."""

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        """Set, per queue: waiting, running, dead, and the age of the oldest due job in seconds."""


class FaultPoints(Protocol):
    """Named points at which a test may kill, delay or raise. Injected, never global."""

    async def reach(self, point: str) -> None:
        """Return to go on, or inject the fault."""


class SyncFaultPoints(Protocol):
    """The same for blocking code.

    Every operation of the outbox that writes has two: ``<operation>.before_commit`` and
    ``<operation>.after_commit``, such as ``enqueue.before_commit``.
    """

    def reach(self, point: str) -> None:
        """Return to go on, or inject the fault."""
