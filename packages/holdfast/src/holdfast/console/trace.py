"""Pages that follow one action: search by any id, one request, one correlation id."""

from typing import Final
from urllib.parse import quote, urlencode

from holdfast.console.jobs import SEARCHED_TENANTS, find_job
from holdfast.console.page import ConsoleError, NotShownError, Page, PageRequest, Redirected, Shown
from holdfast.core.idempotency_record import RecordId
from holdfast.core.tenants import tenant_or_none
from holdfast.server.record_search import find_records
from holdfast.server.request_trace import Moment, logged_requests, timeline

__all__ = ["trace_pages"]

_MAX_ID: Final = 300
_IDS: Final = {"request_id": "Request id", "key": "Key", "correlation_id": "Correlation id"}


def trace_pages() -> list[Page]:
    """Return the pages that follow one action."""
    return [
        Page("find", _find),
        Page("requests/{request_id}", _show_request),
        Page("trace/{correlation_id}", _show_trace),
    ]


async def _find(request: PageRequest) -> Redirected | Shown:
    """Go to what an id or key belongs to; list it if it belongs to several things."""
    wanted = request.query.get("q", "").strip()
    if not 0 < len(wanted) <= _MAX_ID or not wanted.isprintable():
        raise ConsoleError("give a key, a request id, a correlation id or a job id")
    found = await _targets(request, wanted)
    if not found:
        raise NotShownError(
            f"nothing has this key or id: {wanted}. Records are kept until they expire, replays "
            f"and refusals for some days. Jobs are searched in {SEARCHED_TENANTS} tenants: if "
            "there are more, open jobs/ID?tenant=NAME"
        )
    if len(found) == 1:
        return Redirected(next(iter(found)))
    return Shown("find.html", {"wanted": wanted, "found": found})


async def _targets(request: PageRequest, wanted: str) -> dict[str, str]:
    """Return what an id or key belongs to: paths with their descriptions."""
    tenant, store = tenant_or_none(request.tenant), request.store
    targets: dict[str, str] = {}
    for name, title in _IDS.items():
        records = await find_records(store, tenant=tenant, filters={name: wanted}, limit=2)
        if len(records) == 1:
            record = records[0].id
            targets.setdefault(_record_path(record), f"{title} of a record of {record.endpoint}")
        elif records:
            chosen = {name: wanted} | ({} if tenant is None else {"tenant": tenant})
            targets[f"records?{urlencode(chosen)}"] = f"{title} of several records"
    if await logged_requests(store, wanted, tenant):
        path = f"requests/{quote(wanted, safe='')}"
        targets[path] = "Request id of a replay or a refusal"
    job = None if targets else await find_job(request, wanted)
    if job is not None:
        query = urlencode({"tenant": job.view.tenant})
        targets[f"jobs/{quote(wanted, safe='')}?{query}"] = f"Id of a job {job.view.type}"
    if not targets and await timeline(store, wanted, tenant):
        targets[f"trace/{quote(wanted, safe='')}"] = "Correlation id"
    return targets


async def _show_request(request: PageRequest) -> Shown:
    """Show a request that left no record, and explain its response."""
    wanted, tenant = request.path["request_id"], tenant_or_none(request.tenant)
    rows = await logged_requests(request.store, wanted, tenant)
    if not rows:
        found = await find_records(
            request.store, tenant=tenant, filters={"request_id": wanted}, limit=1
        )
        if found:
            return Shown("request.html", {"logged": [], "record": found[0], "wanted": wanted})
        raise NotShownError("no such request is known: what ran is found by its record")
    originals = {row["original_request_id"] for row in rows} - {None}
    record = None
    for original in originals:
        found = await find_records(
            request.store,
            tenant=rows[0]["tenant"],
            filters={"request_id": original},
            limit=1,
        )
        record = found[0] if found else None
    return Shown("request.html", {"logged": rows, "record": record, "wanted": wanted})


async def _show_trace(request: PageRequest) -> Shown:
    """Show everything with one correlation id, in the order of time."""
    wanted = request.path["correlation_id"]
    moments = await timeline(request.store, wanted, tenant_or_none(request.tenant))
    if not moments:
        raise NotShownError("nothing has this correlation id, or it was deleted since")
    shown = [(moment, _path_of(moment)) for moment in moments]
    return Shown("trace.html", {"correlation_id": wanted, "moments": shown})


def _path_of(moment: Moment) -> str | None:
    """Return the page with more about a moment."""
    if moment.record_id is not None:
        return _record_path(moment.record_id)
    if moment.job_id is not None:
        return f"jobs/{moment.job_id}?{urlencode({'tenant': moment.tenant})}"
    if moment.kind in {"audit", "device"} or moment.request_id is None:
        return None
    return f"requests/{quote(moment.request_id, safe='')}"


def _record_path(record_id: RecordId) -> str:
    tenant, endpoint, key = record_id
    query = urlencode({"tenant": tenant, "endpoint": endpoint, "key": key})
    return f"records/show?{query}"
