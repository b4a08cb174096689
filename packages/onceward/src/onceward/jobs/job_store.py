"""Statements on the job tables. The SQL is in ``sqlite.sql`` and ``postgres.sql``."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final

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

_FILES: Final = {"sqlite": "sqlite.sql", "postgresql": "postgres.sql"}
# SQLite's clock in milliseconds; versions before 3.42 have no unixepoch('subsec').
_SQLITE_NOW: Final = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
_ORDER: Final = "onceward.jobs.order"
# A longer result is a parameter, in a separate round trip: as a literal it would be parsed.
_MAX_INLINE_RESULT: Final = 4096


@cache
def _statements(database: str, names: TableNames, name: str) -> tuple[str, ...]:
    """Return the statements of a query: on SQLite some need several, in one transaction."""
    text = load_queries("onceward.jobs", _FILES[database], names=names)[name]
    if database != "sqlite":
        return (text,)
    return tuple(split_statements(text.replace("NOW_MS", _SQLITE_NOW)))


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
        values = msgspec.structs.asdict(job) | audit_values()
        values["run_at"] = None if job.run_at is None else job.run_at.timestamp()
        values["audit_name"] = f"job.enqueued {job.queue} {job.type}"
        if job.order_key is not None:
            await self.lock_order(tx, job.tenant, job.order_key)
        name = "enqueue" if job.coalesce_key is None else "enqueue_coalesced"
        rows = await self.run(tx, name, values)
        if rows and not rows[0]["merged"]:
            return Enqueued(rows[0]["job_id"])
        if not rows and await self.run(tx, "is_done", {"tenant": job.tenant, "id": job.id}):
            return AlreadyDone(job.id)
        into = rows[0] if rows else {"job_id": job.id, "key": job.key}
        values |= {"job_id": into["job_id"], "key": into["key"]}
        values["audit_name"] = f"job.merged {job.queue} {job.type}"
        await self.run(tx, "add_cause", values)
        return Merged(into["job_id"])

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
        values = {"queues": self.list_of(queues), "limit": limit}
        lease = {"worker": worker, "lease_seconds": lease_seconds, "alone": alone}
        return [_leased(row) for row in await self.write("claim", values | lease)]

    async def claim_these(
        self,
        jobs: Iterable[tuple[str, str]],
        *,
        worker: str,
        lease_seconds: float,
        alone: bool = True,
    ) -> list[LeasedJob]:
        """Lease the given jobs (tenant, id), except those that are leased, not due or paused."""
        lease = {"worker": worker, "lease_seconds": lease_seconds, "alone": alone}
        rows = await self.write("claim_these", self.named(list(jobs)) | lease)
        return [_leased(row) for row in rows]

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
            return bool(await self.write("mark_alone", values))

    async def due_in(self, queues: Sequence[str], *, query: str = "due_in") -> float | None:
        """Return in how many seconds the next job can be leased; None if there is none.

        Jobs of paused queues do not count.
        """
        rows = await self.read(query, {"queues": self.list_of(queues)})
        seconds: float | None = rows[0]["seconds"] if rows else None
        return None if seconds is None else max(0.0, seconds)

    async def renew(
        self, leases: Iterable[Lease], *, worker: str, lease_seconds: float
    ) -> set[tuple[str, str]]:
        """Renew leases; return the jobs (tenant, id) that are still held."""
        values = {"leases": _leases(leases), "worker": worker, "lease_seconds": lease_seconds}
        async with self._many:
            rows = await self.write("renew", values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def renew_within(
        self, unit: UnitOfWork, leases: Iterable[Lease], *, worker: str, lease_seconds: float
    ) -> None:
        """Renew leases in a handler's transaction, which on SQLite excludes all other writers."""
        values = {"leases": _leases(leases), "worker": worker, "lease_seconds": lease_seconds}
        await self.run(unit.statements, "renew", values)

    # -- outcomes -----------------------------------------------------------------------------

    async def complete_alone(
        self, results: Iterable[tuple[Lease, str | None]], *, worker: str
    ) -> set[tuple[str, str]]:
        """Complete jobs that wrote nothing; return those (tenant, id) that were still held."""
        values = _results(list(results), is_sqlite=self._is_sqlite) | {"worker": worker}
        async with self._many:
            rows = await self.write("complete", values)
        return {(row["tenant"], row["job_id"]) for row in rows}

    async def complete_within(
        self, unit: UnitOfWork, job: LeasedJob, result: str | None, *, worker: str
    ) -> None:
        """Complete a job in the transaction of its effects.

        Raises ``LeaseLostError``; the transaction must then be rolled back.
        """
        tx, lease = unit.statements, job.lease
        if job.order_key is not None:
            await self.lock_order(tx, lease.tenant, job.order_key)
        if self.store.table_names.is_distributed:
            await self.run(tx, "two_phase_commit", {})
        if not await self.run(tx, "complete_one", _of(lease, worker) | {"result": result}):
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
        values = {"reason": reason, "error": error, "delay_seconds": delay_seconds}
        return bool(await self.write("retry", _of(job.lease, worker) | values))

    async def dead_letter(self, job: LeasedJob, *, worker: str, reason: str, error: str) -> bool:
        """Move a job to the dead letters; False if the lease was lost."""
        values = _of(job.lease, worker) | audit_values() | {"reason": reason, "error": error}
        return await self._remove("dead_letter", job, values)

    async def remove_completed(self, job: LeasedJob, *, worker: str) -> bool:
        """Delete a job whose key was completed before it ran."""
        return await self._remove("remove_completed", job, _of(job.lease, worker))

    async def release(self, job: LeasedJob, *, worker: str) -> bool:
        """Release a lease at once; the attempt does not count."""
        return bool(await self.write("release", _of(job.lease, worker)))

    # -- steps --------------------------------------------------------------------------------

    async def steps(self, tenant: str, job_id: str) -> dict[str, str]:
        """Return the results of a job's finished steps by name, as JSON."""
        rows = await self.read("steps", {"tenant": tenant, "job_id": job_id})
        return {row["name"]: row["result"] for row in rows}

    async def save_step(self, lease: Lease, name: str, result: str, *, worker: str) -> None:
        """Record a finished step. Raises ``LeaseLostError``."""
        values = _of(lease, worker) | {"name": name, "result": result}
        if not await self.write("save_step", values):
            raise LeaseLostError(f"the lease was lost before step {name!r} was recorded")

    # -- schedules and cleaner ------------------------------------------------------------------

    async def now(self) -> datetime:
        return at((await self.read("now", {}))[0]["now"])

    async def clean(self, name: str, *, older_than_seconds: float, limit: int) -> int:
        """Run one of the ``clean_…`` queries; return how many rows it deleted."""
        values = {"older_than_seconds": older_than_seconds, "limit": limit}
        return sum(row["deleted"] for row in await self.write(name, values))

    # -- statements ---------------------------------------------------------------------------

    async def read(self, name: str, params: Params) -> Sequence[Row]:
        """Run a named query that only reads."""
        statement, *_ = _statements(self.store.name, self.store.table_names, name)
        return await self.store.read(statement, params)

    async def write(self, name: str, values: Params) -> Sequence[Row]:
        """Run a named query in its own transaction."""
        statement, *others = _statements(self.store.name, self.store.table_names, name)
        if not others:
            return await self.store.write(statement, values)
        async with self.transaction() as tx:
            return await self.run(tx, name, values)

    async def run(self, tx: Transaction, name: str, values: Params) -> Sequence[Row]:
        """Run a named query in a transaction."""
        *first, last = _statements(self.store.name, self.store.table_names, name)
        for statement in first:
            await tx.execute(statement, values)
        return await tx.fetch_all(last, values)

    async def lock_order(self, tx: Transaction, tenant: str, order_key: str) -> None:
        """Wait for other transactions with jobs of this order key."""
        if not self._is_sqlite:  # SQLite has one writer at a time
            lock = self.store.table_names.lock_number(tenant, _ORDER, order_key)
            await self.run(tx, "lock_order", {"lock": lock})

    def named(self, jobs: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Return jobs (tenant, id) as parameters."""
        if self._is_sqlite:
            return {"jobs": named_as_json(jobs)}
        return {
            "tenants": array_literal([tenant for tenant, _ in jobs]),
            "ids": array_literal([job_id for _, job_id in jobs]),
        }

    def list_of(self, names: Sequence[str]) -> Any:
        """Return names as one parameter."""
        return json_text(list(names)) if self._is_sqlite else list(names)

    async def _remove(self, name: str, job: LeasedJob, values: dict[str, Any]) -> bool:
        """Run a query that deletes the job, and release the next job of its order key."""
        if job.order_key is None:
            return bool(await self.write(name, values))
        async with self.transaction() as tx:
            await self.lock_order(tx, job.lease.tenant, job.order_key)
            rows = await self.run(tx, name, values)
            if rows:
                await self._release_next(tx, job)
        return bool(rows)

    async def _release_next(self, tx: Transaction, job: LeasedJob) -> None:
        if job.order_key is not None:
            values = {"tenant": job.lease.tenant, "order_key": job.order_key}
            await self.run(tx, "release_next", values)


def at(seconds: float) -> datetime:
    """Convert seconds since 1970, as both databases return instants here."""
    return datetime.fromtimestamp(seconds, UTC)


def audit_values() -> dict[str, Any]:
    """Return the id and the time of an audit event that a query writes."""
    now = datetime.now(UTC)
    return {"audit_id": new_id(now), "audit_at": now}


def json_text(value: Any) -> str:
    """Write a parameter of SQLite that has several values."""
    return msgspec.json.encode(value).decode()


def named_as_json(jobs: Iterable[tuple[str, str]]) -> str:
    """Write jobs (tenant, id) as JSON."""
    return json_text([{"tenant": tenant, "job_id": job_id} for tenant, job_id in jobs])


def _results(ended: Sequence[tuple[Lease, str | None]], *, is_sqlite: bool) -> dict[str, Any]:
    if is_sqlite:
        named = [
            {"tenant": of.tenant, "job_id": of.job_id, "lease": of.number, "result": text}
            for of, text in ended
        ]
        return {"leases": json_text(named)}
    return {
        "count": len(ended),
        "tenants": array_literal([lease.tenant for lease, _ in ended]),
        "ids": array_literal([lease.job_id for lease, _ in ended]),
        "numbers": array_literal([str(lease.number) for lease, _ in ended]),
        "results": array_literal([text for _, text in ended]),
    }


def _leases(leases: Iterable[Lease]) -> str:
    return json_text(
        [{"tenant": l.tenant, "job_id": l.job_id, "lease": l.number} for l in leases]  # noqa: E741
    )


def array_literal(texts: Iterable[str | None]) -> str:
    """Write an array literal of PostgreSQL: asyncpg is slower at encoding lists."""
    quoted = [
        "NULL" if text is None else '"' + text.replace("\\", r"\\").replace('"', r"\"") + '"'
        for text in texts
    ]
    return f"{{{','.join(quoted)}}}"


def _of(lease: Lease, worker: str) -> dict[str, Any]:
    job = {"tenant": lease.tenant, "job_id": lease.job_id}
    return job | {"lease": lease.number, "worker": worker}


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
