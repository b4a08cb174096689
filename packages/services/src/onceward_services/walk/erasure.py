"""Delete a walker: a mark that refuses further writes, and a job that deletes the rows.

The rows of a long history do not fit into one transaction. The job deletes them in batches, the
walker's row last: until then the mark is there, and a job that was interrupted continues.
"""

from datetime import datetime
from typing import Final

from onceward import Transaction
from onceward.ports import Store
from onceward.stores.sql_loader import load_queries
from onceward.stores.tenant_tables import TenantTable, columns_of, delete_batch, own_table
from onceward_services.registry import SERVICES
from onceward_services.walk.walkers import lock_walker

__all__ = ["DELETE_WALKER", "erase_walker", "request_deletion"]

DELETE_WALKER: Final = "walker.delete"
_WALKERS: Final = "walkers"
# Small, so that concurrent writers do not wait long.
_BATCH: Final = 500
# What is known of the walker's jobs. The jobs are last: by them the rest is found.
_JOBS: Final = (
    "delete_job_failures",
    "delete_job_steps",
    "delete_job_causes",
    "delete_job_markers",
    "delete_dead_letters",
    "delete_waiting_jobs",
)
# The numbers of the walker's devices: no other service numbers requests.
_NUMBERS: Final = ("sequence_numbers", "sequences")


async def request_deletion(tx: Transaction, tenant: str, now: datetime) -> None:
    """Mark a walker as being deleted. Locks the walker, so actions before it are complete."""
    await lock_walker(tx, tenant, now)
    sql = load_queries("onceward_services.walk", "account.sql")
    await tx.execute(sql["mark_deleting"], {"tenant": tenant, "now": now})


async def erase_walker(store: Store, tenant: str, *, queue: str) -> int:
    """Delete all rows of a walker who is marked; returns how many. May be run again.

    Audit events are kept, and so are the rows that other services have of the same person.
    """
    sql = load_queries("onceward_services.walk", "account.sql", names=store.table_names)
    about = {"tenant": tenant}
    if not await store.read(sql["is_deleting"], about):
        return 0
    for name in _JOBS:
        await store.write(sql[name], about | {"queue": queue})
    deleted = 0
    numbers = [own_table(store.table_names, name) for name in _NUMBERS]
    for table in (*map(TenantTable, _tables()), *numbers):
        columns = await columns_of(store, table.name)
        while batch := await delete_batch(store, table, columns, tenant, limit=_BATCH):
            deleted += batch
    while batch := len(await store.write(sql["delete_records"], about | {"limit": _BATCH})):
        deleted += batch
    await store.write(sql["delete_walker"], about)
    return deleted + 1


def _tables() -> list[str]:
    (walk,) = [service for service in SERVICES if service.name == "walk"]
    return [name for name in walk.tables if name != _WALKERS]
