"""Read all that a device shows of a walker in one query, so that it is of one instant."""

import json
from collections.abc import Sequence
from datetime import datetime

import msgspec

from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.catalogue import Catalogue
from onceward_services.walk.events import WalkerEvent
from onceward_services.walk.profile import Profile, profile_of
from onceward_services.walk.quests import QuestState, visible_quests
from onceward_services.walk.steps.streaks import StreakRules
from onceward_services.walk.tree import Allocation
from onceward_services.walk.walkers import instant

__all__ = ["Snapshot", "read_snapshot"]


class Snapshot(msgspec.Struct, frozen=True):
    """A walker at one instant, and the events after the one that the device has seen."""

    profile: Profile
    allocations: Sequence[Allocation]
    quests: Sequence[QuestState]
    events: Sequence[WalkerEvent]


async def read_snapshot(
    store: Store,
    tenant: str,
    *,
    after: int,
    limit: int,
    catalogue: Catalogue,
    rules: StreakRules,
    now: datetime,
) -> Snapshot:
    """Return the state of a walker and up to ``limit`` events after the event ``after``."""
    rows = await store.read(
        load_queries("onceward_services.walk", "account.sql")["snapshot"],
        {"tenant": tenant, "after": after, "limit": limit},
    )
    profile = Profile()
    allocations: list[Allocation] = []
    progress: dict[str, Row] = {}
    events: list[WalkerEvent] = []
    for row in rows:
        match row["what"]:
            case "walker":
                profile = profile_of(_profile_row(row), rules, now)
            case "allocation":
                allocations.append(_allocation(row))
            case "quest":
                progress[row["id"]] = {
                    "status": row["name"],
                    "steps_done": row["steps"],
                    "unsettled": row["data"],
                }
            case _:
                at = instant(row["at"])
                events.append(WalkerEvent(row["seq"], row["name"], json.loads(row["data"]), at))
    allocations.sort(key=lambda allocation: allocation.seq)
    events.sort(key=lambda event: event.seq)
    nodes = frozenset(allocation.node_id for allocation in allocations)
    return Snapshot(profile, allocations, visible_quests(catalogue, progress, nodes), events)


def _profile_row(row: Row) -> Row:
    """Return the columns that the query ``profile`` has."""
    return {
        "points_banked": row["points"],
        "energy_balance": row["energy"],
        "event_seq": row["seq"],
        "tz": row["id"],
        "total_lifetime_steps": row["steps"],
        "day": row["name"],
        "streak_length": row["length"],
        "streak_tier": row["tier"],
        "energy_held": row["held"],
        "energy_debt": row["debt"],
        "points_provisional": row["unsettled_points"],
        "provisional_energy": row["promised"],
    }


def _allocation(row: Row) -> Allocation:
    return Allocation(
        seq=row["seq"],
        node_id=row["id"],
        kind=row["name"],
        points_cost=row["points"],
        energy_cost=row["energy"],
        provisional=bool(row["steps"]),
        allocated_at=instant(row["at"]),
        refund_due_at=None if row["due_at"] is None else instant(row["due_at"]),
    )
