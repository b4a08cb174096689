"""Follows one action through the tables: requests, record, audit events, jobs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

from holdfast.core.idempotency_record import Record, RecordId
from holdfast.ports import Row, Store
from holdfast.server.record_search import find_records
from holdfast.stores.sql_loader import load_queries

__all__ = ["MOST_MOMENTS", "Moment", "logged_requests", "requests_of_key", "timeline"]

MOST_MOMENTS: Final = 200
"""How many rows of each table are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One event of a time line."""

    at: datetime
    # What it is: device, record, the outcome of a request, audit, job.
    kind: str
    text: str
    tenant: str
    request_id: str | None = None
    status: int | None = None
    # What there is more about.
    record_id: RecordId | None = None
    job_id: str | None = None


async def timeline(store: Store, correlation_id: str, tenant: str | None) -> list[Moment]:
    """Return what is known of a correlation id, oldest first. ``tenant`` None means all."""
    about = {"correlation_id": correlation_id}
    moments: list[Moment] = []
    for record in await find_records(store, tenant=tenant, filters=about, limit=MOST_MOMENTS):
        moments += _of_record(record)
    moments += [
        Moment(
            at=_at(row["at"]),
            kind=row["outcome"],
            text=row["endpoint"],
            tenant=row["tenant"],
            request_id=row["request_id"],
            status=row["status"],
        )
        for row in await _rows(store, "logged_requests", tenant, **about)
    ]
    moments += [
        Moment(
            at=_instant(row["created_at"]),
            kind="audit",
            text=f"{row['endpoint']} by {row['actor']}",
            tenant=row["tenant"],
            request_id=row["request_id"],
            status=row["status"],
        )
        for row in await _rows(store, "audit_events", tenant, **about)
    ]
    for row in await _rows(store, "jobs", tenant, **about):
        moments += _of_job(row)
    return sorted(moments, key=lambda moment: moment.at)


async def logged_requests(store: Store, request_id: str, tenant: str | None) -> list[Row]:
    """Return the requests with an id that left no record, newest first."""
    rows = await _rows(store, "requests_of_id", tenant, request_id=request_id)
    return [{**row, "time": _at(row["at"])} for row in rows]


async def requests_of_key(store: Store, record: Record) -> list[Row]:
    """Return replays and refusals of the key of a record, newest first."""
    rows = await store.read(
        _queries(store)["requests_of_key"],
        {
            "tenant": record.id.tenant,
            "endpoint": record.id.endpoint,
            "key_hash": sha256(record.id.key.encode("utf-8", "surrogatepass")).hexdigest(),
            "limit": MOST_MOMENTS,
        },
    )
    return [{**row, "time": _at(row["at"])} for row in rows]


def _of_record(record: Record) -> list[Moment]:
    found = [
        Moment(
            at=record.created_at,
            kind="record",
            text=record.id.endpoint,
            tenant=record.id.tenant,
            request_id=record.request_id,
            status=record.status,
            record_id=record.id,
        )
    ]
    if record.client_generated_at is not None:
        made_at, tenant = record.client_generated_at, record.id.tenant
        found.append(Moment(at=made_at, kind="device", text="made by the user", tenant=tenant))
    return found


def _of_job(row: Row) -> list[Moment]:
    """Return when a job was enqueued, and when it ended."""
    shared: dict[str, Any] = {
        "tenant": row["tenant"],
        "request_id": row["request_id"],
        "job_id": str(row["job_id"]),
    }
    name = f"{row['type']} in {row['queue']}"
    found = [Moment(at=_at(row["enqueued_at"]), kind="enqueued", text=name, **shared)]
    if row["ended_at"] is not None:
        found.append(Moment(at=_at(row["ended_at"]), kind=row["state"], text=name, **shared))
    return found


async def _rows(store: Store, name: str, tenant: str | None, **values: Any) -> Sequence[Row]:
    clause = "1 = 1" if tenant is None else "tenant = :tenant"
    if tenant is not None:
        values["tenant"] = tenant
    sql = _queries(store)[name].replace("{tenant}", clause)
    if store.name == "sqlite":
        sql = sql.replace("{enqueued_at}", "enqueued_at / 1000.0")
        sql = sql.replace("{completed_at}", "completed_at / 1000.0")
        sql = sql.replace("{died_at}", "died_at / 1000.0")
    else:
        for column in ("enqueued_at", "completed_at", "died_at"):
            sql = sql.replace(f"{{{column}}}", f"extract(epoch FROM {column})::float8")
    return await store.read(sql, {**values, "limit": MOST_MOMENTS})


def _queries(store: Store) -> Mapping[str, str]:
    return load_queries("holdfast.server", "request_trace.sql", names=store.table_names)


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _instant(value: Any) -> datetime:
    found: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found
