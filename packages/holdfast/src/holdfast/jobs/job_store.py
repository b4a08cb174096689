"""The tables of jobs: every statement that decides who may do what. The SQL is in ``*.sql``."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

import msgspec

from holdfast.core.fingerprint import lock_number
from holdfast.core.job import (
    AlreadyDone,
    Enqueued,
    EnqueueOutcome,
    Lease,
    LeasedJob,
    Merged,
    NewJob,
)
from holdfast.errors import LeaseLostError
from holdfast.ids import new_id
from holdfast.ports import Params, Row, Store, Transaction, UnitOfWork
from holdfast.stores.migrations import split_statements
from holdfast.stores.sql_loader import load_queries

__all__ = ["JobStore", "at"]

_FILES: Final = {"sqlite": "sqlite.sql", "postgresql": "postgres.sql"}
# The clock of SQLite, in a spelling that its older versions know too.
_SQLITE_NOW: Final = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_ORDER: Final = "holdfast.jobs.order"
_RELAY: Final = "holdfast.jobs.relay"


@cache
def _statements(database: str, name: str) -> tuple[str, ...]:
    """Return the statements of a query: on SQLite some need several, in one transaction."""
    text = load_queries("holdfast.jobs", _FILES[database])[name]
    if database != "sqlite":
        return (text,)
    return tuple(split_statements(text.replace("NOW_MS", _SQLITE_NOW)))


class JobStore:
    """Jobs in one database. Every instant that decides is the database's own."""

    def __init__(self, store: Store) -> None:
        """Use a store, which has the tables since its migrations ran."""
        self.store = store
        self._is_sqlite = store.name == "sqlite"
        # Two statements that each touch many rows could wait for each other; they take turns.
        self._many = asyncio.Lock()

    # -- enqueue ------------------------------------------------------------------------------

    async def enqueue(self, tx: Transaction, job: NewJob) -> EnqueueOutcome:
        """Put a job into the table, in the transaction of the write that causes it."""
        now = datetime.now(UTC)
        values = msgspec.structs.asdict(job) | {
            "run_at": None if job.run_at is None else job.run_at.timestamp(),
            "audit_id": new_id(now),
            "audit_at": now,
            "audit_name": f"job.enqueued {job.queue} {job.type}",
        }
        if job.order_key is not None:
            await self._lock_order(tx, job.tenant, job.order_key)
        name = "enqueue" if job.coalesce_key is None else "enqueue_coalesced"
        rows = await self._run(tx, name, values)
        if not rows:
            done = await self._run(tx, "is_done", {"tenant": job.tenant, "id": job.id})
            return AlreadyDone(job.id) if done else Merged(job.id)
        row = rows[0]
        return Merged(row["job_id"]) if row["merged"] else Enqueued(row["job_id"])

    # -- leases -------------------------------------------------------------------------------

    async def claim(
        self, queues: Sequence[str], *, worker: str, limit: int, lease_seconds: float
    ) -> list[LeasedJob]:
        """Take what is due."""
        values = {
            "queues": self._list(queues),
            "worker": worker,
            "limit": limit,
            "lease_seconds": lease_seconds,
        }
        return [_leased(row) for row in await self._alone("claim", values)]

    async def claim_these(
        self, jobs: Iterable[tuple[str, str]], *, worker: str, lease_seconds: float
    ) -> list[LeasedJob]:
        """Take jobs by tenant and id, those that are free."""
        values = {"jobs": _named(jobs), "worker": worker, "lease_seconds": lease_seconds}
        return [_leased(row) for row in await self._alone("claim_these", values)]

    async def still_to_do(
        self, jobs: Iterable[tuple[str, str]]
    ) -> dict[tuple[str, str], float | None]:
        """Return which of these are not finished, and in how many seconds each is free.

        None stands for one that waits in line behind another.
        """
        rows = await self._look("still_to_do", {"jobs": _named(jobs)})
        return {(row["tenant"], row["job_id"]): row["free_in_seconds"] for row in rows}

    async def due_in(self, queues: Sequence[str]) -> float | None:
        """Return in how many seconds the next job may be taken; None when there is none."""
        rows = await self._look("due_in", {"queues": self._list(queues)})
        seconds: float | None = rows[0]["seconds"] if rows else None
        return None if seconds is None else max(0.0, seconds)

    async def renew(
        self, leases: Iterable[Lease], *, worker: str, lease_seconds: float
    ) -> set[tuple[str, str]]:
        """Renew leases; returns the jobs that are still held."""
        values = {"leases": _leases(leases), "worker": worker, "lease_seconds": lease_seconds}
        async with self._many:
            rows = await self._alone("renew", values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def renew_within(
        self, unit: UnitOfWork, leases: Iterable[Lease], *, worker: str, lease_seconds: float
    ) -> None:
        """Renew in a handler's own transaction: on SQLite nobody else can write meanwhile."""
        values = {"leases": _leases(leases), "worker": worker, "lease_seconds": lease_seconds}
        await self._run(unit.statements, "renew", values)

    # -- endings ------------------------------------------------------------------------------

    async def complete_alone(
        self, results: Iterable[tuple[Lease, str | None]], *, worker: str
    ) -> set[tuple[str, str]]:
        """Write the markers of jobs that wrote nothing else; returns which were still held."""
        values = self._results(results) | {"worker": worker}
        async with self._many:
            rows = await self._alone("complete", values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def complete_within(
        self, unit: UnitOfWork, job: LeasedJob, result: str | None, *, worker: str
    ) -> None:
        """Write the marker beside the effects. After ``LeaseLostError`` nothing may commit."""
        tx, lease = unit.statements, job.lease
        if job.order_key is not None:
            await self._lock_order(tx, lease.tenant, job.order_key)
        if not await self._run(tx, "complete_one", _of(lease, worker) | {"result": result}):
            raise LeaseLostError("the lease was lost before the commit")
        await self._release_next(tx, job)

    async def retry(
        self, job: LeasedJob, *, worker: str, reason: str, error: str, delay_seconds: float
    ) -> bool:
        """Let a failed job wait for its next attempt; False when the lease was lost."""
        values = _of(job.lease, worker) | {
            "reason": reason,
            "error": error,
            "delay_seconds": delay_seconds,
        }
        return bool(await self._alone("retry", values))

    async def bury(self, job: LeasedJob, *, worker: str, reason: str, error: str) -> bool:
        """Give a job up: it becomes a dead letter. False when the lease was lost."""
        now = datetime.now(UTC)
        values = _of(job.lease, worker) | {
            "reason": reason,
            "error": error,
            "audit_id": new_id(now),
            "audit_at": now,
        }
        return await self._leave("bury", job, values)

    async def forget(self, job: LeasedJob, *, worker: str) -> bool:
        """Take a job off whose key was completed before it ran."""
        return await self._leave("forget", job, _of(job.lease, worker))

    async def give_back(self, job: LeasedJob, *, worker: str) -> bool:
        """Make a job visible again as if it had not been taken."""
        return bool(await self._alone("give_back", _of(job.lease, worker)))

    # -- steps --------------------------------------------------------------------------------

    async def steps(self, tenant: str, job_id: str) -> dict[str, str]:
        """Return the finished steps of a job and what each gave, as JSON."""
        rows = await self._look("steps", {"tenant": tenant, "job_id": job_id})
        return {row["name"]: row["result"] for row in rows}

    async def save_step(self, lease: Lease, name: str, result: str, *, worker: str) -> None:
        """Record a finished step. Raises ``LeaseLostError``."""
        values = _of(lease, worker) | {"name": name, "result": result}
        if not await self._alone("save_step", values):
            raise LeaseLostError(f"the lease was lost before step {name!r} was recorded")

    # -- the relay ----------------------------------------------------------------------------

    @asynccontextmanager
    async def relay_turn(self, name: str, *, idle_seconds: float) -> AsyncIterator[bool]:
        """Hold the one turn to publish under this name, or hear that another relay has it.

        On SQLite there is none: an open transaction would keep everyone else from writing.
        """
        if self._is_sqlite:
            yield True
            return
        unit = await self.store.begin(idle_seconds=idle_seconds)
        try:
            lock = {"lock": lock_number("", _RELAY, name)}
            yield bool((await self._run(unit.statements, "relay_turn", lock))[0]["mine"])
        finally:
            await unit.rollback()

    async def to_publish(
        self, queues: Sequence[str], *, front: int, limit: int, again_after_seconds: float
    ) -> Sequence[Row]:
        """Return jobs that a broker should hear of: tenant, job_id, queue, seq, published.

        ``front`` is how many of each queue's due jobs a broker should know at most.
        """
        values = {
            "queues": self._list(queues),
            "front": front,
            "limit": limit,
            "again_after_seconds": again_after_seconds,
        }
        return await self._look("to_publish", values)

    async def mark_published(self, jobs: Iterable[Row]) -> None:
        """Note that these, as ``to_publish`` gave them, have been published once more."""
        named = [
            {
                "tenant": job["tenant"],
                "job_id": job["job_id"],
                "seq": job["seq"],
                "published": job["published"] + 1,
            }
            for job in jobs
        ]
        await self._alone("mark_published", {"jobs": _json(named)})

    async def forget_published(self) -> int:
        """Note that the broker knows of nothing any more; returns how many jobs that concerns."""
        return len(await self._alone("forget_published", {}))

    async def publish_due_in(self, queues: Sequence[str]) -> float | None:
        """Return in how many seconds something becomes due that is not due yet."""
        rows = await self._look("publish_due_in", {"queues": self._list(queues)})
        seconds: float | None = rows[0]["seconds"] if rows else None
        return None if seconds is None else max(0.0, seconds)

    # -- for people and clocks ------------------------------------------------------------------

    async def now(self) -> datetime:
        """Return the database's clock."""
        return at((await self._look("now", {}))[0]["now"])

    async def look(self, name: str, params: Params) -> Sequence[Row]:
        """Run one of the named queries that only read."""
        return await self._look(name, params)

    async def requeue(self, tenant: str, job_id: str, *, actor: str) -> bool:
        """Give a dead letter its attempts back; False when there is none to be requeued."""
        now = datetime.now(UTC)
        values = {
            "tenant": tenant,
            "job_id": job_id,
            "actor": actor,
            "audit_id": new_id(now),
            "audit_at": now,
        }
        unit = await self.store.begin()
        try:
            dead = await self._run(
                unit.statements, "find_job", {"tenant": tenant, "job_id": job_id}
            )
            if dead and dead[0]["order_key"] is not None:
                await self._lock_order(unit.statements, tenant, dead[0]["order_key"])
            rows = await self._run(unit.statements, "requeue", values)
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)
        return bool(rows)

    async def clean(self, name: str, *, older_than_seconds: float, limit: int) -> int:
        """Delete one batch of what has had its time."""
        values = {"older_than_seconds": older_than_seconds, "limit": limit}
        return len(await self._alone(name, values))

    # -- inside -------------------------------------------------------------------------------

    async def _leave(self, name: str, job: LeasedJob, values: dict[str, Any]) -> bool:
        """Run an ending that takes the job off the table, and let the next in line come."""
        if job.order_key is None:
            return bool(await self._alone(name, values))
        unit = await self.store.begin()
        try:
            await self._lock_order(unit.statements, job.lease.tenant, job.order_key)
            rows = await self._run(unit.statements, name, values)
            if rows:
                await self._release_next(unit.statements, job)
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)
        return bool(rows)

    async def _release_next(self, tx: Transaction, job: LeasedJob) -> None:
        if job.order_key is not None:
            values = {"tenant": job.lease.tenant, "order_key": job.order_key}
            await self._run(tx, "release_next", values)

    async def _lock_order(self, tx: Transaction, tenant: str, order_key: str) -> None:
        if not self._is_sqlite:  # there the one writer is the lock
            await self._run(tx, "lock_order", {"lock": lock_number(tenant, _ORDER, order_key)})

    async def _run(self, tx: Transaction, name: str, values: Params) -> Sequence[Row]:
        *first, last = _statements(self.store.name, name)
        for statement in first:
            await tx.execute(statement, values)
        return await tx.fetch_all(last, values)

    async def _alone(self, name: str, values: Params) -> Sequence[Row]:
        """Run a query in a transaction of its own."""
        statements = _statements(self.store.name, name)
        if len(statements) == 1:
            return await self.store.write(statements[0], values)
        unit = await self.store.begin()
        try:
            rows = await self._run(unit.statements, name, values)
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)
        return rows

    async def _look(self, name: str, values: Params) -> Sequence[Row]:
        return await self.store.read(_statements(self.store.name, name)[0], values)

    def _results(self, results: Iterable[tuple[Lease, str | None]]) -> dict[str, Any]:
        ended = list(results)
        if self._is_sqlite:
            named = [
                {"tenant": of.tenant, "job_id": of.job_id, "lease": of.number, "result": text}
                for of, text in ended
            ]
            return {"leases": _json(named)}
        return {
            "count": len(ended),
            "tenants": _array([lease.tenant for lease, _ in ended]),
            "ids": _array([lease.job_id for lease, _ in ended]),
            "numbers": _array([str(lease.number) for lease, _ in ended]),
            "results": _array([text for _, text in ended]),
        }

    def _list(self, names: Sequence[str]) -> Any:
        return _json(list(names)) if self._is_sqlite else list(names)


def at(seconds: float) -> datetime:
    """Read an instant as both databases give it here: seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _named(jobs: Iterable[tuple[str, str]]) -> str:
    return _json([{"tenant": tenant, "job_id": job_id} for tenant, job_id in jobs])


def _leases(leases: Iterable[Lease]) -> str:
    return _json(
        [{"tenant": l.tenant, "job_id": l.job_id, "lease": l.number} for l in leases]  # noqa: E741
    )


def _array(texts: Iterable[str | None]) -> str:
    """Write an array as PostgreSQL reads one: asyncpg takes longer over each of its elements."""
    quoted = [
        "NULL" if text is None else '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'
        for text in texts
    ]
    return f"{{{','.join(quoted)}}}"


def _of(lease: Lease, worker: str) -> dict[str, Any]:
    return {
        "tenant": lease.tenant,
        "job_id": lease.job_id,
        "lease": lease.number,
        "worker": worker,
    }


def _leased(row: Row) -> LeasedJob:
    return LeasedJob(
        lease=Lease(row["tenant"], row["job_id"], row["lease"]),
        key=row["key"],
        queue=row["queue"],
        type=row["type"],
        payload=row["payload"],
        attempt=row["attempts"],
        max_attempts=row["max_attempts"],
        request_id=row["request_id"],
        correlation_id=row["correlation_id"],
        resource_id=row["resource_id"],
        order_key=row["order_key"],
        enqueued_at=at(row["enqueued_at"]),
        completed=bool(row["completed"]),
    )
