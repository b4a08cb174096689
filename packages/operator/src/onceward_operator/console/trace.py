"""Pages that follow one action: search by any id, one request, one correlation id."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from typing import Any, Final
from urllib.parse import quote, urlencode

from onceward.app import Onceward
from onceward.ports import Row
from onceward.records import Record, RecordId
from onceward.tenants import ALL_TENANTS
from onceward_operator.console.jobs import find_job
from onceward_operator.console.not_found import not_found, searched_tenants
from onceward_operator.console.outcomes import (
    OUTCOME_PHRASES,
    Explained,
    explain,
    label_of,
    title_of,
)
from onceward_operator.console.page import ConsoleError, Page, PageRequest, Redirected, Shown
from onceward_operator.record_search import find_records
from onceward_operator.request_trace import (
    Moment,
    logged_requests,
    record_of_request,
    requests_with_key,
    timeline,
)

__all__ = ["record_path", "trace_pages"]

_MAX_ID: Final = 300
_HEX: Final = re.compile(r"[0-9A-Fa-f-]+")
_IDS: Final = {"request_id": "Request id", "key": "Key", "correlation_id": "Correlation id"}
# How many requests with a key and without a record a search lists.
_MOST_LISTED: Final = 20


def trace_pages(onceward: Onceward[Any]) -> list[Page]:
    """Return the pages that follow one action."""
    pages = _TracePages(onceward)
    return [
        Page("find", pages.find),
        Page("requests/{request_id}", pages.show_request),
        Page("trace/{correlation_id}", pages.show_trace),
    ]


@dataclass(frozen=True, slots=True)
class _Logged:
    """A request of the log with what explains it."""

    row: Row
    explained: Explained
    # What its error code means.
    code_title: str | None
    record: Record | None
    record_path: str | None


def _normalized(wanted: str) -> str:
    """Return an id as it is stored: some tools show hexadecimal digits in upper case."""
    return wanted.lower() if _HEX.fullmatch(wanted) else wanted


class _TracePages:
    def __init__(self, onceward: Onceward[Any]) -> None:
        self._onceward = onceward

    async def find(self, request: PageRequest) -> Redirected | Shown:
        """Go to what an id or key belongs to; list it if it belongs to several things."""
        wanted = request.query.get("q", "").strip()
        if not 0 < len(wanted) <= _MAX_ID or not wanted.isprintable():
            raise ConsoleError(
                f"Give a key, a request id, a correlation id or a job id of 1 to {_MAX_ID} "
                "printable characters."
            )
        found: dict[str, str] = {}
        for spelling in dict.fromkeys((wanted, _normalized(wanted))):
            for tenant in searched_tenants(request):
                found |= await _targets(request, spelling, tenant)
            if found:
                break
        if not found:
            searched_as = "a key, a request id, a correlation id and a job id"
            return not_found(request, self._onceward, wanted=wanted, searched_as=searched_as)
        if len(found) == 1:
            return Redirected(next(iter(found)))
        return Shown("find.html", {"wanted": wanted, "found": found})

    async def show_request(self, request: PageRequest) -> Redirected | Shown:
        """Show a request that left no record, and explain its response."""
        wanted, store = request.path["request_id"], request.store
        for tenant in searched_tenants(request):
            rows = await logged_requests(store, wanted, tenant)
            if rows:
                logged = [_logged(row, await record_of_request(store, row)) for row in rows]
                return Shown("request.html", {"logged": logged, "wanted": wanted})
            about = {"request_id": wanted}
            found = await find_records(store, tenant=tenant, filters=about, limit=2)
            if len(found) == 1:
                return Redirected(record_path(found[0].id))
            if found:
                return Redirected(_with_tenant("records", tenant, **about))
        return not_found(request, self._onceward, wanted=wanted, searched_as="a request id")

    async def show_trace(self, request: PageRequest) -> Shown:
        """Show everything with one correlation id, in the order of time."""
        wanted = request.path["correlation_id"]
        for tenant in searched_tenants(request):
            moments = await timeline(request.store, wanted, tenant)
            if moments:
                seconds = self._onceward.runtime.request_log.keep_seconds
                return Shown(
                    "trace.html",
                    {
                        "correlation_id": wanted,
                        "moments": [(moment, _path_of(moment)) for moment in moments],
                        "phrases": OUTCOME_PHRASES,
                        "has_others": any(moment.is_by_key for moment in moments),
                        "log_kept": timedelta(seconds=seconds) if seconds > 0 else None,
                    },
                )
        return not_found(request, self._onceward, wanted=wanted, searched_as="a correlation id")


def record_path(record_id: RecordId) -> str:
    """Return the page of a record."""
    # Lists have many of these: ``urlencode`` takes twice as long.
    tenant, endpoint, key = (quote(part, safe="") for part in record_id)
    return f"records/show?tenant={tenant}&endpoint={endpoint}&key={key}"


async def _targets(request: PageRequest, wanted: str, tenant: str | None) -> dict[str, str]:
    """Return the pages of an id or key: paths with their descriptions."""
    store = request.store
    targets: dict[str, str] = {}
    for name, title in _IDS.items():
        records = await find_records(store, tenant=tenant, filters={name: wanted}, limit=2)
        if len(records) == 1:
            record = records[0].id
            targets.setdefault(record_path(record), f"{title} of a record of {record.endpoint}")
        elif records:
            path = _with_tenant("records", tenant, **{name: wanted})
            targets[path] = f"{title} of several records"
    if await logged_requests(store, wanted, tenant):
        path = _with_tenant(f"requests/{quote(wanted, safe='')}", tenant)
        targets[path] = "Request id of a request without a record: replayed, refused or failed"
    if not targets:
        targets = await _targets_without_record(request, wanted, tenant)
    return targets


async def _targets_without_record(
    request: PageRequest, wanted: str, tenant: str | None
) -> dict[str, str]:
    """Return the requests with a key, the job with an id, or the trace of a correlation id."""
    store = request.store
    requests = await requests_with_key(store, wanted, tenant)
    if requests:
        return {_request_path(row, tenant): _described(row) for row in requests[:_MOST_LISTED]}
    job = await find_job(replace(request, tenant=ALL_TENANTS if tenant is None else tenant), wanted)
    if job is not None:
        path = _with_tenant(f"jobs/{quote(wanted, safe='')}", job.view.tenant)
        return {path: f"Id of a job {job.view.type}"}
    if await timeline(store, wanted, tenant):
        return {_with_tenant(f"trace/{quote(wanted, safe='')}", tenant): "Correlation id"}
    return {}


def _logged(row: Row, record: Record | None) -> _Logged:
    path = None if record is None else record_path(record.id)
    return _Logged(row, explain(row), title_of(row["code"]), record, path)


def _described(row: Row) -> str:
    at = row["time"].astimezone(UTC).isoformat(" ", timespec="seconds").removesuffix("+00:00")
    status = "" if row["status"] is None else f" with {row['status']}"
    return f"Key of a request at {at} UTC: {label_of(row['outcome'])}{status}, {row['endpoint']}"


def _path_of(moment: Moment) -> str | None:
    """Return the page with more about a moment."""
    if moment.record_id is not None:
        return record_path(moment.record_id)
    if moment.job_id is not None:
        return _with_tenant(f"jobs/{moment.job_id}", moment.tenant)
    if moment.kind in {"audit", "device"} or moment.request_id is None:
        return None
    return _with_tenant(f"requests/{quote(moment.request_id, safe='')}", moment.tenant)


def _request_path(row: Mapping[str, Any], tenant: str | None) -> str:
    return _with_tenant(f"requests/{quote(row['request_id'], safe='')}", tenant)


def _with_tenant(path: str, tenant: str | None, **query: str) -> str:
    """Return the path of a page, of one tenant if it was searched in one."""
    values = query | ({} if tenant is None else {"tenant": tenant})
    return f"{path}?{urlencode(values)}" if values else path
