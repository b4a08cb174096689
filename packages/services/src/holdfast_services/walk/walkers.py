"""The walker's own row: points, energy, counters, and the lock that puts actions in line."""

from datetime import datetime

import msgspec

from holdfast import Transaction
from holdfast.ports import Row
from holdfast.stores.sql_loader import load_queries

__all__ = ["Walker", "instant", "lock_walker", "update_walker"]


class Walker(msgspec.Struct, frozen=True):
    """What a walker has. The counters are the numbers given out last."""

    tenant: str
    points_banked: int
    energy_balance: int
    allocation_seq: int
    ledger_seq: int
    event_seq: int


async def lock_walker(tx: Transaction, tenant: str, now: datetime) -> Walker:
    """Lock the walker's row until the commit; make it if there is none yet.

    To come before every other statement of a transaction that touches a walker: then the order in
    which actions arrive is the order in which they commit.
    """
    values = {"tenant": tenant, "now": now}
    row = await tx.fetch_one(_sql("lock_walker"), values)
    if row is None:
        row = await tx.fetch_one(_sql("make_walker"), values)
    return _walker(tenant, row)


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
    """Add to a walker's numbers. The row was locked with ``lock_walker``."""
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
    """Read a time as the database gives it: SQLite keeps text."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def _walker(tenant: str, row: Row | None) -> Walker:
    if row is None:
        raise LookupError("the walker has no row: lock_walker comes first")
    return Walker(tenant, **row)


def _sql(name: str) -> str:
    return load_queries("holdfast_services.walk")[name]
