"""The tree: a walker's allocations, their confirmation and their refunds.

Except for ``allocate``, callers of functions with a transaction have locked the walker.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Final

import msgspec

from onceward import Transaction
from onceward.ports import Row, Store
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.catalogue import Catalogue, Node
from onceward_services.walk.errors import walk_error
from onceward_services.walk.events import WalkerEvent, add_event, insert_event
from onceward_services.walk.ledger import credit, release_hold, spend, spendable_energy
from onceward_services.walk.steps.open_days import OpenDays, read_open_days
from onceward_services.walk.suspension import lock_active_walker
from onceward_services.walk.walkers import Walker, instant, update_walker

__all__ = [
    "Allocation",
    "Tree",
    "allocate",
    "cancel_refunds",
    "confirm_allocations",
    "provisional_allocations",
    "read_tree",
    "refund_due_allocations",
    "refund_for_points",
    "schedule_refund",
]

# The reason of the ledger entries of allocations; the reference is the allocation's number.
ALLOCATION: Final = "allocation"
REJECTED: Final = "steps_rejected"


class Allocation(msgspec.Struct, frozen=True):
    """A node that a walker has, and what it cost."""

    seq: int
    node_id: str
    kind: str
    points_cost: int
    energy_cost: int
    provisional: bool
    allocated_at: datetime
    # Set once the steps it depends on were rejected: it is refunded then, unless confirmed before.
    refund_due_at: datetime | None = None
    # When the walker acted, by the device's clock.
    generated_at: datetime | None = None
    # Why it will be refunded, and the rejected day that caused it.
    refund_reason: str | None = None
    rejected_day: date | None = None

    @property
    def acted_at(self) -> datetime:
        """When the walker acted; allocations of older versions have only the time of arrival."""
        return self.generated_at or self.allocated_at


class Tree(msgspec.Struct, frozen=True):
    """A consistent snapshot of a walker's points, energy and allocations."""

    points_banked: int
    energy_balance: int
    allocations: Sequence[Allocation]
    spendable_energy: int = 0
    # For when the caller enqueues the job that settles what is provisional; None if it is enqueued.
    settle_at: datetime | None = None


# -- allocating -----------------------------------------------------------------------------------


async def allocate(
    tx: Transaction,
    tenant: str,
    node_ids: Sequence[str],
    *,
    now: datetime,
    catalogue: Catalogue,
    energy_required: bool,
    empty_after: timedelta,
    acted_at: datetime | None = None,
) -> Tree:
    """Allocate these nodes in this order, all or none. Locks the walker.

    ``acted_at`` is when the walker acted. An allocation is provisional while a day up to then is
    not settled, and while it depends on nodes, points or energy that are provisional.
    """
    acted_at = min(acted_at or now, now)
    walker = await lock_active_walker(tx, tenant, now, acted_at)
    held = {a.node_id: a for a in await _list_allocations(tx, tenant)}
    nodes = _check_nodes(node_ids, catalogue, held)
    days = await read_open_days(
        tx, tenant, walker.first_action_at, empty_after=empty_after, now=now
    )
    _check_costs(nodes, walker, days, energy_required=energy_required)
    revealed = _revealed(nodes, catalogue, held)
    is_provisional = days.is_open_up_to(acted_at)
    points_left = walker.points_banked
    moved = await update_walker(
        tx,
        tenant,
        now,
        points=-sum(node.points for node in nodes),
        allocations=len(nodes),
        events=1 + len(revealed),
    )
    taken: list[Allocation] = []
    energy = moved.energy_balance
    for seq, node in enumerate(nodes, walker.allocation_seq + 1):
        below = [held[id_] for id_ in node.requires]
        cost = node.energy if energy_required else 0
        is_held = False
        if cost:
            spent = await spend(tx, tenant, cost, reason=ALLOCATION, reference=str(seq), now=now)
            energy, is_held = spent.balance, spent.is_held
        points_left -= node.points
        # The first of them to be refunded takes this node with it.
        doomed = min(
            (a for a in below if a.refund_due_at is not None),
            key=lambda a: a.refund_due_at or now,
            default=None,
        )
        allocation = Allocation(
            seq=seq,
            node_id=node.id,
            kind=node.kind,
            points_cost=node.points,
            energy_cost=cost,
            # A node is refunded together with its prerequisites, and with the points it cost.
            provisional=(
                is_provisional
                or is_held
                or any(a.provisional for a in below)
                or not covers_points(points_left, held.values(), walker.points_provisional)
            ),
            allocated_at=now,
            generated_at=acted_at,
            refund_due_at=None if doomed is None else doomed.refund_due_at,
            refund_reason=None if doomed is None else doomed.refund_reason,
            rejected_day=None if doomed is None else doomed.rejected_day,
        )
        held[node.id] = allocation
        taken.append(allocation)
        await _add(tx, tenant, allocation)
    events: list[tuple[str, Mapping[str, Any]]] = [
        (
            "tree.allocated",
            {
                "nodeIds": [a.node_id for a in taken],
                "provisional": any(a.provisional for a in taken),
                "pointsBanked": moved.points_banked,
            },
        ),
        *(("quest.revealed", {"questId": quest_id}) for quest_id in revealed),
    ]
    for event_seq, (type_, data) in enumerate(events, walker.event_seq + 1):
        await insert_event(tx, tenant, WalkerEvent(event_seq, type_, data, now))
    settle_at = days.settles_at(acted_at)
    cost = sum(a.energy_cost for a in taken)
    return Tree(
        moved.points_banked,
        energy,
        list(held.values()),
        spendable_energy=_spendable(walker, days) - cost,
        settle_at=None if settle_at == walker.settle_due_at else settle_at,
    )


def covers_points(banked: int, allocations: Iterable[Allocation], provisional_points: int) -> bool:
    """Return whether provisional points could be taken back without final allocations."""
    return provisional_points <= banked + sum(a.points_cost for a in allocations if a.provisional)


def _check_nodes(
    node_ids: Sequence[str], catalogue: Catalogue, held: Mapping[str, Allocation]
) -> list[Node]:
    """Return the nodes; raises if one is unknown, allocated already or lacks a prerequisite."""
    unknown = [id_ for id_ in node_ids if id_ not in catalogue.nodes]
    if unknown:
        raise walk_error("UNKNOWN_NODE", f"there is no node {unknown[0]!r}", nodeIds=unknown)
    duplicates = [id_ for id_ in node_ids if id_ in held]
    if duplicates:
        raise walk_error(
            "ALREADY_ALLOCATED", f"{duplicates[0]!r} is allocated already", nodeIds=duplicates
        )
    nodes = [catalogue.nodes[id_] for id_ in node_ids]
    available = set(held)
    for node in nodes:
        missing = [id_ for id_ in node.requires if id_ not in available]
        if missing:
            raise walk_error(
                "PREREQUISITES_NOT_MET",
                f"{node.id!r} requires {missing[0]!r}",
                nodeId=node.id,
                missing=missing,
            )
        available.add(node.id)
    return nodes


def _check_costs(
    nodes: Sequence[Node], walker: Walker, days: OpenDays, *, energy_required: bool
) -> None:
    points = sum(node.points for node in nodes)
    if points > walker.points_banked:
        raise walk_error(
            "INSUFFICIENT_POINTS",
            f"this costs {points} points, and the balance is {walker.points_banked}",
            pointsRequired=points,
            pointsBanked=walker.points_banked,
        )
    energy = sum(node.energy for node in nodes)
    spendable = _spendable(walker, days)
    if energy_required and energy > spendable:
        raise walk_error(
            "INSUFFICIENT_ENERGY",
            f"this costs {energy} energy, and there is {spendable} to spend",
            energyRequired=energy,
            energyBalance=walker.energy_balance,
            energySpendable=spendable,
        )


def _spendable(walker: Walker, days: OpenDays) -> int:
    return spendable_energy(
        walker.energy_balance,
        days.provisional_energy,
        held=walker.energy_held,
        debt=walker.energy_debt,
    )


def _revealed(
    nodes: Iterable[Node], catalogue: Catalogue, held: Mapping[str, Allocation]
) -> list[str]:
    """Return the quests that these nodes reveal."""
    found = dict.fromkeys(node.reveals for node in nodes if node.reveals is not None)
    return [id_ for id_ in found if held.keys().isdisjoint(catalogue.revealed_by(id_))]


# -- confirmation and refunds ---------------------------------------------------------------------


async def provisional_allocations(tx: Transaction, tenant: str) -> list[Allocation]:
    """Return the allocations that depend on steps not reconciled yet, oldest first."""
    return [a for a in await _list_allocations(tx, tenant) if a.provisional]


async def confirm_allocations(
    tx: Transaction, tenant: str, node_ids: Iterable[str], now: datetime
) -> list[str]:
    """Make provisional allocations final, even with a scheduled refund; returns which."""
    confirmed = []
    for node_id in node_ids:
        params = {"tenant": tenant, "node_id": node_id}
        if await tx.execute(_sql("confirm_allocation"), params):
            confirmed.append(node_id)
    if confirmed:
        await add_event(tx, tenant, "allocation.confirmed", {"nodeIds": confirmed}, now)
    return confirmed


async def schedule_refund(
    tx: Transaction,
    tenant: str,
    node_ids: Iterable[str],
    due_at: datetime,
    *,
    catalogue: Catalogue,
    now: datetime,
    reason: str = REJECTED,
    rejected_day: date | None = None,
) -> list[str]:
    """Schedule the refund of these nodes and of those that require them; returns which.

    An earlier due time stays: a second rejection does not prolong the grace of the first.
    """
    held = await _list_allocations(tx, tenant)
    affected = catalogue.with_dependents(node_ids, [a.node_id for a in held])
    scheduled = []
    for allocation in held:
        due = allocation.refund_due_at
        if allocation.node_id in affected and (due is None or due_at < due):
            await tx.execute(
                _sql("schedule_refund"),
                {
                    "tenant": tenant,
                    "node_id": allocation.node_id,
                    "due_at": due_at,
                    "reason": reason,
                    "rejected_day": None if rejected_day is None else rejected_day.isoformat(),
                },
            )
            scheduled.append(allocation.node_id)
    if scheduled:
        data = {"nodeIds": scheduled, "refundDueAt": due_at.isoformat()}
        await add_event(tx, tenant, "allocation.refund_scheduled", data, now)
    return scheduled


async def cancel_refunds(tx: Transaction, tenant: str, node_ids: Iterable[str]) -> None:
    """Cancel scheduled refunds; the allocations stay provisional."""
    for node_id in node_ids:
        await tx.execute(_sql("cancel_refund"), {"tenant": tenant, "node_id": node_id})


async def refund_due_allocations(
    tx: Transaction, tenant: str, now: datetime, catalogue: Catalogue
) -> list[str]:
    """Refund the allocations that are due and those that require them; returns which.

    Each refund returns points and energy and adds an event. A hidden quest that no keystone reveals
    any more is hidden again; its progress and the points it awarded are kept.
    """
    held = await _list_allocations(tx, tenant)
    due = [a.node_id for a in held if a.refund_due_at is not None and a.refund_due_at <= now]
    return await _refund_all(
        tx, tenant, held, due, default_reason=REJECTED, now=now, catalogue=catalogue
    )


async def refund_for_points(
    tx: Transaction, tenant: str, points: int, now: datetime, catalogue: Catalogue
) -> list[str]:
    """Refund the newest provisional allocations until they return ``points``; returns which."""
    refunded: list[str] = []
    while points > 0:
        held = await _list_allocations(tx, tenant)
        costs = {a.node_id: a.points_cost for a in held}
        # With the final ones last: provisional points never bought one of those alone.
        newest = max(held, key=lambda a: (a.provisional, a.seq), default=None)
        if newest is None:
            break
        gone = await _refund_all(
            tx,
            tenant,
            held,
            [newest.node_id],
            default_reason="points_reverted",
            now=now,
            catalogue=catalogue,
        )
        points -= sum(costs[node_id] for node_id in gone)
        refunded += gone
    return refunded


async def _refund_all(
    tx: Transaction,
    tenant: str,
    held: Sequence[Allocation],
    due: Sequence[str],
    *,
    default_reason: str,
    now: datetime,
    catalogue: Catalogue,
) -> list[str]:
    if not due:
        return []
    affected = catalogue.with_dependents(due, [a.node_id for a in held])
    # Newest first, so that no allocation is ever without its prerequisites.
    refunded = [a for a in reversed(held) if a.node_id in affected]
    for allocation in refunded:
        reason = "prerequisite_reverted"
        if allocation.node_id in due:
            reason = allocation.refund_reason or default_reason
        await _refund(tx, tenant, allocation, reason, now)
    remaining = {a.node_id for a in held} - affected
    for quest_id in _hidden_again(catalogue, affected, remaining):
        await add_event(tx, tenant, "quest.hidden", {"questId": quest_id}, now)
    return [allocation.node_id for allocation in refunded]


async def _refund(
    tx: Transaction, tenant: str, allocation: Allocation, reason: str, now: datetime
) -> None:
    taken = {
        "tenant": tenant,
        "seq": allocation.seq,
        "node_id": allocation.node_id,
        "points_cost": allocation.points_cost,
        "energy_cost": allocation.energy_cost,
        "allocated_at": allocation.allocated_at,
    }
    await tx.execute(_sql("remove_allocation"), taken)
    await tx.execute(_sql("add_refund"), taken | {"reason": reason, "now": now})
    moved = await update_walker(tx, tenant, now, points=allocation.points_cost, events=1)
    # Energy that was only held was never taken from the balance.
    is_held = await release_hold(tx, tenant, ALLOCATION, str(allocation.seq), now)
    if allocation.energy_cost and not is_held:
        await credit(
            tx,
            tenant,
            allocation.energy_cost,
            reason="refund",
            reference=str(allocation.seq),
            now=now,
        )
    reverted = {
        "nodeId": allocation.node_id,
        "kind": allocation.kind,
        "reason": reason,
        "pointsReturned": allocation.points_cost,
        "energyReturned": allocation.energy_cost,
        "pointsBanked": moved.points_banked,
    }
    await insert_event(
        tx, tenant, WalkerEvent(moved.event_seq, "allocation.reverted", reverted, now)
    )


def _hidden_again(catalogue: Catalogue, gone: Iterable[str], left: set[str]) -> list[str]:
    found = {catalogue.nodes[id_].reveals for id_ in gone if id_ in catalogue.nodes}
    return sorted(
        id_ for id_ in found if id_ is not None and left.isdisjoint(catalogue.revealed_by(id_))
    )


# -- reading --------------------------------------------------------------------------------------


async def read_tree(store: Store, tenant: str) -> Tree:
    """Return a walker's tree, read outside any transaction."""
    rows = await store.read(_sql("tree_state"), {"tenant": tenant})
    if not rows:
        return Tree(0, 0, [])
    walker = rows[0]
    spendable = spendable_energy(
        walker["energy_balance"],
        walker["promised_energy"],
        held=walker["energy_held"],
        debt=walker["energy_debt"],
    )
    allocations = [_allocation(row) for row in rows if row["seq"] is not None]
    return Tree(walker["points_banked"], walker["energy_balance"], allocations, spendable)


async def _list_allocations(tx: Transaction, tenant: str) -> list[Allocation]:
    rows = await tx.fetch_all(_sql("allocations"), {"tenant": tenant})
    return [_allocation(row) for row in rows]


async def _add(tx: Transaction, tenant: str, allocation: Allocation) -> None:
    await tx.execute(
        _sql("add_allocation"),
        {
            "tenant": tenant,
            "seq": allocation.seq,
            "node_id": allocation.node_id,
            "kind": allocation.kind,
            "points_cost": allocation.points_cost,
            "energy_cost": allocation.energy_cost,
            "provisional": allocation.provisional,
            "allocated_at": allocation.allocated_at,
            "refund_due_at": allocation.refund_due_at,
            "generated_at": allocation.generated_at,
            "refund_reason": allocation.refund_reason,
            "rejected_day": (
                None if allocation.rejected_day is None else allocation.rejected_day.isoformat()
            ),
        },
    )


def _allocation(row: Row) -> Allocation:
    due_at = row["refund_due_at"]
    return Allocation(
        seq=row["seq"],
        node_id=row["node_id"],
        kind=row["kind"],
        points_cost=row["points_cost"],
        energy_cost=row["energy_cost"],
        provisional=bool(row["provisional"]),
        allocated_at=instant(row["allocated_at"]),
        refund_due_at=None if due_at is None else instant(due_at),
        generated_at=None if row["generated_at"] is None else instant(row["generated_at"]),
        refund_reason=row["refund_reason"],
        rejected_day=(
            None if row["rejected_day"] is None else date.fromisoformat(row["rejected_day"])
        ),
    )


def _sql(name: str) -> str:
    return load_queries("onceward_services.walk")[name]
