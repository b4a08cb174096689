"""Deletes rows that are older than an operator wants to keep them, in small batches."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from holdfast.errors import ConfigurationError
from holdfast.ports import Store
from holdfast.stores.tenant_tables import Columns, columns_of

__all__ = ["AUDIT_EVENTS", "DEAD_LETTERS", "Retention", "delete_old_rows"]

# The table of audit events.
AUDIT_EVENTS: Final = "audit_events"
# The table of jobs that failed for good.
DEAD_LETTERS: Final = "dead_letters"

_BATCH: Final = 500
_PAUSE_SECONDS: Final = 0.005
_MILLISECOND: Final = timedelta(milliseconds=1)
_COLUMN_OF_OWN: Final = {AUDIT_EVENTS: "created_at", DEAD_LETTERS: "died_at"}


@dataclass(frozen=True, slots=True)
class Retention:
    """How long rows of a table are kept. Raises ``ConfigurationError``."""

    # A table of the library (``AUDIT_EVENTS``, ``DEAD_LETTERS``), or any other by its full name.
    table: str
    # Rows are deleted when they are older.
    keep: timedelta
    # The column with a row's time, which has an index; not needed for tables of the library.
    column: str | None = None

    def __post_init__(self) -> None:
        if self.keep <= timedelta(0):
            raise ConfigurationError(f"the retention of {self.table} must be longer than 0")
        if self.column is None and self.table not in _COLUMN_OF_OWN:
            raise ConfigurationError(f"the retention of {self.table} needs the column of its time")


async def delete_old_rows(store: Store, rule: Retention, now: datetime) -> int:
    """Delete the rows of one table that are too old, and return how many. Batches commit alone."""
    is_own = rule.column is None
    table = store.table_names.table(rule.table) if is_own else rule.table
    column = rule.column or _COLUMN_OF_OWN[rule.table]
    columns = await columns_of(store, table)
    if column not in columns.types or not columns.key:
        raise ConfigurationError(
            f"rows of {rule.table} cannot be deleted by age: it needs a primary key and a column "
            f"{column}"
        )
    before = now - rule.keep
    params = {"before": _in_type_of(columns.types[column], before), "limit": _BATCH}
    deleted = 0
    if is_own and rule.table == AUDIT_EVENTS:
        # No index on the time, which every write would pay for: the ids of a tenant follow it.
        async for tenant in _tenants(store, table):
            where = _oldest_of_tenant(table, column, columns)
            deleted += await _delete(store, table, columns, where, params | {"tenant": tenant})
        return deleted
    key = ", ".join(columns.key)
    where = f"SELECT {key} FROM {table} WHERE {column} < :before ORDER BY {column} LIMIT :limit"  # noqa: S608
    return await _delete(store, table, columns, where, params)


async def _delete(
    store: Store, table: str, columns: Columns, which: str, params: dict[str, Any]
) -> int:
    key = ", ".join(columns.key)
    sql = f"DELETE FROM {table} WHERE ({key}) IN ({which}) RETURNING 1 AS deleted"  # noqa: S608
    deleted = 0
    while True:
        batch = len(await store.write(sql, params))
        deleted += batch
        if batch < _BATCH:
            return deleted
        await asyncio.sleep(_PAUSE_SECONDS)


def _oldest_of_tenant(table: str, column: str, columns: Columns) -> str:
    """Look at the first rows of a tenant only: if one of them is too young, all others are."""
    key = ", ".join(columns.key)
    return (
        f"SELECT {key} FROM (SELECT {key}, {column} FROM {table} WHERE tenant = :tenant"  # noqa: S608
        f" ORDER BY {key} LIMIT :limit) AS oldest WHERE {column} < :before"
    )


async def _tenants(store: Store, table: str) -> AsyncIterator[str]:
    """Yield the tenants of a table, each found by one look into the primary key."""
    sql = f"SELECT min(tenant) AS tenant FROM {table} WHERE tenant > :after"  # noqa: S608
    after = ""
    while (found := (await store.read(sql, {"after": after}))[0]["tenant"]) is not None:
        yield found
        after = found


def _in_type_of(column_type: str, instant: datetime) -> datetime | int:
    """Return an instant as the column stores it: job tables on SQLite have milliseconds."""
    if "int" not in column_type:
        return instant
    epoch = datetime.fromtimestamp(0, tz=instant.tzinfo)
    return (instant - epoch) // _MILLISECOND
