"""Finds records for operators: by key, ids, tenant, endpoint and time."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from onceward.ports import Store
from onceward.records import Record
from onceward.stores.rows import listed_record
from onceward.stores.sql_loader import load_queries

__all__ = ["RECORD_FILTERS", "RecordPlace", "database_time", "find_records", "record_queries"]

RECORD_FILTERS: Final[Mapping[str, str]] = {
    "endpoint": "endpoint = :endpoint",
    "key": "idempotency_key = :key",
    "request_id": "request_id = :request_id",
    "correlation_id": "correlation_id = :correlation_id",
}
"""The columns that ``find_records`` compares, by name, with their conditions."""

_COLUMNS: Final = 14


class RecordPlace(NamedTuple):
    """A place in the list of records: after this one."""

    created_at: datetime
    tenant: str
    endpoint: str
    key: str


async def find_records(
    store: Store,
    *,
    tenant: str | None,
    filters: Mapping[str, str],
    before: datetime | None = None,
    after: RecordPlace | None = None,
    limit: int,
) -> list[Record]:
    """Return records by columns, newest first. ``tenant`` None means all tenants."""
    clauses = [RECORD_FILTERS[name] for name in filters]
    values: dict[str, Any] = {**filters, "limit": limit}
    if tenant is not None:
        clauses.append("tenant = :tenant")
        values["tenant"] = tenant
    if before is not None:
        clauses.append("created_at < :before")
        values["before"] = database_time(store, before)
    if after is not None:
        clauses.append(
            "(created_at, tenant, endpoint, idempotency_key) < "
            "(:after_at, :after_tenant, :after_endpoint, :after_key)"
        )
        values |= {
            "after_at": database_time(store, after.created_at),
            "after_tenant": after.tenant,
            "after_endpoint": after.endpoint,
            "after_key": after.key,
        }
    where = " AND ".join(clauses) or "1 = 1"
    # No index of SQLite has the endpoint and the time.
    is_unfiltered = tenant is None and not filters and store.name != "sqlite"
    name = "newest_records" if is_unfiltered else "find_records"
    sql = record_queries(store)[name].replace("{where}", where)
    if store.table_names.is_distributed:  # parameters of a function
        place = ":after_at, :after_tenant, :after_endpoint, :after_key"
        sql = sql.replace("{before}", "NULL" if before is None else ":before")
        sql = sql.replace("{after}", "NULL, NULL, NULL, NULL" if after is None else place)
    rows = await store.read(sql, values)
    return [listed_record(tuple(row.values())[:_COLUMNS]) for row in rows]


def record_queries(store: Store) -> Mapping[str, str]:
    """Return the statements of ``record_search.sql``."""
    return load_queries("onceward_operator", "record_search.sql", names=store.table_names)


def database_time(store: Store, at: datetime) -> Any:
    """Return an instant as the columns of records have it."""
    if store.name != "sqlite":
        return at
    return at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
