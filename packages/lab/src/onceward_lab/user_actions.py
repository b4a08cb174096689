"""User actions for the demo and the chaos runs, as outbox entries. No I/O.

Walk actions depend on each other: quests give points, nodes cost points, and a keystone reveals the
last quest, so the server refuses them out of order. A visit (field service) creates an activity, a
contact and two expenses that refer to them by local ids, and then changes the title.

Every field action adds a mark to the document it creates or changes, so the server's database shows
how often each one took effect.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final
from uuid import UUID, uuid5

from onceward_outbox.entry import NewEntry
from onceward_protocol.operation import OperationName

__all__ = [
    "LONG_DAY",
    "MAX_ATTEMPTS",
    "SHORT_DAY",
    "WalkAction",
    "interleave",
    "marks_of",
    "visit",
    "walk_entry",
]

WalkAction = tuple[str, str, int]
"""Event type, quest or node, and step (0 if it has none)."""

_IDS: Final = UUID("6d2f1c1e-93a1-4e0f-8f0c-5d6a1f0b7c11")
MAX_ATTEMPTS: Final = 10_000
"""Enough that no entry fails because of injected faults."""


def _quest(quest: str, steps: int) -> Iterator[WalkAction]:
    yield "quest.started", quest, 0
    for step in range(1, steps + 1):
        yield "quest.advanced", quest, step
    yield "quest.completed", quest, 0


def _nodes(*nodes: str) -> Iterator[WalkAction]:
    for node in nodes:
        yield "tree.allocated", node, 0


SHORT_DAY: Final[tuple[WalkAction, ...]] = (
    *_quest("quest.001", 2),
    *_nodes("node.even-stride"),
    *_quest("quest.002", 3),
    *_nodes("node.light-pack"),
    *_quest("quest.003", 3),
    *_nodes("node.long-breath", "node.sure-foot", "node.trail-reader", "keystone.dowser"),
    *_quest("quest.hidden-spring", 3),
)
LONG_DAY: Final[tuple[WalkAction, ...]] = (
    *SHORT_DAY,
    *_nodes("node.rain-cloak", "node.second-wind"),
    *_quest("quest.004", 7),
    *_nodes("node.night-walker"),
    *_quest("quest.005", 4),
    *_nodes("node.hill-legs", "node.pathfinder"),
    *_quest("quest.006", 5),
    *_nodes("keystone.unbroken-road"),
)


def walk_entry(user: str, action: WalkAction) -> NewEntry:
    """Return the outbox entry for a walk action."""
    kind, target, step = action
    payload: dict[str, Any] = {}
    match kind:
        case "quest.started":
            endpoint, payload = "/quest/start", {"questId": target}
        case "quest.advanced":
            endpoint = f"/quest/{target}/step/{step}/advance"
        case "quest.completed":
            endpoint, payload = "/quest/complete", {"questId": target}
        case _:
            endpoint, payload = "/tree/allocate", {"allocations": [{"nodeId": target}]}
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="walk",
        endpoint=endpoint,
        payload=payload,
        profile="walk",
    )


def visit(user: str, place: str) -> Iterator[NewEntry]:
    """Yield the five entries of a visit."""

    def local(name: str) -> str:
        # Derived from names, so that a restarted device uses the same ids.
        return str(uuid5(_IDS, f"{user}/{place}/{name}"))

    activity, contact = local("activity"), local("contact")

    def entry(
        kind: str, mark: str, operation: OperationName = "create", path: str = "", **fields: Any
    ) -> NewEntry:
        local_id = fields.pop("local_id", None)
        return NewEntry(
            user_id=user,
            operation=operation,
            entity_type=kind,
            endpoint=f"/api/v1/{kind}{path}",
            # An object: a merge patch adds to the existing marks.
            payload=fields | {"marks": {f"{mark} at {place}": True}},
            local_id=local_id,
            max_attempts=MAX_ATTEMPTS,
            profile="field",
        )

    yield entry("activities", "visit", local_id=activity, title=f"Visit to {place}")
    yield entry("contacts", "contact", local_id=contact, name=f"Contact at {place}")
    for name, amount in (("ticket", 12.5), ("lunch", 9.0)):
        yield entry(
            "expenses",
            name,
            local_id=local(name),
            activity_id=activity,
            contact_id=contact,
            amount=amount,
        )
    path = f"/{{local:{activity}}}"
    yield entry("activities", "title", "patch", path, title=f"Long visit to {place}")


def marks_of(payload: Any) -> Iterable[str]:
    """Return the marks in the payload of a field entry or in a field document."""
    marks = payload.get("marks") if isinstance(payload, dict) else None
    return tuple(marks) if isinstance(marks, dict) else ()


def interleave(*sequences: Iterable[NewEntry]) -> list[NewEntry]:
    """Merge the sequences evenly; each keeps its order."""
    lists = [list(sequence) for sequence in sequences]
    placed = [
        ((number + 0.5) / len(entries), index, entry)
        for index, entries in enumerate(lists)
        for number, entry in enumerate(entries)
    ]
    return [entry for _, _, entry in sorted(placed, key=lambda item: item[:2])]
