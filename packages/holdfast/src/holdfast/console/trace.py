"""Pages that follow one action: search by any id, one request, one correlation id."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final
from urllib.parse import quote, urlencode

from holdfast.console.page import ConsoleError, NotShownError, Page, PageRequest, Redirected, Shown
from holdfast.console.records import find_records
from holdfast.core.idempotency_record import Record
from holdfast.core.tenants import tenant_or_none
from holdfast.jobs.admin import JobAdmin
from holdfast.ports import Row, Store
from holdfast.stores.sql_loader import load_queries

__all__ = ["Moment", "requests_of_key", "timeline", "trace_pages"]

_MOST: Final = 200
_MAX_ID: Final = 300


def trace_pages() -> list[Page]:
    """Return the pages that follow one action."""
    return [
        Page("find", _find),
        Page("requests/{request_id}", _show_request),
        Page("trace/{correlation_id}", _show_trace),
    ]


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a time line."""

    at: datetime
    # What it is: request, record, replay, audit, job.
    kind: str
    text: str
    tenant: str
    # Where there is more about it; None if nowhere.
    path: str | None = None
    request_id: str | None = None
    status: int | None = None


async def _find(request: PageRequest) -> Redirected:
    """Go to what an id or key belongs to."""
    wanted = request.query.get("q", "").strip()
    if not 0 < len(wanted) <= _MAX_ID or not wanted.isprintable():
        raise ConsoleError("give a key, a request id, a correlation id or a job id")
    tenant, store = tenant_or_none(request.tenant), request.store
    for name in ("request_id", "key", "correlation_id"):
        found = await find_records(store, tenant=tenant, filters={name: wanted}, limit=2)
        if len(found) == 1:
            return Redirected(record_path(found[0]))
        if found:
            return Redirected(f"records?{urlencode({name: wanted})}")
    if await _logged(store, "requests_of_id", tenant, request_id=wanted):
        return Redirected(f"requests/{quote(wanted, safe='')}")
    job = await JobAdmin(store).find(wanted, tenant=request.tenant)
    if job is not None:
        query = urlencode({"tenant": job.view.tenant})
        return Redirected(f"jobs/{quote(wanted, safe='')}?{query}")
    if await timeline(store, wanted, tenant):
        return Redirected(f"trace/{quote(wanted, safe='')}")
    raise NotShownError(
        f"nothing has this key or id: {wanted}. Records are kept until they expire, replays and "
        "refusals for some days"
    )


async def _show_request(request: PageRequest) -> Shown:
    """Show a request that left no record, and explain its response."""
    wanted, tenant = request.path["request_id"], tenant_or_none(request.tenant)
    rows = await _logged(request.store, "requests_of_id", tenant, request_id=wanted)
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
    logged = [{**row, "time": _at(row["at"])} for row in rows]
    return Shown("request.html", {"logged": logged, "record": record, "wanted": wanted})


async def _show_trace(request: PageRequest) -> Shown:
    """Show everything with one correlation id, in the order of time."""
    wanted = request.path["correlation_id"]
    moments = await timeline(request.store, wanted, tenant_or_none(request.tenant))
    if not moments:
        raise NotShownError("nothing has this correlation id, or it was deleted since")
    return Shown("trace.html", {"correlation_id": wanted, "moments": moments, "most": _MOST})


async def timeline(store: Store, correlation_id: str, tenant: str | None) -> list[Moment]:
    """Return what is known of a correlation id, oldest first. ``tenant`` None means all."""
    about = {"correlation_id": correlation_id}
    moments = []
    for record in await find_records(store, tenant=tenant, filters=about, limit=_MOST):
        if record.client_generated_at is not None:
            moments.append(
                Moment(record.client_generated_at, "device", "made by the user", record.id.tenant)
            )
        moments.append(
            Moment(
                record.created_at,
                "record",
                record.id.endpoint,
                record.id.tenant,
                record_path(record),
                record.request_id,
                record.status,
            )
        )
    moments += [
        Moment(
            _at(row["at"]),
            row["outcome"],
            row["endpoint"],
            row["tenant"],
            f"requests/{quote(row['request_id'], safe='')}",
            row["request_id"],
            row["status"],
        )
        for row in await _logged(store, "logged_requests", tenant, **about)
    ]
    for row in await _logged(store, "audit_events", tenant, **about):
        at = row["created_at"]
        moments.append(
            Moment(
                datetime.fromisoformat(at) if isinstance(at, str) else at,
                "audit",
                f"{row['endpoint']} by {row['actor']}",
                row["tenant"],
                None,
                row["request_id"],
                row["status"],
            )
        )
    return sorted(moments, key=lambda moment: moment.at)


async def requests_of_key(store: Store, record: Record) -> list[Mapping[str, Any]]:
    """Return replays and refusals of the key of a record, newest first."""
    rows = await store.read(
        _sql(store)["requests_of_key"],
        {
            "tenant": record.id.tenant,
            "endpoint": record.id.endpoint,
            "key_hash": sha256(record.id.key.encode("utf-8", "surrogatepass")).hexdigest(),
            "limit": _MOST,
        },
    )
    return [{**row, "time": _at(row["at"])} for row in rows]


def record_path(record: Record) -> str:
    """Return the page of a record."""
    tenant, endpoint, key = record.id
    query = urlencode({"tenant": tenant, "endpoint": endpoint, "key": key})
    return f"records/show?{query}"


async def _logged(store: Store, name: str, tenant: str | None, **values: Any) -> list[Row]:
    clause = "1 = 1" if tenant is None else "tenant = :tenant"
    if tenant is not None:
        values["tenant"] = tenant
    sql = _sql(store)[name].replace("{tenant}", clause)
    return list(await store.read(sql, {**values, "limit": _MOST}))


def _sql(store: Store) -> Mapping[str, str]:
    return load_queries("holdfast.console", "trace.sql", names=store.table_names)


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
