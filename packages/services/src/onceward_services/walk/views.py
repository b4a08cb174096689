"""The wire format of nodes, allocations and quests."""

from collections.abc import Sequence
from typing import Any

from onceward_services.walk import model, quests, tree
from onceward_services.walk.catalogue import Catalogue

__all__ = ["allocation_views", "node_views", "quest_fields"]


def node_views(catalogue: Catalogue, *, energy_required: bool) -> list[model.NodeView]:
    """Return the wire format of all nodes of the tree, allocated or not."""
    return [
        model.NodeView(
            node_id=node.id,
            kind=node.kind,
            title=node.title,
            points_cost=node.points,
            energy_cost=node.energy if energy_required else 0,
            prerequisites=list(node.requires),
            reveals_quest=node.reveals is not None,
        )
        for node in catalogue.nodes.values()
    ]


def allocation_views(allocations: Sequence[tree.Allocation]) -> list[model.AllocationView]:
    """Return the wire format of a walker's allocations."""
    return [
        model.AllocationView.model_construct(
            node_id=allocation.node_id,
            kind=allocation.kind,
            provisional=allocation.provisional,
            allocated_at=allocation.allocated_at,
            refund_due_at=allocation.refund_due_at,
        )
        for allocation in allocations
    ]


def quest_fields(state: quests.QuestState) -> dict[str, Any]:
    """Return the fields of ``QuestView``."""
    quest = state.quest
    return {
        "quest_id": quest.id,
        "title": quest.title,
        "steps": quest.steps,
        "current_step": state.current_step,
        "status": state.status,
        "points_awarded": quest.points,
        "provisional": state.is_provisional,
    }
