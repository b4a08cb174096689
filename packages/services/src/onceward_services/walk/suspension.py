"""Suspend a walker and reinstate it. A suspended walker can read but not act."""

from datetime import datetime

from onceward import Transaction
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.errors import walk_error
from onceward_services.walk.events import add_event
from onceward_services.walk.walkers import Walker, instant, lock_walker

__all__ = ["lock_active_walker", "reinstate", "suspend"]


async def lock_active_walker(
    tx: Transaction, tenant: str, now: datetime, acted_at: datetime | None = None
) -> Walker:
    """Lock the walker for an action of their own, or raise ``WALKER_SUSPENDED``.

    ``acted_at`` is when they acted.
    """
    walker = await lock_walker(tx, tenant, now, acted_at)
    if walker.suspended_at is not None:
        raise walk_error(
            "WALKER_SUSPENDED",
            "this walker is suspended: an admin has to reinstate it",
            suspendedAt=instant(walker.suspended_at).isoformat(),
        )
    return walker


async def suspend(tx: Transaction, tenant: str, now: datetime) -> bool:
    """Suspend a walker; returns False if it was suspended already. The walker is locked."""
    sql = load_queries("onceward_services.walk", "admin.sql")["suspend"]
    if not await tx.execute(sql, {"tenant": tenant, "now": now}):
        return False
    await add_event(tx, tenant, "walker.suspended", {}, now)
    return True


async def reinstate(tx: Transaction, tenant: str, now: datetime) -> bool:
    """End a suspension; returns False if there was none. The walker is locked."""
    sql = load_queries("onceward_services.walk", "admin.sql")["reinstate"]
    if not await tx.execute(sql, {"tenant": tenant}):
        return False
    await add_event(tx, tenant, "walker.reinstated", {}, now)
    return True
