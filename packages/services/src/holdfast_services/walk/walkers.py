"""The row of a walker: points, energy, counters. Its lock serializes the walker's actions."""

from datetime import datetime

import msgspec

from holdfast import Transaction
from holdfast.ports import Row
from holdfast.stores.sql_loader import load_queries
from holdfast_services.walk.errors import walk_error

__all__ = ["Walker", "instant", "lock_walker", "update_walker"]


class Walker(msgspec.Struct, frozen=True):
    """A walker's row. The counters are the last numbers assigned."""

    tenant: str
    points_banked: int
    energy_balance: int
    allocation_seq: int
    ledger_seq: int
    event_seq: int
    # Set while the walker's rows are being deleted.
    deleting_at: datetime | str | None = None
    # Set while an admin has suspended the walker.
    suspended_at: datetime | str | None = None


async def lock_walker(tx: Transaction, tenant: str, now: datetime) -> Walker:
    """Lock the walker's row until the commit, creating it if it does not exist.

    This must be the first statement of a transaction about a walker: then actions commit in the
    order in which they arrive. Raises ``WALKER_BEING_DELETED`` between a walker's request to be
    deleted and the end of the deletion.
    """
    values = {"tenant": tenant, "now": now}
    row = await tx.fetch_one(_sql("lock_walker"), values)
    if row is None:
        row = await tx.fetch_one(_sql("create_walker"), values)
    walker = _walker(tenant, row)
    if walker.deleting_at is not None:
        raise walk_error(
            "WALKER_BEING_DELETED",
            "everything about this walker is being deleted: try again when that has ended",
            requestedAt=instant(walker.deleting_at).isoformat(),
        )
    return walker


async def update_walker(
    tx: Transaction,
    tenant: str,
    now: datetime,
    *,
    points: int = 0,
    energy: int = 0,
    allocations: int = 0,
    entries: int = 0,
    events: int = 0,
) -> Walker:
    """Add to a walker's balances and counters. The row is locked with ``lock_walker``."""
    row = await tx.fetch_one(
        _sql("update_walker"),
        {
            "tenant": tenant,
            "now": now,
            "points": points,
            "energy": energy,
            "allocations": allocations,
            "entries": entries,
            "events": events,
        },
    )
    return _walker(tenant, row)


def instant(value: datetime | str) -> datetime:
    """Convert a time from the database: SQLite returns text."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def _walker(tenant: str, row: Row | None) -> Walker:
    if row is None:
        raise LookupError("the walker has no row: call lock_walker first")
    return Walker(tenant, **row)


def _sql(name: str) -> str:
    return load_queries("holdfast_services.walk")[name]
