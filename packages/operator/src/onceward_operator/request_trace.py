"""Follows one action through the tables: requests, record, audit events, jobs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final, NamedTuple

from onceward.ports import Row, Store
from onceward.records import Record, RecordId
from onceward.stores.sql_loader import load_queries
from onceward_operator.record_search import find_records

__all__ = [
    "MOST_MOMENTS",
    "Moment",
    "key_hash_of",
    "logged_requests",
    "record_of_request",
    "requests_of_key",
    "requests_with_key",
    "timeline",
]

MOST_MOMENTS: Final = 200
"""How many rows of each table are read."""

# Of how many keys the other requests are looked up, and how many of their records.
_MOST_KEYS: Final = 100
_MOST_RECORDS: Final = 20


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
    # Of an error.
    code: str | None = None
    # What there is more about.
    record_id: RecordId | None = None
    job_id: str | None = None
    # Whether it has another correlation id, and belongs to a key of this one.
    is_by_key: bool = False


class _Key(NamedTuple):
    """A key as the log has it."""

    tenant: str
    endpoint: str
    key_hash: str


async def timeline(store: Store, correlation_id: str, tenant: str | None) -> list[Moment]:
    """Return the events of a correlation id, oldest first. ``tenant`` None means all.

    A client that sends no correlation id gets another one for each request. So requests with the
    same key are included, and the record of the key with its audit event and its jobs.
    """
    about = {"correlation_id": correlation_id}
    records = await find_records(store, tenant=tenant, filters=about, limit=MOST_MOMENTS)
    logged = list(await _rows(store, "logged_requests", tenant, about))
    moments = await _of_correlation_id(store, correlation_id, tenant)
    known = {(row["tenant"], row["id"]) for row in logged}
    of_keys = [
        row
        for row in await _requests_of_keys(store, _keys_of(records, logged), tenant)
        if (row["tenant"], row["id"]) not in known
    ]
    others = await _records_of(store, [*logged, *of_keys], {record.id for record in records})
    for record in records:
        moments += _of_record(record)
    for record in others:
        moments += _of_record(record, is_by_key=True)
        moments += await _of_correlation_id(
            store, record.correlation_id, record.id.tenant, request_id=record.request_id
        )
    moments += [_of_request(row) for row in logged]
    moments += [_of_request(row, is_by_key=True) for row in of_keys]
    return sorted(moments, key=lambda moment: moment.at)


async def logged_requests(store: Store, request_id: str, tenant: str | None) -> list[Row]:
    """Return the requests with an id that left no record, newest first."""
    return _timed(await _rows(store, "requests_of_id", tenant, {"request_id": request_id}))


async def requests_with_key(store: Store, key: str, tenant: str | None) -> list[Row]:
    """Return the requests with a key that left no record, newest first."""
    return _timed(await _of_hashes(store, [key_hash_of(key)], tenant))


async def requests_of_key(store: Store, record: Record) -> list[Row]:
    """Return the requests with the key of a record that left none themselves, newest first."""
    tenant, endpoint, key = record.id
    about = _Key(tenant, endpoint, key_hash_of(key))
    return _timed(await _requests_of_keys(store, [about], tenant))


async def record_of_request(store: Store, row: Row) -> Record | None:
    """Return the record of the key of a logged request; None if there is none, or none is known.

    The log has no keys. The record is that of the executed request, which replays in the log name.
    """
    about = _Key(row["tenant"], row["endpoint"], row["key_hash"])
    if not about.key_hash:
        return None
    rows: list[Row] = [row]
    if row["original_request_id"] is None:
        # Executed itself, although its response was an error; or named by another one.
        rows = [{**row, "original_request_id": row["request_id"]}]
        rows += await _requests_of_keys(store, [about], about.tenant)
    found = await _records_of(store, rows, set())
    return found[0] if found else None


def key_hash_of(key: str) -> str:
    """Return a key as the log has it."""
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


async def _of_correlation_id(
    store: Store, correlation_id: str, tenant: str | None, *, request_id: str | None = None
) -> list[Moment]:
    """Return audit events and jobs; with ``request_id``, those of a request found by its key."""
    about, is_by_key = {"correlation_id": correlation_id}, request_id is not None
    moments = [
        Moment(
            at=_instant(row["created_at"]),
            kind="audit",
            text=f"{row['endpoint']} by {row['actor']}",
            tenant=row["tenant"],
            request_id=row["request_id"],
            status=row["status"],
            is_by_key=is_by_key,
        )
        for row in await _rows(store, "audit_events", tenant, about)
        if request_id in {None, row["request_id"]}
    ]
    for row in await _rows(store, "jobs", tenant, about):
        if request_id in {None, row["request_id"]}:
            moments += _of_job(row, is_by_key=is_by_key)
    for row in await _rows(store, "merged_jobs", tenant, about):
        if request_id in {None, row["merged_request_id"]}:
            moments += _of_merged_job(row, is_by_key=is_by_key)
    return moments


def _keys_of(records: Iterable[Record], logged: Iterable[Row]) -> list[_Key]:
    """Return the keys of records and requests, each once."""
    keys = [_Key(it.id.tenant, it.id.endpoint, key_hash_of(it.id.key)) for it in records]
    keys += [_Key(it["tenant"], it["endpoint"], it["key_hash"]) for it in logged if it["key_hash"]]
    return list(dict.fromkeys(keys))[:_MOST_KEYS]


async def _requests_of_keys(
    store: Store, keys: Sequence[_Key], tenant: str | None
) -> Sequence[Row]:
    """Return the logged requests with these keys, newest first."""
    hashes = list(dict.fromkeys(key.key_hash for key in keys))
    if not hashes:
        return []
    wanted, rows = set(keys), await _of_hashes(store, hashes, tenant)
    return [it for it in rows if _Key(it["tenant"], it["endpoint"], it["key_hash"]) in wanted]


async def _records_of(store: Store, logged: Iterable[Row], known: set[RecordId]) -> list[Record]:
    """Return the records that logged requests were compared with, without ``known`` ones."""
    wanted = dict.fromkeys(
        (it["original_request_id"], _Key(it["tenant"], it["endpoint"], it["key_hash"]))
        for it in logged
        if it["original_request_id"] is not None
    )
    found = []
    for request_id, key in list(wanted)[:_MOST_RECORDS]:
        about = {"request_id": request_id, "endpoint": key.endpoint}
        # A client may use an id for several requests: the key decides.
        for record in await find_records(
            store, tenant=key.tenant, filters=about, limit=_MOST_RECORDS
        ):
            if record.id not in known and key_hash_of(record.id.key) == key.key_hash:
                known = known | {record.id}
                found.append(record)
    return found


def _of_request(row: Row, *, is_by_key: bool = False) -> Moment:
    return Moment(
        at=_at(row["at"]),
        kind=row["outcome"],
        text=row["endpoint"],
        tenant=row["tenant"],
        request_id=row["request_id"],
        status=row["status"],
        code=row["code"],
        is_by_key=is_by_key,
    )


def _of_record(record: Record, *, is_by_key: bool = False) -> list[Moment]:
    found = [
        Moment(
            at=record.created_at,
            kind="record",
            text=record.id.endpoint,
            tenant=record.id.tenant,
            request_id=record.request_id,
            status=record.status,
            record_id=record.id,
            is_by_key=is_by_key,
        )
    ]
    if record.client_generated_at is not None:
        made_at, tenant = record.client_generated_at, record.id.tenant
        found.append(
            Moment(
                at=made_at,
                kind="device",
                text="made by the user",
                tenant=tenant,
                is_by_key=is_by_key,
            )
        )
    return found


def _of_job(row: Row, *, is_by_key: bool) -> list[Moment]:
    """Return when a job was enqueued, and when it ended."""
    shared: dict[str, Any] = {
        "tenant": row["tenant"],
        "request_id": row["request_id"],
        "job_id": str(row["job_id"]),
        "is_by_key": is_by_key,
    }
    name = f"{row['type']} in {row['queue']}"
    found = [Moment(at=_at(row["enqueued_at"]), kind="enqueued", text=name, **shared)]
    if row["ended_at"] is not None:
        found.append(Moment(at=_at(row["ended_at"]), kind=row["state"], text=name, **shared))
    return found


def _of_merged_job(row: Row, *, is_by_key: bool) -> list[Moment]:
    """Return when a job was merged into another one, and what became of that."""
    merged = Moment(
        at=_at(row["caused_at"]),
        kind="merged",
        text=f"{row['type']} in {row['queue']}, into the job of another request",
        tenant=row["tenant"],
        request_id=row["merged_request_id"],
        job_id=str(row["job_id"]),
        is_by_key=is_by_key,
    )
    return [merged, *_of_job(row, is_by_key=is_by_key)]


async def _of_hashes(store: Store, hashes: Sequence[str], tenant: str | None) -> Sequence[Row]:
    values = {f"hash{number}": text for number, text in enumerate(hashes)}
    listed = ", ".join(f":{name}" for name in values)
    return await _rows(store, "requests_of_keys", tenant, values, listed=listed)


async def _rows(
    store: Store, name: str, tenant: str | None, values: Mapping[str, Any], *, listed: str = ""
) -> Sequence[Row]:
    """Run a statement; ``listed`` are the parameters in its list of hashes."""
    about = {**values, "limit": MOST_MOMENTS} | ({} if tenant is None else {"tenant": tenant})
    sql = _queries(store)[name].replace("{hashes}", listed)
    sql = sql.replace("{tenant}", "1 = 1" if tenant is None else "tenant = :tenant")
    seconds = "{} / 1000.0" if store.name == "sqlite" else "extract(epoch FROM {})::float8"
    for column in ("enqueued_at", "completed_at", "died_at", "caused_at"):
        sql = sql.replace(f"{{{column}}}", seconds.format(column))
    return await store.read(sql, about)


def _queries(store: Store) -> Mapping[str, str]:
    return load_queries("onceward_operator", "request_trace.sql", names=store.table_names)


def _timed(rows: Iterable[Row]) -> list[Row]:
    return [{**row, "time": _at(row["at"])} for row in rows]


def _at(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _instant(value: Any) -> datetime:
    found: datetime = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found
