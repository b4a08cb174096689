"""The operator's desk: look at jobs, find out why one died, put it back. Always within a tenant.

Every call names a tenant. Only who runs the database may look across them, by saying so:
``ALL_TENANTS``.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import msgspec

from holdfast.core.job import JobState
from holdfast.jobs.job_store import JobStore, at
from holdfast.ports import Row, Store

__all__ = ["ALL_TENANTS", "Failure", "JobAdmin", "JobDetail", "JobView", "QueueDepth"]

ALL_TENANTS: Final = ""
"""For whoever runs the database. No tenant has an empty name."""

_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job as people see it, wherever it stands."""

    tenant: str
    id: str
    key: str
    queue: str
    type: str
    resource_id: str | None
    state: JobState
    attempts: int
    max_attempts: int | None
    worker: str | None
    reason: str | None
    request_id: str
    correlation_id: str
    enqueued_at: datetime
    # When it may next be taken: due, or the end of its lease. None while it waits in line.
    due_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One attempt that failed."""

    attempt: int
    reason: str
    error: str
    worker: str | None
    failed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """Everything that is known of one job."""

    view: JobView
    error: str | None
    payload: Any
    payload_hash: str
    result: Any
    merged: int
    coalesce_key: str | None
    order_key: str | None
    failures: tuple[Failure, ...]
    steps: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDepth:
    """How much there is to do in one queue."""

    waiting: int = 0
    running: int = 0
    dead: int = 0
    oldest_seconds: float = 0.0


class JobAdmin:
    """Looks and requeues."""

    def __init__(self, store: Store) -> None:
        """Work on a store's tables."""
        self._table = JobStore(store)

    async def jobs(
        self,
        *,
        tenant: str,
        state: JobState | None = None,
        queue: str | None = None,
        job_type: str | None = None,
        limit: int = 50,
    ) -> list[JobView]:
        """List jobs, newest first."""
        rows = await self._table.look(
            "list_jobs",
            {
                "tenant": tenant,
                "state": state or "",
                "queue": queue or "",
                "type": job_type or "",
                "limit": limit,
            },
        )
        return [_view(row) for row in rows]

    async def find(self, job_id: str, *, tenant: str) -> JobDetail | None:
        """Return everything about one job, or None."""
        row = await self._row(job_id, tenant)
        if row is None:
            return None
        view = _view(row)
        about = {"tenant": view.tenant, "job_id": job_id}
        failures = await self._table.look("failures", about)
        steps = await self._table.steps(view.tenant, job_id)
        return JobDetail(
            view=view,
            error=row["error"],
            payload=_json(row["payload"]),
            payload_hash=row["payload_hash"],
            result=_json(row["result"]),
            merged=row["merged"],
            coalesce_key=row["coalesce_key"],
            order_key=row["order_key"],
            failures=tuple(
                Failure(
                    attempt=failed["attempt"],
                    reason=failed["reason"],
                    error=failed["error"],
                    worker=failed["worker"],
                    failed_at=at(failed["failed_at"]),
                )
                for failed in failures
            ),
            steps={name: _json(text) for name, text in steps.items()},
        )

    async def state(self, job_id: str, *, tenant: str) -> JobState | None:
        """Return where a job stands, or None where there is none."""
        row = await self._row(job_id, tenant)
        return None if row is None else row["state"]

    async def requeue(self, job_id: str, *, tenant: str, actor: str) -> bool:
        """Put a dead letter back into its queue; False when there is none to be put back."""
        row = await self._row(job_id, tenant)
        if row is None:
            return False
        return await self._table.requeue(row["tenant"], job_id, actor=actor)

    async def depths(self) -> dict[str, QueueDepth]:
        """Return how much there is to do, per queue."""
        found: dict[str, dict[str, Any]] = {}
        for row in await self._table.look("depths", {}):
            queue = found.setdefault(row["queue"], {})
            queue[row["state"]] = row["jobs"]
            if row["state"] == "waiting":
                queue["oldest_seconds"] = float(row["oldest_seconds"] or 0.0)
        for row in await self._table.look("dead_count", {}):
            found.setdefault(row["queue"], {})["dead"] = row["jobs"]
        return {queue: QueueDepth(**counts) for queue, counts in found.items()}

    async def _row(self, job_id: str, tenant: str) -> Row | None:
        if _ID.fullmatch(job_id) is None:  # PostgreSQL would choke on some of it
            return None
        rows = await self._table.look("find_job", {"tenant": tenant, "job_id": job_id})
        return rows[0] if rows else None


def _view(row: Row) -> JobView:
    return JobView(
        tenant=row["tenant"],
        id=row["job_id"],
        key=row["key"],
        queue=row["queue"],
        type=row["type"],
        resource_id=row["resource_id"],
        state=row["state"],
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        worker=row["worker"],
        reason=row["reason"],
        request_id=row["request_id"],
        correlation_id=row["correlation_id"],
        enqueued_at=at(row["enqueued_at"]),
        due_at=None if row["due_at"] is None else at(row["due_at"]),
        ended_at=None if row["ended_at"] is None else at(row["ended_at"]),
    )


def _json(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)
