"""Events of a walker for their devices: numbered without gaps, read after a cursor."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from onceward import Transaction
from onceward.ports import Store
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.walkers import instant, update_walker

__all__ = ["WalkerEvent", "add_event", "insert_event", "list_events"]


class WalkerEvent(msgspec.Struct, frozen=True):
    """One event of a walker. ``seq`` grows by one."""

    seq: int
    type: str
    data: Mapping[str, Any]
    created_at: datetime


async def add_event(
    tx: Transaction,
    tenant: str,
    type: str,  # noqa: A002 - the name in the JSON
    data: Mapping[str, Any],
    now: datetime,
) -> int:
    """Add an event and return its number. The caller has locked the walker.

    Numbers follow the order of commits: a reader that has seen N has seen everything up to N.
    """
    walker = await update_walker(tx, tenant, now, events=1)
    await insert_event(tx, tenant, WalkerEvent(walker.event_seq, type, data, now))
    return walker.event_seq


async def insert_event(tx: Transaction, tenant: str, event: WalkerEvent) -> None:
    """Insert an event whose number the caller has reserved in the walker's row."""
    await tx.execute(
        load_queries("onceward_services.walk")["add_event"],
        {
            "tenant": tenant,
            "seq": event.seq,
            "type": event.type,
            "data": json.dumps(event.data, separators=(",", ":")),
            "now": event.created_at,
        },
    )


async def list_events(store: Store, tenant: str, *, after: int, limit: int) -> list[WalkerEvent]:
    """Return up to ``limit`` events after the event ``after``, oldest first."""
    rows = await store.read(
        load_queries("onceward_services.walk")["list_events"],
        {"tenant": tenant, "after": after, "limit": limit},
    )
    return [
        WalkerEvent(row["seq"], row["type"], json.loads(row["data"]), instant(row["created_at"]))
        for row in rows
    ]
