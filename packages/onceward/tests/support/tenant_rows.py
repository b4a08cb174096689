"""One row of a tenant in every table that has rows of tenants, whatever its columns are."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

from onceward.ports import Store
from onceward.stores.parts import LIBRARY_PARTS
from onceward.stores.tenant_tables import TenantTable, covered_tables, plain_name

# Numbered by the database, or by the sealer.
NUMBERED = {
    ("jobs", "seq"),
    ("job_failures", "seq"),
    ("audit_events", "seal"),
    ("request_log", "id"),
}


async def add_rows(
    store: Store,
    tenant: str,
    at: datetime,
    *,
    others: Sequence[TenantTable] = (),
    values: Mapping[tuple[str, str], Any] = {},
    only: Sequence[str] = (),
) -> list[str]:
    """Create all parts, insert the rows and return the names of the tables."""
    store.schema.want(*LIBRARY_PARTS)
    await store.open()
    names = []
    for table, columns in (await covered_tables(store, others)).items():
        name = plain_name(table.name)
        short = name.removeprefix(store.table_names.prefix)
        if only and short not in only:
            continue
        row = {
            column: values.get((short, column), _value(column, kind, at))
            for column, kind in columns.types.items()
            if (short, column) not in NUMBERED and column != table.column
        } | {table.column: tenant}
        if short == "jobs":
            row["state"] = "waiting"
        listed = ", ".join(row)
        marks = ", ".join(f":{column}" for column in row)
        await store.write(f"INSERT INTO {table.name} ({listed}) VALUES ({marks})", row)
        names.append(name)
    return names


def _value(column: str, kind: str, at: datetime) -> Any:
    by_type: dict[str, Any] = {
        "uuid": uuid4(),
        "bytea": b'{"name":"Ada"}',
        "blob": b'{"name":"Ada"}',
        "boolean": False,
        "jsonb": "{}",
    }
    if kind in by_type:
        return by_type[kind]
    if "int" in kind:
        return int(at.timestamp() * 1000) if column.endswith("_at") else 1
    if kind in {"real", "double precision"}:
        return at.timestamp()
    if column.endswith("_at") or "timestamp" in kind:
        return at
    if "headers" in column:
        return "{}"
    return uuid4().hex if "key" in column or "id" in column else "some text"
