"""What the rules need from the world: stores, transactions, time, eyes. Protocols only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from holdfast.core.decision import Held
from holdfast.core.record import AuditEvent, Record, RecordId

__all__ = [
    "Claim",
    "Claimed",
    "Clock",
    "FaultPoints",
    "Found",
    "Outcome",
    "Params",
    "RecordCache",
    "RecordQuery",
    "Row",
    "Store",
    "Transaction",
    "UnitOfWork",
    "Watcher",
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
    def superseded(self) -> bool:
        """True when another's record was seen after the claim: this unit may not commit."""

    async def commit(self, record: Record | None, audit: AuditEvent | None) -> None:
        """Write record and audit event beside the business rows and commit all of it.

        Raises ``SupersededError`` (rolled back), ``CommitUnknownError`` (nobody knows yet) or
        ``StoreUnavailableError`` (rolled back).
        """

    async def rollback(self) -> None:
        """Undo everything. Never raises: what cannot be rolled back is cut off."""


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

    async def begin(self) -> UnitOfWork:
        """Open a transaction without a key, for endpoints where the key is optional."""

    async def read(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Run a query outside any guarded request."""

    async def sweep(self, now: datetime, limit: int) -> int:
        """Delete up to ``limit`` expired records and return how many went."""

    async def records(self, query: RecordQuery) -> Sequence[Record]:
        """List records, newest first, for operators."""

    async def secret(self) -> bytes:
        """Return this database's own random secret, made with its schema."""


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


class Watcher(Protocol):
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


class FaultPoints(Protocol):
    """Named instants at which a test may kill, delay or raise. Injected, never global."""

    async def reach(self, point: str) -> None:
        """Pass the point, or do what the test wants done there."""
