"""Pages about jobs: lists, one job, dead letters by error, requeueing, cancelling."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote, urlencode

import msgspec

from onceward.app import Onceward
from onceward.jobs.admin import JobAdmin, JobDetail
from onceward.jobs.job_store import at
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward.tenants import ALL_TENANTS, TenantFilter, tenant_or_none
from onceward_operator.console.access import Role
from onceward_operator.console.page import (
    ConsoleError,
    NotShownError,
    Page,
    PageRequest,
    Redirected,
    Shown,
)

__all__ = ["SEARCHED_TENANTS", "find_job", "job_pages", "job_sql"]

SEARCHED_TENANTS: Final = 20
"""In how many tenants a job is searched by its id, if no tenant is named."""

_PAGE_ROWS: Final = 20
# How many jobs of each state the list of all states shows, and reads if it leaves some out.
_STATE_ROWS: Final = 8
_STATE_SCANNED: Final = 60
# How many jobs one page reads, however few of them match.
_SCANNED: Final = 500
# How many of the newest dead letters are grouped by error, and how many groups are shown.
_GROUPED: Final = 500
_GROUPS: Final = 10
# How many jobs one action changes, and among how many of them it looks for those that match.
_BULK: Final = 1_000
_STATES: Final = ("running", "waiting", "dead", "done")
_NEWEST_FIRST: Final = frozenset({"done", "dead"})
_ID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MILLISECONDS: Final = re.compile(r"-?[0-9]{1,18}")
_FIRST_ID: Final = "00000000-0000-0000-0000-000000000000"
_LAST_ID: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"


def job_pages(onceward: Onceward[Any]) -> list[Page]:
    """Return the pages about jobs."""
    pages = _JobPages(onceward)
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

    @property
    def path(self) -> str:
        """The page about it."""
        return f"jobs/{self.id}?tenant={quote(self.tenant, safe='')}"


@dataclass(frozen=True, slots=True)
class _List:
    """Jobs in one state."""

    state: str
    jobs: list[_Listed]
    has_more: bool

    @property
    def may_match(self) -> bool:
        """Whether jobs match, as far as is known."""
        return bool(self.jobs) or self.has_more


class _JobPages:
    def __init__(self, onceward: Onceward[Any]) -> None:
        self._registry = onceward.jobs
        self._notify = onceward.runtime.notifier.notify

    async def all(self, request: PageRequest) -> Shown:
        """List jobs by filter: those in one state, or the first ones of each state."""
        state = request.query.get("state")
        if state is None and "after" not in request.query:
            lists = [await _some(request, each) for each in _STATES]
            pager = request.pager("jobs", None)
        elif state in _STATES:
            found, following = await _find(request, state)
            lists = [_List(state, found, has_more=following is not None)]
            pager = request.pager("jobs", following)
        else:
            raise ConsoleError(f"state must be one of {', '.join(_STATES)}")
        return Shown(
            "jobs.html",
            {
                "lists": lists,
                "state": state,
                "states": _STATES,
                "can_cancel": any(each.state == "waiting" and each.may_match for each in lists),
                "types": sorted(each.job_type for each in self._registry),
                **pager,
            },
        )

    async def show(self, request: PageRequest) -> Shown:
        """Show one job with its payload and its attempts."""
        found = await find_job(request, request.path["id"])
        if found is None:
            message = "there is no such job, or it was deleted since"
            if request.is_of_all_tenants:
                message += f"; without ?tenant=NAME, {SEARCHED_TENANTS} tenants are searched"
            raise NotShownError(message)
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
        return Redirected(f"jobs/{quote(job_id, safe='')}?{query}", "The job is requeued.")

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
        return Redirected(f"jobs/{quote(job_id, safe='')}?{query}", "The job is cancelled.")

    async def preview_cancel(self, request: PageRequest) -> Shown:
        """Count the waiting jobs that match a filter, before they are cancelled."""
        matching = await _count_matching(request, "waiting")
        return Shown("cancel_jobs.html", {"matching": matching, "bulk": _BULK})

    async def cancel_all(self, request: PageRequest) -> Redirected:
        """Cancel all waiting jobs that match a filter, up to a limit."""
        reason, admin, done = request.reason(), JobAdmin(request.store), 0
        for tenant, job_id in await _matching(request, "waiting", request.form):
            done += await admin.cancel(job_id, tenant=tenant, actor=request.actor, reason=reason)
        self._notify()
        kept = {name: request.form.get(name, "") for name in ("tenant", "queue", "type")}
        query = urlencode({"state": "waiting"} | {k: v for k, v in kept.items() if v})
        return Redirected(f"jobs?{query}", _were(done, "cancelled"))

    async def dead(self, request: PageRequest) -> Shown:
        """List dead letters, grouped by error, and one by one."""
        groups = [] if request.query.keys() & {"type", "error"} else await _by_error(request)
        found, following = await _find(request, "dead")
        return Shown(
            "dead_letters.html",
            {
                "groups": groups,
                "jobs": found,
                "matching": await _count_dead(request),
                "grouped": _GROUPED,
                "bulk": _BULK,
                **request.pager("dead-letters", following),
            },
        )

    async def requeue_all(self, request: PageRequest) -> Redirected:
        """Requeue all dead letters that match a filter, up to a limit."""
        actor = f"{request.actor}: {request.reason()}"
        admin, done = JobAdmin(request.store), 0
        for tenant, job_id in await _matching(request, "dead", request.form):
            done += await admin.requeue(job_id, tenant=tenant, actor=actor)
        self._notify()
        return Redirected("dead-letters", _were(done, "requeued"))


async def find_job(request: PageRequest, job_id: str) -> JobDetail | None:
    """Return one job in detail, or None. Without a tenant, it is searched in some of them."""
    admin, tenant = JobAdmin(request.store), request.tenant
    if _ID.fullmatch(job_id) is None:
        return None
    if tenant is ALL_TENANTS:
        sql = job_sql(request.store, "tenants_of_job", tenant)
        values = {"job_id": job_id, "most": SEARCHED_TENANTS}
        rows = await request.store.read(sql, values)
        if not rows:
            return None
        tenant = min(row["tenant"] for row in rows)
    return await admin.find(job_id, tenant=tenant)


async def _by_error(request: PageRequest) -> list[dict[str, Any]]:
    """Return the most frequent causes of the newest dead letters."""
    rows = await _read(
        request,
        "dead_by_error",
        request.query,
        request.tenant,
        scanned=_GROUPED,
        most=_GROUPS,
    )
    return [
        {**row, "last_at": at(row["last_at"]), "text": _error_text(row["error"])} for row in rows
    ]


async def _count_dead(request: PageRequest) -> int:
    """Count the dead letters that match a filter, as many as one action requeues."""
    if "type" in request.query or "error" in request.query:
        return await _count_matching(request, "dead")
    rows = await _read(request, "count_dead", request.query, request.tenant, most=_BULK)
    count: int = rows[0]["jobs"]
    return count


async def _count_matching(request: PageRequest, state: str) -> int:
    """Count the jobs that an action with the filter of a page changes."""
    name = _matching_name(state, request.tenant)
    rows = await _read(
        request, name, request.query, request.tenant, count=True, scanned=_BULK, most=_BULK
    )
    count: int = rows[0]["jobs"]
    return count


async def _matching(
    request: PageRequest, state: str, filters: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return tenant and id of the jobs that match a filter, at most as many as one action takes."""
    tenant: TenantFilter = request.tenant
    if filters.get("tenant"):
        tenant = request.own(filters["tenant"])
    name = _matching_name(state, tenant)
    rows = await _read(request, name, filters, tenant, scanned=_BULK, most=_BULK)
    return [(row["tenant"], row["job_id"]) for row in rows]


def _matching_name(state: str, tenant: TenantFilter) -> str:
    is_of_tenant = state == "waiting" and tenant is not ALL_TENANTS
    return "matching_waiting_of_tenant" if is_of_tenant else f"matching_{state}"


async def _some(request: PageRequest, state: str) -> _List:
    """Return the first jobs in a state, and whether there may be more."""
    found, following = await _find(request, state, rows=_STATE_ROWS, scanned=_STATE_SCANNED)
    return _List(state, found, has_more=following is not None)


async def _find(
    request: PageRequest, state: str, *, rows: int = _PAGE_ROWS, scanned: int = _SCANNED
) -> tuple[list[_Listed], str | None]:
    """Return a page of jobs, and where the next one begins; None after the last.

    Reads at most ``scanned`` jobs, however few of them match.
    """
    name, scanned = _list_of(request, state, rows, scanned)
    moment, job_id = _place(
        request.store, request.query.get("after"), newest_first=state in _NEWEST_FIRST
    )
    read = await _read(
        request,
        name,
        request.query,
        request.tenant,
        state=state,
        after_at=moment,
        after_id=job_id,
        scanned=scanned,
        most=rows + 1,
    )
    found = [_listed(row) for row in read if row["matches"]]
    if len(found) > rows:
        return found[:rows], found[rows - 1].place
    return found, read[-1]["place"] if read and read[-1]["nth"] == scanned else None


def _list_of(request: PageRequest, state: str, rows: int, scanned: int) -> tuple[str, int]:
    """Return the query of a list, and how many jobs it reads: more if it leaves some out."""
    asked = request.query.keys()
    if state == "waiting" and request.tenant is not ALL_TENANTS:
        # Jobs that run are among them.
        is_filtered = not asked.isdisjoint({"queue", "type"})
        return "waiting_jobs_of_tenant", scanned if is_filtered else 2 * rows
    if state in _NEWEST_FIRST:
        is_filtered = not asked.isdisjoint({"type", "queue" if state == "done" else "error"})
        return f"{state}_jobs", scanned if is_filtered else rows + 1
    if "type" not in asked:
        return "live_jobs", rows + 1
    # That many of each queue.
    return "live_jobs", scanned if "queue" in asked else 2 * rows


async def _read(
    request: PageRequest,
    name: str,
    filters: Mapping[str, str],
    tenant: TenantFilter,
    *,
    state: str = "",
    count: bool = False,
    **values: Any,
) -> Sequence[Row]:
    """Run a query about jobs that match a filter, or count what it finds."""
    sql = job_sql(request.store, name, tenant, state=state, queue=filters.get("queue", ""))
    if count:
        sql = f"SELECT count(*) AS jobs FROM ({sql}) AS found"  # noqa: S608 - a query of ours
    given = {each: filters.get(each, "") for each in ("queue", "type", "error")}
    named = values | given | {"tenant": tenant_or_none(tenant)}
    used = {each: value for each, value in named.items() if re.search(rf":{each}\b", sql)}
    return await request.store.read(sql, used)


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
        error=None if row["error"] is None else _error_text(row["error"]),
        enqueued_at=at(row["enqueued_at"]),
        due_at=None if row["due_at"] is None else at(row["due_at"]),
        ended_at=None if row["ended_at"] is None else at(row["ended_at"]),
        place=row["place"],
    )


def job_sql(
    store: Store, name: str, tenant: TenantFilter, *, state: str = "", queue: str = ""
) -> str:
    """Return a query about jobs, restricted to a tenant, and to a queue unless it is empty."""
    file = "jobs.sqlite.sql" if store.name == "sqlite" else "jobs.postgres.sql"
    sql = load_queries("onceward_operator.console", file, names=store.table_names)[name]
    sql = sql.replace("{tenant}", "1 = 1" if tenant is ALL_TENANTS else "tenant = :tenant")
    sql = sql.replace("{tenant_name}", "NULL" if tenant is ALL_TENANTS else ":tenant")
    return sql.replace("{queue}", "queue = :queue" if queue else "1 = 1").replace("{state}", state)


def _error_text(error: str) -> str:
    """Return an error without the class that only says what its reason says, too."""
    return error.removeprefix("NonRetryableError: ")


def _were(number: int, done: str) -> str:
    return f"1 job was {done}." if number == 1 else f"{number:,} jobs were {done}."


def _pretty(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
