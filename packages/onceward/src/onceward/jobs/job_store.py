"""Statements on the job tables. The SQL is in ``sqlite.sql`` and ``postgres.sql``."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

from onceward.errors import LeaseLostError
from onceward.jobs.job import (
    AlreadyDone,
    Enqueued,
    EnqueueOutcome,
    Lease,
    LeasedJob,
    Merged,
    NewJob,
)
from onceward.ports import Params, Row, Store, Transaction, UnitOfWork
from onceward.stores.postgres.params import int_literal, text_literals
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames
from onceward_protocol.ids import new_id
from onceward_protocol.storage.migrations import split_statements

__all__ = ["JobStore", "ToDo", "at"]

_FILES: Final = {"sqlite": "sqlite.sql", "postgresql": "postgres.sql"}
# SQLite's clock in milliseconds; versions before 3.42 have no unixepoch('subsec').
_SQLITE_NOW: Final = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_ORDER: Final = "onceward.jobs.order"
_RELAY: Final = "onceward.jobs.relay"
# A longer result is a parameter, in a separate round trip: as a literal it would be parsed.
_MAX_INLINE_RESULT: Final = 4096


@cache
def _statements(database: str, names: TableNames, name: str) -> tuple[str, ...]:
    """Return the statements of a query: on SQLite some need several, in one transaction."""
    text = load_queries("onceward.jobs", _FILES[database], names=names)[name]
    if database != "sqlite":
        return (text,)
    return tuple(split_statements(text.replace("NOW_MS", _SQLITE_NOW)))


class ToDo(NamedTuple):
    """A job that is not finished."""

    queue: str
    # In how many seconds it can be leased; None if it waits for another one of its order key.
    free_in_seconds: float | None


class JobStore:
    """The jobs of one database. Leases and due times are measured by the database's clock."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._is_sqlite = store.name == "sqlite"
        # Two statements that each change many rows could deadlock, so they run one at a time.
        self._many = asyncio.Lock()
        self._complete_job = store.table_names.table("complete_job")

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """Commit what is written inside, or roll it back after an exception."""
        unit = await self.store.begin()
        try:
            yield unit.statements
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)

    # -- enqueue ------------------------------------------------------------------------------

    async def enqueue(self, tx: Transaction, job: NewJob) -> EnqueueOutcome:
        """Insert a job in the caller's transaction."""
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
        if rows and not rows[0]["merged"]:
            return Enqueued(rows[0]["job_id"])
        if not rows and await self._run(tx, "is_done", {"tenant": job.tenant, "id": job.id}):
            return AlreadyDone(job.id)
        merged = Merged(rows[0]["job_id"] if rows else job.id)
        into = {
            "job_id": merged.job_id,
            "key": rows[0]["key"] if rows else job.key,
            "audit_name": f"job.merged {job.queue} {job.type}",
        }
        await self._run(tx, "add_cause", values | into)
        return merged

    # -- leases -------------------------------------------------------------------------------

    async def claim(
        self,
        queues: Sequence[str],
        *,
        worker: str,
        limit: int,
        lease_seconds: float,
        alone: bool = True,
    ) -> list[LeasedJob]:
        """Lease up to ``limit`` due jobs of the queues that are not paused.

        ``alone``: the worker runs no other job.
        """
        values = {
            "queues": self._list(queues),
            "worker": worker,
            "limit": limit,
            "lease_seconds": lease_seconds,
            "alone": alone,
        }
        return [_leased(row) for row in await self._alone("claim", values)]

    async def claim_these(
        self,
        jobs: Iterable[tuple[str, str]],
        *,
        worker: str,
        lease_seconds: float,
        alone: bool = True,
    ) -> list[LeasedJob]:
        """Lease the given jobs (tenant, id), except those that are leased, not due or paused."""
        values = self._named(list(jobs)) | {
            "worker": worker,
            "lease_seconds": lease_seconds,
            "alone": alone,
        }
        return [_leased(row) for row in await self._alone("claim_these", values)]

    async def lost_before(self, lease: Lease) -> tuple[str, str] | None:
        """Return the worker that lost the job before this lease, and the error recorded for it."""
        if lease.number == 1:
            return None
        values = {"tenant": lease.tenant, "job_id": lease.job_id, "lease": lease.number}
        rows = await self.read("lost_before", values)
        return (rows[0]["worker"], rows[0]["error"]) if rows else None

    async def mark_alone(self, leases: Iterable[Lease], *, worker: str, alone: bool) -> bool:
        """Record whether the worker runs these jobs alone; False if all leases were lost.

        An attempt that is lost counts only if it was alone.
        """
        values = {"leases": _leases(leases), "worker": worker, "alone": alone}
        async with self._many:
            return bool(await self._alone("mark_alone", values))

    async def still_to_do(self, jobs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], ToDo]:
        """Return those of the jobs (tenant, id) that are not finished."""
        rows = await self.read("still_to_do", {"jobs": _named(jobs)})
        return {
            (row["tenant"], row["job_id"]): ToDo(row["queue"], row["free_in_seconds"])
            for row in rows
        }

    async def paused_queues(self) -> set[str]:
        """Return the queues whose jobs are not claimed."""
        return {row["queue"] for row in await self.read("paused_queues", {})}

    async def due_in(self, queues: Sequence[str]) -> float | None:
        """Return in how many seconds the next job can be leased; None if there is none.

        Jobs of paused queues do not count.
        """
        rows = await self.read("due_in", {"queues": self._list(queues)})
        seconds: float | None = rows[0]["seconds"] if rows else None
        return None if seconds is None else max(0.0, seconds)

    async def renew(
        self, leases: Iterable[Lease], *, worker: str, lease_seconds: float
    ) -> set[tuple[str, str]]:
        """Renew leases; return the jobs (tenant, id) that are still held."""
        values = {"leases": _leases(leases), "worker": worker, "lease_seconds": lease_seconds}
        async with self._many:
            rows = await self._alone("renew", values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def renew_within(
        self, unit: UnitOfWork, leases: Iterable[Lease], *, worker: str, lease_seconds: float
    ) -> None:
        """Renew leases in a handler's transaction, which on SQLite excludes all other writers."""
        values = {"leases": _leases(leases), "worker": worker, "lease_seconds": lease_seconds}
        await self._run(unit.statements, "renew", values)

    # -- outcomes -----------------------------------------------------------------------------

    async def complete_alone(
        self, results: Iterable[tuple[Lease, str | None]], *, worker: str
    ) -> set[tuple[str, str]]:
        """Complete jobs that wrote nothing; return those (tenant, id) that were still held."""
        values = self._results(results) | {"worker": worker}
        async with self._many:
            rows = await self._alone("complete", values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def complete_within(
        self, unit: UnitOfWork, job: LeasedJob, result: str | None, *, worker: str
    ) -> None:
        """Complete a job in the transaction of its effects.

        Raises ``LeaseLostError``; the transaction must then be rolled back.
        """
        tx, lease = unit.statements, job.lease
        if job.order_key is not None:
            await self._lock_order(tx, lease.tenant, job.order_key)
        if self.store.table_names.is_distributed:
            await self._run(tx, "two_phase_commit", {})
        if not await self._run(tx, "complete_one", _of(lease, worker) | {"result": result}):
            raise LeaseLostError("the lease was lost before the commit")
        await self._release_next(tx, job)

    def completion(self, job: LeasedJob, result: str | None, *, worker: str) -> str | None:
        """Return a statement for ``commit_after`` that completes a job, or None if there is none.

        SQLite needs none, and a job with an order key needs several statements.
        """
        if self._is_sqlite or job.order_key is not None:
            return None
        if result is not None and len(result) > _MAX_INLINE_RESULT:
            return None
        tenant, job_id, worker_name, text = text_literals(
            (job.lease.tenant, job.lease.job_id, worker, result)
        )
        lease = int_literal(job.lease.number)
        return f"SELECT {self._complete_job}({tenant},{job_id},{lease},{worker_name},{text})"

    async def retry(
        self, job: LeasedJob, *, worker: str, reason: str, error: str, delay_seconds: float
    ) -> bool:
        """Record a failure and schedule the next attempt; False if the lease was lost."""
        values = _of(job.lease, worker) | {
            "reason": reason,
            "error": error,
            "delay_seconds": delay_seconds,
        }
        return bool(await self._alone("retry", values))

    async def dead_letter(self, job: LeasedJob, *, worker: str, reason: str, error: str) -> bool:
        """Move a job to the dead letters; False if the lease was lost."""
        now = datetime.now(UTC)
        values = _of(job.lease, worker) | {
            "reason": reason,
            "error": error,
            "audit_id": new_id(now),
            "audit_at": now,
        }
        return await self._remove("dead_letter", job, values)

    async def remove_completed(self, job: LeasedJob, *, worker: str) -> bool:
        """Delete a job whose key was completed before it ran."""
        return await self._remove("remove_completed", job, _of(job.lease, worker))

    async def release(self, job: LeasedJob, *, worker: str) -> bool:
        """Release a lease at once; the attempt does not count."""
        return bool(await self._alone("release", _of(job.lease, worker)))

    # -- steps --------------------------------------------------------------------------------

    async def steps(self, tenant: str, job_id: str) -> dict[str, str]:
        """Return the results of a job's finished steps by name, as JSON."""
        rows = await self.read("steps", {"tenant": tenant, "job_id": job_id})
        return {row["name"]: row["result"] for row in rows}

    async def save_step(self, lease: Lease, name: str, result: str, *, worker: str) -> None:
        """Record a finished step. Raises ``LeaseLostError``."""
        values = _of(lease, worker) | {"name": name, "result": result}
        if not await self._alone("save_step", values):
            raise LeaseLostError(f"the lease was lost before step {name!r} was recorded")

    # -- the relay ----------------------------------------------------------------------------

    @asynccontextmanager
    async def relay_lock(self, name: str, *, idle_seconds: float) -> AsyncIterator[bool]:
        """Try to lock publishing under this name; yields whether the lock was acquired.

        SQLite has no such lock: an open transaction would block all other writers.
        """
        if self._is_sqlite:
            yield True
            return
        unit = await self.store.begin(idle_seconds=idle_seconds)
        try:
            lock = {"lock": self.store.table_names.lock_number("", _RELAY, name)}
            yield bool((await self._run(unit.statements, "relay_lock", lock))[0]["mine"])
        finally:
            await unit.rollback()

    async def to_publish(
        self, queues: Sequence[str], *, front: int, limit: int, again_after_seconds: float
    ) -> Sequence[Row]:
        """Return jobs to publish to a broker: tenant, job_id, queue, seq, published.

        At most ``front`` of each queue's due jobs are published at a time; of a paused queue, none.
        """
        values = {
            "queues": self._list(queues),
            "front": front,
            "limit": limit,
            "again_after_seconds": again_after_seconds,
        }
        return await self.read("to_publish", values)

    async def mark_published(self, jobs: Iterable[Row]) -> None:
        """Record that rows of ``to_publish`` were published."""
        rows = list(jobs)
        if self._is_sqlite:
            named = [
                {
                    "tenant": job["tenant"],
                    "job_id": job["job_id"],
                    "seq": job["seq"],
                    "published": job["published"] + 1,
                }
                for job in rows
            ]
            await self._alone("mark_published", {"jobs": _json(named)})
            return
        values = self._named([(job["tenant"], job["job_id"]) for job in rows]) | {
            "seqs": _array([str(job["seq"]) for job in rows]),
            "published": _array([str(job["published"] + 1) for job in rows]),
        }
        await self._alone("mark_published", values)

    async def reset_published(self) -> int:
        """Record that the broker has lost all messages; return how many jobs are affected."""
        rows = await self._alone("reset_published", {})
        return len(rows) if self._is_sqlite else int(rows[0]["jobs"])

    async def unpublish(self, jobs: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Have jobs (tenant, id) published again; return those that no other transaction locks."""
        rows = await self._alone("unpublish", self._named(list(jobs)))
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def overdue(
        self, queues: Sequence[str], *, seconds: float, limit: int
    ) -> list[tuple[str, str]]:
        """Return the first ``limit`` jobs (tenant, id) that have been due for so many seconds.

        Jobs of paused queues are left out.
        """
        found: list[Row] = []
        paused = await self.paused_queues()
        for queue in queues:
            if queue in paused:
                continue
            found += await self.read(
                "overdue", {"queue": queue, "seconds": seconds, "limit": limit}
            )
        found.sort(key=lambda row: -row["overdue_seconds"])
        return [(row["tenant"], row["job_id"]) for row in found[:limit]]

    async def publish_due_in(self, queues: Sequence[str]) -> float | None:
        """Return in how many seconds the next job becomes due; None if there is none."""
        rows = await self.read("publish_due_in", {"queues": self._list(queues)})
        seconds: float | None = rows[0]["seconds"] if rows else None
        return None if seconds is None else max(0.0, seconds)

    # -- for operators and schedules ------------------------------------------------------------

    async def now(self) -> datetime:
        """Return the time of the database's clock."""
        return at((await self.read("now", {}))[0]["now"])

    async def read(self, name: str, params: Params) -> Sequence[Row]:
        """Run a named query that only reads."""
        return await self.store.read(self._statements(name)[0], params)

    async def requeue(self, tenant: str, job_id: str, *, actor: str) -> bool:
        """Move a dead letter back into its queue with all its attempts; False if there is none."""
        now = datetime.now(UTC)
        values = {
            "tenant": tenant,
            "job_id": job_id,
            "actor": actor,
            "audit_id": new_id(now),
            "audit_at": now,
        }
        async with self.transaction() as tx:
            dead = await self._run(tx, "find_job", {"tenant": tenant, "job_id": job_id})
            if dead and dead[0]["order_key"] is not None:
                await self._lock_order(tx, tenant, dead[0]["order_key"])
            return bool(await self._run(tx, "requeue", values))

    async def cancel(self, tenant: str, job_id: str, *, actor: str, reason: str) -> bool:
        """Move a waiting job to the dead letters; False if it does not wait."""
        now = datetime.now(UTC)
        values = {
            "tenant": tenant,
            "job_id": job_id,
            "actor": actor,
            "reason": reason,
            "audit_id": new_id(now),
            "audit_at": now,
        }
        async with self.transaction() as tx:
            found = await self._run(tx, "find_job", {"tenant": tenant, "job_id": job_id})
            order_key = found[0]["order_key"] if found else None
            if order_key is not None:
                await self._lock_order(tx, tenant, order_key)
            rows = await self._run(tx, "cancel", values)
            if rows and order_key is not None:
                await self._run(tx, "release_next", {"tenant": tenant, "order_key": order_key})
        return bool(rows)

    async def clean(self, name: str, *, older_than_seconds: float, limit: int) -> int:
        """Run one of the ``clean_…`` queries; return how many rows it deleted."""
        values = {"older_than_seconds": older_than_seconds, "limit": limit}
        return sum(row["deleted"] for row in await self._alone(name, values))

    # -- inside -------------------------------------------------------------------------------

    async def _remove(self, name: str, job: LeasedJob, values: dict[str, Any]) -> bool:
        """Run a query that deletes the job, and release the next job of its order key."""
        if job.order_key is None:
            return bool(await self._alone(name, values))
        async with self.transaction() as tx:
            await self._lock_order(tx, job.lease.tenant, job.order_key)
            rows = await self._run(tx, name, values)
            if rows:
                await self._release_next(tx, job)
        return bool(rows)

    async def _release_next(self, tx: Transaction, job: LeasedJob) -> None:
        if job.order_key is not None:
            values = {"tenant": job.lease.tenant, "order_key": job.order_key}
            await self._run(tx, "release_next", values)

    async def _lock_order(self, tx: Transaction, tenant: str, order_key: str) -> None:
        if not self._is_sqlite:  # SQLite has one writer at a time
            lock = self.store.table_names.lock_number(tenant, _ORDER, order_key)
            await self._run(tx, "lock_order", {"lock": lock})

    async def _run(self, tx: Transaction, name: str, values: Params) -> Sequence[Row]:
        *first, last = self._statements(name)
        for statement in first:
            await tx.execute(statement, values)
        return await tx.fetch_all(last, values)

    async def _alone(self, name: str, values: Params) -> Sequence[Row]:
        """Run a query in its own transaction."""
        statements = self._statements(name)
        if len(statements) == 1:
            return await self.store.write(statements[0], values)
        async with self.transaction() as tx:
            return await self._run(tx, name, values)

    def _statements(self, name: str) -> tuple[str, ...]:
        return _statements(self.store.name, self.store.table_names, name)

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

    def _named(self, jobs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        if self._is_sqlite:
            return {"jobs": _named(jobs)}
        return {
            "tenants": _array([tenant for tenant, _ in jobs]),
            "ids": _array([job_id for _, job_id in jobs]),
        }

    def _list(self, names: Sequence[str]) -> Any:
        return _json(list(names)) if self._is_sqlite else list(names)


def at(seconds: float) -> datetime:
    """Convert seconds since 1970, as both databases return instants here."""
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
    """Write an array literal of PostgreSQL: asyncpg is slower at encoding lists."""
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
        lost=row["lost"],
        traceparent=row["traceparent"],
        version=row["version"],
        completed=bool(row["completed"]),
    )
