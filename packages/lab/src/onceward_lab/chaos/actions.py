"""The actions of a user in a chaos run, and the id by which each one is recognised. No I/O."""

import json
import re
from typing import Any, Final

from onceward_lab.history import UserAction
from onceward_lab.user_actions import (
    LONG_DAY,
    MAX_ATTEMPTS,
    WalkAction,
    interleave,
    marks_of,
    visit,
    walk_entry,
)
from onceward_outbox.entry import NewEntry

__all__ = ["action_id", "actions_of", "expected_actions", "mark_id", "route_id", "walk_id"]

_PLACES: Final = tuple(f"place {number}" for number in range(1, 6))
_ROUTES: Final = 4
_START: Final = {"lat": 55.95, "lon": -3.19}
_ADVANCE: Final = re.compile(r"/quest/(?P<quest>[^/]+)/step/(?P<step>\d+)/advance")


def actions_of(user: str) -> list[NewEntry]:
    """Return the entries of a user: a walk in strict order, visits, and route requests."""
    return interleave(
        (walk_entry(user, action) for action in LONG_DAY),
        (entry for place in _PLACES for entry in visit(user, place)),
        (_route(user, number) for number in range(_ROUTES)),
    )


def expected_actions(user: str, device: str, keys: dict[str, str]) -> list[UserAction]:
    """Return a user's actions for the checker; ``keys`` has the acknowledged ones."""
    found = []
    for position, entry in enumerate(actions_of(user)):
        id_ = action_id(user, entry.endpoint, entry.payload)
        found.append(
            UserAction(
                id=id_,
                device=device,
                user=user,
                tenant=user,
                key=keys.get(id_),
                position=position,
                acknowledged=id_ in keys,
                in_order=entry.profile == "walk",
                enqueues_job=entry.profile == "routes",
            )
        )
    return found


def action_id(user: str, endpoint: str, payload: Any) -> str:
    """Return the id of the action that an entry belongs to."""
    if endpoint == "/api/v1/routes":
        return route_id(user, payload)
    if endpoint.startswith("/api/"):
        return mark_id(user, next(iter(marks_of(payload))))
    if (advance := _ADVANCE.fullmatch(endpoint)) is not None:
        return walk_id(user, ("quest.advanced", advance["quest"], int(advance["step"])))
    if endpoint == "/tree/allocate":
        nodes = " ".join(choice["nodeId"] for choice in payload["allocations"])
        return walk_id(user, ("tree.allocated", nodes, 0))
    kind = "quest.started" if endpoint == "/quest/start" else "quest.completed"
    return walk_id(user, (kind, payload["questId"], 0))


def walk_id(user: str, action: WalkAction) -> str:
    """Return the id of a walk action."""
    kind, target, step = action
    return f"{user} {kind} {target} {step}"


def mark_id(user: str, mark: str) -> str:
    """Return the id of the field action that adds this mark to a document."""
    return f"{user} {mark}"


def route_id(user: str, submission: Any) -> str:
    """Return the id of a route request; each one has another start."""
    request = json.loads(submission) if isinstance(submission, str) else submission
    return f"{user} route {round((request['start']['lon'] - _START['lon']) * 1e6)}"


def _route(user: str, number: int) -> NewEntry:
    start = _START | {"lon": round(_START["lon"] + number / 1e6, 6)}
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="route",
        endpoint="/api/v1/routes",
        payload={"start": start, "minutes": 60, "interests": ["history"]},
        profile="routes",
        max_attempts=MAX_ATTEMPTS,
    )
