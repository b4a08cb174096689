"""Pages about jobs: lists, one job, dead letters by error, requeueing, cancelling, schedules."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from holdfast.console.access import Role
from holdfast.console.page import ConsoleError, NotShownError, Page, PageRequest, Redirected, Shown
from holdfast.core.tenants import ALL_TENANTS, TenantFilter, tenant_or_none
from holdfast.jobs.admin import JobAdmin
from holdfast.jobs.job_store import at
from holdfast.ports import Row, Store
from holdfast.server.app import Holdfast
from holdfast.stores.sql_loader import load_queries

__all__ = ["job_pages", "job_sql"]

_PAGE_ROWS: Final = 50
# How many index entries one page reads, however few of them match.
_SCANNED: Final = 500
# How many of the newest dead letters are grouped by error.
_COUNTED: Final = 1_000
_BULK: Final = 1_000
_STATES: Final = ("waiting", "running", "done", "dead")
_NEWEST_FIRST: Final = frozenset({"done", "dead"})
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MILLISECONDS: Final = re.compile(r"-?[0-9]{1,18}")
_FIRST_ID: Final = "00000000-0000-0000-0000-000000000000"
_LAST_ID: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"


def job_pages(holdfast: Holdfast[Any]) -> list[Page]:
    """Return the pages about jobs."""
    pages = _JobPages(holdfast)
    operator = Role.OPERATOR
    return [
        Page("jobs", pages.all, title="Jobs", live=True),
        Page("jobs/cancel", pages.preview_cancel, role=operator),
        Page("jobs/cancel", pages.cancel_all, method="POST", role=operator),
        Page("jobs/{id}", pages.show, live=True),
        Page("jobs/{id}/requeue", pages.requeue, method="POST", role=operator),
        Page("jobs/{id}/cancel", pages.cancel, method="POST", role=operator),
        Page("dead-letters", pages.dead, title="Dead letters", live=True),
        Page("dead-letters/requeue", pages.requeue_all, method="POST", role=operator),
        Page("periodic", pages.periodic, title="Periodic work", needs_all_tenants=True),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """One job in a list."""

    tenant: str
    id: str
    queue: str
    type: str
    resource_id: str | None
    state: str
    attempts: int
    max_attempts: int | None
    worker: str | None
    error: str | None
    enqueued_at: datetime
    due_at: datetime | None
    ended_at: datetime | None
    place: str


class _JobPages:
    def __init__(self, holdfast: Holdfast[Any]) -> None:
        self._registry = holdfast.jobs
        self._notify = holdfast.notifier.notify

    async def all(self, request: PageRequest) -> Shown:
        """List jobs in one state by filter."""
        state = request.query.get("state", "waiting")
        if state not in _STATES:
            raise ConsoleError(f"state must be one of {', '.join(_STATES)}")
        found, following = await _find(request, state)
        kept = {k: v for k, v in request.query.items() if k not in {"after", "notice"}}
        return Shown(
            "jobs.html",
            {
                "jobs": found,
                "state": state,
                "states": _STATES,
                "types": sorted(each.job_type for each in self._registry),
                "first": f"jobs?{urlencode(kept)}" if "after" in request.query else None,
                "next": f"jobs?{urlencode(kept | {'after': following})}" if following else None,
            },
        )

    async def show(self, request: PageRequest) -> Shown:
        """Show one job with its payload and its attempts."""
        found = await JobAdmin(request.store).find(request.path["id"], tenant=request.tenant)
        if found is None:
            raise NotShownError("there is no such job, or it was deleted since")
        sees = request.operator.sees_payloads
        payload = None if found.payload is None else _pretty(found.payload)
        return Shown(
            "job.html",
            {
                "job": found.view,
                "detail": found,
                "payload": payload if sees else None,
                "payload_size": 0 if payload is None else len(payload.encode()),
                "has_payload": payload is not None,
                "result": _pretty(found.result) if sees and found.result is not None else None,
                "steps": [(n, _pretty(v) if sees else None) for n, v in found.steps.items()],
            },
        )

    async def requeue(self, request: PageRequest) -> Redirected:
        """Move a dead letter back into its queue."""
        job_id, tenant = request.path["id"], request.own(request.form.get("tenant", ""))
        actor = f"{request.actor}: {request.reason()}"
        if not await JobAdmin(request.store).requeue(job_id, tenant=tenant, actor=actor):
            raise NotShownError("there is no such dead letter: it was requeued already, or deleted")
        self._notify()
        query = urlencode({"tenant": tenant})
        return Redirected(f"jobs/{quote(job_id, safe='')}?{query}", "requeued")

    async def cancel(self, request: PageRequest) -> Redirected:
        """Move a waiting job to the dead letters."""
        job_id, tenant = request.path["id"], request.own(request.form.get("tenant", ""))
        cancelled = await JobAdmin(request.store).cancel(
            job_id, tenant=tenant, actor=request.actor, reason=request.reason()
        )
        if not cancelled:
            raise NotShownError("there is no such waiting job: it runs, has ended or was cancelled")
        self._notify()  # the next job of its order key may be due
        query = urlencode({"tenant": tenant})
        return Redirected(f"jobs/{quote(job_id, safe='')}?{query}", "cancelled")

    async def preview_cancel(self, request: PageRequest) -> Shown:
        """Count the waiting jobs that match a filter, before they are cancelled."""
        found = await _matching(request, "waiting", request.query)
        return Shown("cancel_jobs.html", {"matching": len(found), "bulk": _BULK})

    async def cancel_all(self, request: PageRequest) -> Redirected:
        """Cancel all waiting jobs that match a filter, up to a limit."""
        reason, admin, done = request.reason(), JobAdmin(request.store), 0
        for tenant, job_id in await _matching(request, "waiting", request.form):
            done += await admin.cancel(job_id, tenant=tenant, actor=request.actor, reason=reason)
        self._notify()
        kept = {name: request.form.get(name, "") for name in ("tenant", "queue", "type")}
        query = urlencode({name: value for name, value in kept.items() if value})
        return Redirected(f"jobs?{query}" if query else "jobs", f"{done:,} cancelled")

    async def dead(self, request: PageRequest) -> Shown:
        """List dead letters, grouped by error, and one by one."""
        values = {"scanned": _COUNTED, **_tenant_value(request.tenant)}
        sql = job_sql(request.store, "dead_by_error", request.tenant)
        groups = [
            {**row, "last_at": at(row["last_at"])} for row in await request.store.read(sql, values)
        ]
        found, following = await _find(request, "dead")
        kept = {k: v for k, v in request.query.items() if k not in {"after", "notice"}}
        matching = await _matching(request, "dead", request.query)
        return Shown(
            "dead_letters.html",
            {
                "groups": groups,
                "jobs": found,
                "matching": len(matching),
                "bulk": _BULK,
                "first": f"dead-letters?{urlencode(kept)}" if "after" in request.query else None,
                "next": f"dead-letters?{urlencode(kept | {'after': following})}"
                if following
                else None,
            },
        )

    async def requeue_all(self, request: PageRequest) -> Redirected:
        """Requeue all dead letters that match a filter, up to a limit."""
        actor = f"{request.actor}: {request.reason()}"
        admin, done = JobAdmin(request.store), 0
        for tenant, job_id in await _matching(request, "dead", request.form):
            done += await admin.requeue(job_id, tenant=tenant, actor=actor)
        self._notify()
        return Redirected("dead-letters", f"{done:,} requeued")

    async def periodic(self, _request: PageRequest) -> Shown:
        """List the schedules of the app."""
        return Shown("periodic.html", {"schedules": self._registry.periodic})


async def _matching(
    request: PageRequest, state: str, filters: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return the jobs (tenant, id) that a bulk action is about, up to its limit."""
    tenant: TenantFilter = request.tenant
    if filters.get("tenant"):
        tenant = request.own(filters["tenant"])
    values: dict[str, Any] = {
        "queue": filters.get("queue", ""),
        "type": filters.get("type", ""),
        "scanned": _COUNTED,
        "most": _BULK,
        **_tenant_value(tenant),
    }
    name = f"matching_{state}"
    if state == "dead":
        values["error"] = filters.get("error", "")
    elif tenant is not ALL_TENANTS:
        name = "matching_waiting_of_tenant"
    rows = await request.store.read(job_sql(request.store, name, tenant), values)
    return [(row["tenant"], row["job_id"]) for row in rows]


async def _find(request: PageRequest, state: str) -> tuple[list[_Listed], str | None]:
    """Return a page of jobs, and where the next one begins; None after the last."""
    queue, after = request.query.get("queue", ""), request.query.get("after")
    is_filtered = any(name in request.query for name in ("queue", "type", "error"))
    scanned = _SCANNED if is_filtered else 2 * _PAGE_ROWS
    rows = await _read(
        request.store, state, tenant=request.tenant, queue=queue, after=after, scanned=scanned
    )
    found: list[_Listed] = []
    for job in map(_listed, rows):
        if job.state != state or not _matches(job, request.query):
            continue
        if len(found) == _PAGE_ROWS:
            return found, found[-1].place
        found.append(job)
    return found, rows[-1]["place"] if len(rows) == scanned else None


async def _read(
    store: Store,
    state: str,
    *,
    tenant: TenantFilter,
    queue: str,
    after: str | None = None,
    scanned: int,
) -> Sequence[Row]:
    moment, job_id = _place(store, after, newest_first=state in _NEWEST_FIRST)
    name = f"{state}_jobs" if state in _NEWEST_FIRST else "live_jobs"
    if name == "live_jobs" and tenant is not ALL_TENANTS:
        name = "live_jobs_of_tenant"
    values = {
        "after_at": moment,
        "after_id": job_id,
        "queue": queue,
        "scanned": scanned,
        **_tenant_value(tenant),
    }
    return await store.read(job_sql(store, name, tenant), values)


def _place(store: Store, after: str | None, *, newest_first: bool) -> tuple[str, str]:
    """Return where a page begins, as texts that the database converts."""
    if after is None:
        if store.name == "sqlite":
            moment = "9223372036854775807" if newest_first else "-1"
        else:
            moment = "infinity" if newest_first else "-infinity"
        return moment, _LAST_ID if newest_first else _FIRST_ID
    moment, _, job_id = after.rpartition(" ")
    if _ID.fullmatch(job_id) is None or not _is_moment(store, moment):
        raise ConsoleError("after is not a place in this list")
    return moment, job_id


def _is_moment(store: Store, text: str) -> bool:
    """Return whether a text is a time as the column has it."""
    if store.name == "sqlite":
        return _MILLISECONDS.fullmatch(text) is not None
    if text in {"infinity", "-infinity"}:
        return True
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


def _matches(job: _Listed, filters: Mapping[str, str]) -> bool:
    return (
        filters.get("type", job.type) == job.type
        and filters.get("error", job.error or "") == (job.error or "")
        and filters.get("queue", job.queue) == job.queue
    )


def _listed(row: Row) -> _Listed:
    return _Listed(
        tenant=row["tenant"],
        id=row["job_id"],
        queue=row["queue"],
        type=row["type"],
        resource_id=row["resource_id"],
        state=row["state"],
        attempts=row["attempts"],
        max_attempts=row["max_attempts"],
        worker=row["worker"],
        error=row["error"],
        enqueued_at=at(row["enqueued_at"]),
        due_at=None if row["due_at"] is None else at(row["due_at"]),
        ended_at=None if row["ended_at"] is None else at(row["ended_at"]),
        place=row["place"],
    )


def job_sql(store: Store, name: str, tenant: TenantFilter) -> str:
    """Return a query about jobs, restricted to a tenant."""
    file = "jobs.sqlite.sql" if store.name == "sqlite" else "jobs.postgres.sql"
    clause = "1 = 1" if tenant is ALL_TENANTS else "tenant = :tenant"
    queries = load_queries("holdfast.console", file, names=store.table_names)
    return queries[name].replace("{tenant}", clause)


def _tenant_value(tenant: TenantFilter) -> dict[str, str]:
    name = tenant_or_none(tenant)
    return {} if name is None else {"tenant": name}


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
