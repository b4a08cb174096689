"""List, inspect, requeue and cancel jobs, pause and resume queues, for operators.

Every call about jobs names a tenant. ``onceward.tenants.ALL_TENANTS`` is for operators of the
database only.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, TypeVar, cast

import msgspec

from onceward.jobs.job import JobState, check_name
from onceward.jobs.job_store import JobStore, at, audit_values
from onceward.ports import Params, Row, Store
from onceward.records import AuditEvent
from onceward.stores.sql_loader import load_queries
from onceward.tenants import OPERATOR_TENANT, TenantFilter, tenant_or_none
from onceward_protocol.ids import new_id, new_request_id

__all__ = [
    "Failure",
    "JobAdmin",
    "JobCause",
    "JobDetail",
    "JobView",
    "PausedQueue",
    "PausedQueues",
    "QueueDepth",
]

T = TypeVar("T")

_OK: Final = 200
_UNLIMITED: Final = 2**31 - 1
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job in any state."""

    # A UUID derived from type and resource.
    id: str
    # What makes two jobs the same job.
    key: str
    # The tenant it belongs to.
    tenant: str
    # The queue.
    queue: str
    # The type.
    type: str
    # What it is about.
    resource_id: str | None
    # Waiting, running, done or dead.
    state: JobState
    # Whether it runs under a lease that has expired: its worker is dead or hangs, and the next
    # worker that serves the queue claims it.
    lease_expired: bool = False
    # Attempts that have started.
    attempts: int
    # Attempts after which it is dead-lettered.
    max_attempts: int | None
    # The worker that runs it now, or ran it last.
    worker: str | None
    # Why it was dead-lettered.
    reason: str | None
    # The last error of a dead letter, in one line.
    error: str | None = None
    # When it was enqueued.
    enqueued_at: datetime
    # When it may next be claimed: its due time or the end of its lease. None while it waits for
    # another job of its order key.
    due_at: datetime | None
    # When it was done or dead-lettered.
    ended_at: datetime | None
    # The request that enqueued it.
    request_id: str
    # The chain of requests it belongs to.
    correlation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One attempt that failed."""

    # The number of the attempt, from 1.
    attempt: int
    # Why it failed, for programs.
    reason: str
    # The exception, in one line.
    error: str
    # The worker that ran it.
    worker: str | None
    # When it failed.
    failed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCause:
    """A request that enqueued a job, or whose job was merged into it."""

    # The request.
    request_id: str
    # The chain of requests it belongs to.
    correlation_id: str
    # When it did so.
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """A job with its payload, result, failures and steps."""

    # What ``jobs`` lists.
    view: JobView
    # The last error, in one line.
    error: str | None
    # The payload, decoded.
    payload: Any
    # The SHA-256 of the payload in canonical form.
    payload_hash: str
    # What the handler returned.
    result: Any
    # How many other jobs were merged into this one.
    merged: int
    # The value of ``coalesce``.
    coalesce_key: str | None
    # The value of ``order``.
    order_key: str | None
    # All requests that caused it, the one that enqueued it first.
    causes: tuple[JobCause, ...]
    # The recorded steps and their results.
    steps: dict[str, Any]
    # The failed attempts, oldest first.
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """How many jobs a queue has, and the age of its oldest due job in seconds."""

    # Jobs that have not started.
    waiting: int = 0
    # Jobs with a lease.
    running: int = 0
    # Dead letters.
    dead: int = 0
    # How long the oldest due job has been waiting.
    oldest_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedQueue:
    """A queue whose jobs are not claimed."""

    # Its name.
    queue: str
    # Who paused it.
    actor: str
    # Why.
    reason: str
    # When.
    paused_at: datetime


class JobAdmin:
    """Reads the job tables, requeues dead letters and cancels waiting jobs."""

    def __init__(self, store: Store) -> None:
        self._job_store = JobStore(store)

    async def jobs(
        self,
        *,
        tenant: TenantFilter,
        state: JobState | None = None,
        queue: str | None = None,
        job_type: str | None = None,
        limit: int = 50,
    ) -> list[JobView]:
        """List jobs, by when they ended or, before that, were enqueued; newest first."""
        about = {"state": state or "", "queue": queue or "", "type": job_type or ""}
        values = about | {"tenant": tenant_or_none(tenant), "limit": limit}
        rows = await self._job_store.read("list_jobs", values)
        return [_view(row) for row in rows]

    async def find_view(self, job_id: str, *, tenant: TenantFilter) -> JobView | None:
        """Return one job without its payload and attempts, or None."""
        row = await self._row(job_id, tenant)
        return None if row is None else _view(row)

    async def find(self, job_id: str, *, tenant: TenantFilter) -> JobDetail | None:
        """Return one job in detail, or None."""
        row = await self._row(job_id, tenant)
        if row is None:
            return None
        view = _view(row)
        about = {"tenant": view.tenant, "job_id": job_id}
        failures = await self._job_store.read("failures", about)
        merged = await self._job_store.read("causes", about)
        steps = await self._job_store.steps(view.tenant, job_id)
        return _made(
            JobDetail,
            row,
            view=view,
            payload=_json(row["payload"]),
            result=_json(row["result"]),
            causes=_causes(view, merged),
            failures=tuple(_made(Failure, failed) for failed in failures),
            steps={name: _json(text) for name, text in steps.items()},
        )

    async def state(self, job_id: str, *, tenant: TenantFilter) -> JobState | None:
        """Return the state of a job, or None if there is no such job."""
        row = await self._row(job_id, tenant)
        return None if row is None else row["state"]

    async def requeue(self, job_id: str, *, tenant: TenantFilter, actor: str) -> bool:
        """Move a dead letter back into its queue with all its attempts; False if there is none."""
        return await self._change("requeue", job_id, tenant, {"actor": actor})

    async def cancel(self, job_id: str, *, tenant: TenantFilter, actor: str, reason: str) -> bool:
        """Move a waiting job to the dead letters, from where it can be requeued.

        False if there is no such job, or it runs or has ended. The next job of its order key may
        have become due: notify the workers.
        """
        return await self._change("cancel", job_id, tenant, {"actor": actor, "reason": reason})

    async def _change(
        self, query: str, job_id: str, tenant: TenantFilter, values: dict[str, Any]
    ) -> bool:
        """Run a query that requeues or cancels a job, with the lock of its order key."""
        row = await self._row(job_id, tenant)
        if row is None:
            return False
        store, about = self._job_store, {"tenant": row["tenant"], "job_id": job_id}
        async with store.transaction() as tx:
            found = await store.run(tx, "find_job", about)
            order_key = found[0]["order_key"] if found else None
            if order_key is not None:
                await store.lock_order(tx, row["tenant"], order_key)
            rows = await store.run(tx, query, about | values | audit_values())
            if rows and order_key is not None and query == "cancel":
                ordered = {"tenant": row["tenant"], "order_key": order_key}
                await store.run(tx, "release_next", ordered)
        return bool(rows)

    async def depths(self) -> dict[str, QueueDepth]:
        """Return the depth of each queue. Reads the whole table."""
        jobs, dead = [await self._job_store.read(name, {}) for name in ("depths", "dead_count")]
        found: dict[str, dict[str, Any]] = {}
        for row in jobs:
            queue = found.setdefault(row["queue"], {})
            queue[row["state"]] = row["jobs"]
            if row["state"] == "waiting":
                queue["oldest_seconds"] = float(row["oldest_seconds"] or 0.0)
        for row in dead:
            found.setdefault(row["queue"], {})["dead"] = row["jobs"]
        return {queue: QueueDepth(**counts) for queue, counts in found.items()}

    async def capped_depths(
        self, *, most: int, budget: int = _UNLIMITED
    ) -> tuple[dict[str, QueueDepth], int]:
        """Return the depth of each queue, and up to which number its jobs were counted.

        That is ``most``, or less if there are so many queues that more than about ``budget`` jobs
        would be counted, but at least 100. However long the queues are, this takes a millisecond or
        a few.
        """
        rows = await self._job_store.read("queue_depths", {"most": most, "budget": budget})
        found = {
            row["queue"]: _made(QueueDepth, row, oldest_seconds=float(row["oldest_seconds"]))
            for row in rows
        }
        return found, rows[0]["counted"] if rows else most

    async def _row(self, job_id: str, tenant: TenantFilter) -> Row | None:
        about = {"tenant": tenant_or_none(tenant), "job_id": job_id}
        if _ID.fullmatch(job_id) is None:  # PostgreSQL raises for malformed UUIDs
            return None
        rows = await self._job_store.read("find_job", about)
        return rows[0] if rows else None


class PausedQueues:
    """The paused queues of one database.

    Jobs of a paused queue are enqueued, but no worker claims them, whatever its engine. Jobs that
    run go on. A worker that dies loses nothing: its jobs are claimed again when the queue is
    resumed.
    """

    def __init__(self, store: Store, notify: Callable[[], None]) -> None:
        """``notify`` wakes the workers after a queue was resumed."""
        self._store = store
        self._notify = notify

    async def all(self) -> list[PausedQueue]:
        """Return the paused queues by name."""
        rows = await self._store.read(self._sql("paused"))
        return [_made(PausedQueue, row) for row in rows]

    async def pause(self, queue: str, *, actor: str, reason: str) -> bool:
        """Pause a queue, whether or not it has jobs; False if it was paused already.

        Claims that begin after this get none of its jobs. Raises ``UsageError`` for a malformed
        name.
        """
        check_name(queue, "queue")
        event = _event("queue.paused", queue, actor, reason)
        paused_at = event.created_at.timestamp()
        values = {"queue": queue, "actor": actor, "reason": reason, "paused_at": paused_at}
        return await self._change("pause", values, event)

    async def resume(self, queue: str, *, actor: str, reason: str) -> bool:
        """Have the jobs of a queue claimed again; False if it was not paused."""
        event = _event("queue.resumed", queue, actor, reason)
        is_resumed = await self._change("resume", {"queue": queue}, event)
        if is_resumed:
            self._notify()
        return is_resumed

    async def _change(self, statement: str, values: Params, event: AuditEvent) -> bool:
        """Change the table and write the audit event in one transaction; False: nothing to change.

        In that case, too, it commits a write, which waits for a synchronous standby: the earlier
        change may come from a commit of unknown outcome, and be lost by a failover.
        """
        unit = await self._store.begin()
        try:
            is_changed = bool(await unit.statements.fetch_all(self._sql(statement), values))
            if not is_changed:
                await unit.statements.execute(self._sql("add_nothing"))
                await unit.statements.execute(self._sql("remove_nothing"))
            await unit.commit(None, event if is_changed else None)
        except BaseException:
            await unit.rollback()
            raise
        return is_changed

    def _sql(self, name: str) -> str:
        names = self._store.table_names
        return load_queries("onceward.jobs", "paused_queues.sql", names=names)[name]


def _made(kind: type[T], row: Row, **others: Any) -> T:
    """Return a dataclass with the columns that have the names of its fields."""
    names = [field.name for field in fields(cast("Any", kind)) if field.name in row]
    return kind(**{name: _value(name, row[name]) for name in names} | others)


def _value(name: str, value: Any) -> Any:
    """Return the value of a column; queries return instants as seconds."""
    return at(value) if name.endswith("_at") and value is not None else value


def _view(row: Row) -> JobView:
    return _made(JobView, row, id=row["job_id"], lease_expired=bool(row["lease_expired"]))


def _causes(view: JobView, merged: Sequence[Row]) -> tuple[JobCause, ...]:
    first = JobCause(
        request_id=view.request_id, correlation_id=view.correlation_id, at=view.enqueued_at
    )
    # One request may enqueue a job several times.
    others = (row for row in merged if row["request_id"] != view.request_id)
    return first, *(_made(JobCause, row, at=at(row["caused_at"])) for row in others)


def _json(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def _event(what: str, queue: str, actor: str, reason: str) -> AuditEvent:
    now, request_id = datetime.now(UTC), new_request_id()
    return AuditEvent(
        id=new_id(now),
        tenant=OPERATOR_TENANT,
        actor=actor,
        endpoint=f"{what} {queue}",
        payload_hash=sha256(queue.encode()).hexdigest(),
        status=_OK,
        request_id=request_id,
        correlation_id=request_id,
        created_at=now,
        resource=f"queue:{queue}",
        reason=reason,
    )
