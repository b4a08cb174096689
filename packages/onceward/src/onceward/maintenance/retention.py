"""Deletes rows that are older than an operator wants to keep them, in small batches."""

import asyncio
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final

from onceward.audit.chain import NO_KEYS, AuditKeys
from onceward.audit.seals import AuditSeals
from onceward.errors import ConfigurationError
from onceward.jobs.cleaner import delete_in_batches
from onceward.ports import Store
from onceward.stores.parts import AUDIT_SEALS, JOBS, Part
from onceward.stores.tenant_tables import columns_of

__all__ = ["AUDIT_EVENTS", "DEAD_LETTERS", "Retention", "delete_old_rows"]

# The table of audit events.
AUDIT_EVENTS: Final = "audit_events"
# The table of jobs that failed for good.
DEAD_LETTERS: Final = "dead_letters"

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

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the schema that it needs."""
        own = {AUDIT_EVENTS: AUDIT_SEALS, DEAD_LETTERS: JOBS}
        return (own[self.table],) if self.column is None else ()

    def __post_init__(self) -> None:
        if self.keep <= timedelta(0):
            raise ConfigurationError(f"the retention of {self.table} must be longer than 0")
        if self.column is None and self.table not in _COLUMN_OF_OWN:
            raise ConfigurationError(f"the retention of {self.table} needs the column of its time")


async def delete_old_rows(
    store: Store, rule: Retention, now: datetime, keys: AuditKeys = NO_KEYS
) -> int:
    """Delete the rows of one table that are too old, and return how many. Batches commit alone.

    ``keys`` sign the seals that say which audit events were deleted.
    """
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
    if is_own and rule.table == AUDIT_EVENTS:
        return await _delete_audit_events(store, before, now, keys)
    key = ", ".join(columns.key)
    where = f"SELECT {key} FROM {table} WHERE {column} < :before ORDER BY {column} LIMIT :limit"  # noqa: S608
    sql = f"DELETE FROM {table} WHERE ({key}) IN ({where}) RETURNING 1 AS deleted"  # noqa: S608
    params = {"before": _in_type_of(columns.types[column], before)}

    async def delete(*, limit: int) -> int:
        return len(await store.write(sql, params | {"limit": limit}))

    return await delete_in_batches(delete)


async def _delete_audit_events(
    store: Store, before: datetime, now: datetime, keys: AuditKeys
) -> int:
    """Delete old audit events of each tenant: whole seals of the chain, and unsealed events.

    There is no index on the time, which every write would pay for: seals follow it, and so do ids.
    """
    seals = AuditSeals(store)
    deleted = 0
    async for tenant in seals.tenants():
        while batch := await seals.sweep(tenant, before, now=now, keys=keys):
            deleted += batch
            await asyncio.sleep(_PAUSE_SECONDS)
        deleted += await delete_in_batches(partial(seals.delete_old_unsealed, tenant, before))
    return deleted


def _in_type_of(column_type: str, instant: datetime) -> datetime | int:
    """Return an instant as the column stores it: job tables on SQLite have milliseconds."""
    if "int" not in column_type:
        return instant
    epoch = datetime.fromtimestamp(0, tz=instant.tzinfo)
    return (instant - epoch) // _MILLISECOND
