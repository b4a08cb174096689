"""The row of a walker: points, energy, counters. Its lock serializes the walker's actions."""

from datetime import datetime

import msgspec

from onceward import Transaction
from onceward.ports import Row
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.errors import walk_error

__all__ = [
    "Walker",
    "find_walker",
    "instant",
    "lock_walker",
    "save_settle_due",
    "update_walker",
]


class Walker(msgspec.Struct, frozen=True):
    """A walker's row. The counters are the last numbers assigned."""

    tenant: str
    points_banked: int
    energy_balance: int
    allocation_seq: int
    ledger_seq: int
    event_seq: int
    # Energy spent against open days, and energy taken back after it had been spent.
    energy_held: int
    energy_debt: int
    # Points of quests completed on days that are not settled; part of ``points_banked``.
    points_provisional: int
    first_action_at: datetime | None
    # When the next job looks at what is provisional.
    settle_due_at: datetime | None
    # Set while the walker's rows are being deleted.
    deleting_at: datetime | str | None = None
    # Set while an admin has suspended the walker.
    suspended_at: datetime | str | None = None


async def lock_walker(
    tx: Transaction, tenant: str, now: datetime, acted_at: datetime | None = None
) -> Walker:
    """Lock the walker's row until the commit, creating it if it does not exist.

    This must be the first statement of a transaction about a walker: then actions commit in the
    order in which they arrive. ``acted_at`` is when the walker acted, None for jobs and admins; the
    walker's days count from the earliest one. Raises ``WALKER_BEING_DELETED`` between a walker's
    request to be deleted and the end of the deletion.
    """
    values = {"tenant": tenant, "now": now, "acted_at": acted_at}
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


async def find_walker(tx: Transaction, tenant: str) -> Walker:
    """Return the row of a walker that this transaction has locked."""
    return _walker(tenant, await tx.fetch_one(_sql("find_walker"), {"tenant": tenant}))


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
    held: int = 0,
    debt: int = 0,
    provisional_points: int = 0,
) -> Walker:
    """Add to a walker's balances and counters. The row is locked with ``lock_walker``.

    Raises ``LookupError`` if the walker has no row or if the energy would be below zero.
    """
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
            "held": held,
            "debt": debt,
            "provisional_points": provisional_points,
        },
    )
    return _walker(tenant, row)


def instant(value: datetime | str) -> datetime:
    """Convert a time from the database: SQLite returns text."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


async def save_settle_due(tx: Transaction, tenant: str, due_at: datetime | None) -> None:
    """Remember for when the next job about a walker's provisional actions is enqueued."""
    await tx.execute(_sql("save_settle_due"), {"tenant": tenant, "due_at": due_at})


def _walker(tenant: str, row: Row | None) -> Walker:
    if row is None:
        raise LookupError(
            "the walker has no row, or the energy would be below zero: call lock_walker first"
        )
    times = {
        name: None if row[name] is None else instant(row[name])
        for name in ("first_action_at", "settle_due_at")
    }
    return Walker(tenant, **(dict(row) | times))


def _sql(name: str) -> str:
    return load_queries("onceward_services.walk")[name]
