"""The tree: a walker's allocations, their confirmation and their refunds.

Except for ``allocate``, callers of functions with a transaction have locked the walker.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from holdfast import Transaction
from holdfast.ports import Row, Store
from holdfast.stores.sql_loader import load_queries
from holdfast_services.walk.catalogue import Catalogue, Node
from holdfast_services.walk.errors import walk_error
from holdfast_services.walk.events import WalkerEvent, add_event, insert_event
from holdfast_services.walk.ledger import credit, debit
from holdfast_services.walk.steps.repository import has_pending_steps
from holdfast_services.walk.suspension import lock_active_walker
from holdfast_services.walk.walkers import Walker, instant, update_walker

__all__ = [
    "Allocation",
    "Tree",
    "allocate",
    "confirm_allocations",
    "provisional_allocations",
    "read_tree",
    "refund_due_allocations",
    "schedule_refund",
]


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


class Tree(msgspec.Struct, frozen=True):
    """A consistent snapshot of a walker's points, energy and allocations."""

    points_banked: int
    energy_balance: int
    allocations: Sequence[Allocation]


# -- allocating -----------------------------------------------------------------------------------


async def allocate(
    tx: Transaction,
    tenant: str,
    node_ids: Sequence[str],
    *,
    now: datetime,
    catalogue: Catalogue,
    energy_required: bool,
) -> Tree:
    """Allocate these nodes in this order, all or none. Locks the walker."""
    walker = await lock_active_walker(tx, tenant, now)
    held = {a.node_id: a for a in await _list_allocations(tx, tenant)}
    nodes = _check_nodes(node_ids, catalogue, held)
    _check_costs(nodes, walker, energy_required=energy_required)
    revealed = _revealed(nodes, catalogue, held)
    is_provisional = await has_pending_steps(tx, tenant)
    moved = await update_walker(
        tx,
        tenant,
        now,
        points=-sum(node.points for node in nodes),
        allocations=len(nodes),
        events=1 + len(revealed),
    )
    taken: list[Allocation] = []
    for seq, node in enumerate(nodes, walker.allocation_seq + 1):
        below = [held[id_] for id_ in node.requires]
        allocation = Allocation(
            seq=seq,
            node_id=node.id,
            kind=node.kind,
            points_cost=node.points,
            energy_cost=node.energy if energy_required else 0,
            # A node is refunded together with its prerequisites.
            provisional=is_provisional or any(a.provisional for a in below),
            allocated_at=now,
            refund_due_at=min((a.refund_due_at for a in below if a.refund_due_at), default=None),
        )
        held[node.id] = allocation
        taken.append(allocation)
        await _add(tx, tenant, allocation)
    energy = moved.energy_balance
    for allocation in taken:
        if allocation.energy_cost:
            energy = await debit(
                tx,
                tenant,
                allocation.energy_cost,
                reason="allocation",
                reference=str(allocation.seq),
                now=now,
            )
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
    return Tree(moved.points_banked, energy, list(held.values()))


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


def _check_costs(nodes: Sequence[Node], walker: Walker, *, energy_required: bool) -> None:
    points = sum(node.points for node in nodes)
    if points > walker.points_banked:
        raise walk_error(
            "INSUFFICIENT_POINTS",
            f"this costs {points} points, and the balance is {walker.points_banked}",
            pointsRequired=points,
            pointsBanked=walker.points_banked,
        )
    energy = sum(node.energy for node in nodes)
    if energy_required and energy > walker.energy_balance:
        raise walk_error(
            "INSUFFICIENT_ENERGY",
            f"this costs {energy} energy, and the balance is {walker.energy_balance}",
            energyRequired=energy,
            energyBalance=walker.energy_balance,
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
                {"tenant": tenant, "node_id": allocation.node_id, "due_at": due_at},
            )
            scheduled.append(allocation.node_id)
    if scheduled:
        data = {"nodeIds": scheduled, "refundDueAt": due_at.isoformat()}
        await add_event(tx, tenant, "allocation.refund_scheduled", data, now)
    return scheduled


async def refund_due_allocations(
    tx: Transaction, tenant: str, now: datetime, catalogue: Catalogue
) -> list[str]:
    """Refund the allocations that are due and those that require them; returns which.

    Each refund returns points and energy and adds an event. A hidden quest that no keystone reveals
    any more is hidden again; its progress and the points it awarded are kept.
    """
    held = await _list_allocations(tx, tenant)
    due = [a.node_id for a in held if a.refund_due_at is not None and a.refund_due_at <= now]
    if not due:
        return []
    affected = catalogue.with_dependents(due, [a.node_id for a in held])
    # Newest first, so that no allocation is ever without its prerequisites.
    refunded = [a for a in reversed(held) if a.node_id in affected]
    for allocation in refunded:
        reason = "steps_rejected" if allocation.node_id in due else "prerequisite_reverted"
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
    if allocation.energy_cost:
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
    allocations = [_allocation(row) for row in rows if row["seq"] is not None]
    return Tree(rows[0]["points_banked"], rows[0]["energy_balance"], allocations)


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
    )


def _sql(name: str) -> str:
    return load_queries("holdfast_services.walk")[name]
