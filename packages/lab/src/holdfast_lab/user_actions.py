"""What people do on their devices, as entries of an outbox, and what should come of it. No I/O.

Walk acts rest on one another: points come from quests, nodes cost points, and a keystone reveals
the last quest; out of order they would be refused. A visit of field is somebody met, expenses that
name the visit and the person by ids the server has not given yet, and a better title afterwards.

Every tap of field leaves a mark in the document it makes or changes, so that the server's database
alone says how often it happened.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final
from uuid import UUID, uuid5

from holdfast.core.outbox_entry import NewEntry

__all__ = [
    "LONG_DAY",
    "MANY_TRIES",
    "SHORT_DAY",
    "WalkAct",
    "marks_of",
    "visit",
    "walk_entry",
    "woven",
]

WalkAct = tuple[str, str, int]
"""What the server tells a walker's devices: type, quest or node, and the step (or 0)."""

_IDS: Final = UUID("6d2f1c1e-93a1-4e0f-8f0c-5d6a1f0b7c11")
MANY_TRIES: Final = 10_000
"""The faults of a proof are no reason to trouble a person."""


def _quest(quest: str, steps: int) -> Iterator[WalkAct]:
    yield "quest.started", quest, 0
    for step in range(1, steps + 1):
        yield "quest.advanced", quest, step
    yield "quest.completed", quest, 0


def _nodes(*nodes: str) -> Iterator[WalkAct]:
    for node in nodes:
        yield "tree.allocated", node, 0


SHORT_DAY: Final[tuple[WalkAct, ...]] = (
    *_quest("quest.001", 2),
    *_nodes("node.even-stride"),
    *_quest("quest.002", 3),
    *_nodes("node.light-pack"),
    *_quest("quest.003", 3),
    *_nodes("node.long-breath", "node.sure-foot", "node.trail-reader", "keystone.dowser"),
    *_quest("quest.hidden-spring", 3),
)
LONG_DAY: Final[tuple[WalkAct, ...]] = (
    *SHORT_DAY,
    *_nodes("node.rain-cloak", "node.second-wind"),
    *_quest("quest.004", 7),
    *_nodes("node.night-walker"),
    *_quest("quest.005", 4),
    *_nodes("node.hill-legs", "node.pathfinder"),
    *_quest("quest.006", 5),
    *_nodes("keystone.unbroken-road"),
)


def walk_entry(user: str, act: WalkAct) -> NewEntry:
    """Return the entry that makes this act happen."""
    kind, what, step = act
    payload: dict[str, Any] = {}
    match kind:
        case "quest.started":
            endpoint, payload = "/quest/start", {"questId": what}
        case "quest.advanced":
            endpoint = f"/quest/{what}/step/{step}/advance"
        case "quest.completed":
            endpoint, payload = "/quest/complete", {"questId": what}
        case _:
            endpoint, payload = "/tree/allocate", {"allocations": [{"nodeId": what}]}
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="walk",
        endpoint=endpoint,
        payload=payload,
        profile="walk",
    )


def visit(user: str, place: str) -> Iterator[NewEntry]:
    """Give the five taps of a visit."""

    def local(what: str) -> str:
        # From names, so that a device that died over it goes on with the same ids.
        return str(uuid5(_IDS, f"{user}/{place}/{what}"))

    activity, contact = local("activity"), local("contact")

    def tap(
        kind: str, mark: str, operation: str = "create", path: str = "", **fields: Any
    ) -> NewEntry:
        local_id = fields.pop("local_id", None)
        return NewEntry(
            user_id=user,
            operation=operation,
            entity_type=kind,
            endpoint=f"/api/v1/{kind}{path}",
            # An object: a change adds its mark to those that are there.
            payload=fields | {"marks": {f"{mark} at {place}": True}},
            local_id=local_id,
            max_attempts=MANY_TRIES,
            profile="field",
        )

    yield tap("activities", "visit", local_id=activity, title=f"Visit to {place}")
    yield tap("contacts", "somebody", local_id=contact, name=f"Keeper of {place}")
    for what, amount in (("ticket", 12.5), ("lunch", 9.0)):
        yield tap(
            "expenses",
            what,
            local_id=local(what),
            activity_id=activity,
            contact_id=contact,
            amount=amount,
        )
    path = f"/{{local:{activity}}}"
    yield tap("activities", "title", "patch", path, title=f"Long visit to {place}")


def marks_of(entry_payload: Any) -> Iterable[str]:
    """Return the marks that a field entry leaves, or that a field document carries."""
    marks = entry_payload.get("marks") if isinstance(entry_payload, dict) else None
    return tuple(marks) if isinstance(marks, dict) else ()


def woven(*strands: Iterable[NewEntry]) -> list[NewEntry]:
    """Mix strands evenly, each in its own order: a person does one thing and then another."""
    lists = [list(strand) for strand in strands]
    placed = [
        ((number + 0.5) / len(strand), which, entry)
        for which, strand in enumerate(lists)
        for number, entry in enumerate(strand)
    ]
    return [entry for _, _, entry in sorted(placed, key=lambda one: one[:2])]
