"""What each person of a siege does, and how a tap is known again wherever it turns up. No I/O."""

import json
import re
from typing import Any, Final

from holdfast.core.outbox_entry import NewEntry
from holdfast_lab.history import Tap
from holdfast_lab.user_actions import (
    LONG_DAY,
    MANY_TRIES,
    WalkAct,
    marks_of,
    visit,
    walk_entry,
    woven,
)

__all__ = ["act_tap", "day_of", "mark_tap", "route_tap", "tap_of", "taps_of"]

_PLACES: Final = tuple(f"place {number}" for number in range(1, 6))
_ROUTES: Final = 4
_START: Final = {"lat": 55.95, "lon": -3.19}
_ADVANCE: Final = re.compile(r"/quest/(?P<quest>[^/]+)/step/(?P<step>\d+)/advance")


def day_of(user: str) -> list[NewEntry]:
    """Return everything a person does: a walk in strict order, visits, and routes to be made."""
    return woven(
        (walk_entry(user, act) for act in LONG_DAY),
        (entry for place in _PLACES for entry in visit(user, place)),
        (_route(user, number) for number in range(_ROUTES)),
    )


def taps_of(user: str, device: str, keys: dict[str, str]) -> list[Tap]:
    """Return a person's day as facts; ``keys`` are of those that the device has acknowledged."""
    facts = []
    for position, entry in enumerate(day_of(user)):
        tap_id = tap_of(user, entry.endpoint, entry.payload)
        facts.append(
            Tap(
                id=tap_id,
                device=device,
                user=user,
                tenant=user,
                key=keys.get(tap_id),
                position=position,
                acknowledged=tap_id in keys,
                in_order=entry.profile == "walk",
                brings_job=entry.profile == "routes",
            )
        )
    return facts


def tap_of(user: str, endpoint: str, payload: Any) -> str:
    """Return the id of the tap that an entry is for."""
    if endpoint == "/api/v1/routes":
        return route_tap(user, payload)
    if endpoint.startswith("/api/"):
        return mark_tap(user, next(iter(marks_of(payload))))
    if (advance := _ADVANCE.fullmatch(endpoint)) is not None:
        return act_tap(user, ("quest.advanced", advance["quest"], int(advance["step"])))
    if endpoint == "/tree/allocate":
        nodes = " ".join(choice["nodeId"] for choice in payload["allocations"])
        return act_tap(user, ("tree.allocated", nodes, 0))
    kind = "quest.started" if endpoint == "/quest/start" else "quest.completed"
    return act_tap(user, (kind, payload["questId"], 0))


def act_tap(user: str, act: WalkAct) -> str:
    """Return the id of the tap that makes an act of walk happen."""
    return f"{user} {act[0]} {act[1]} {act[2]}"


def mark_tap(user: str, mark: str) -> str:
    """Return the id of the tap that leaves a mark in a document."""
    return f"{user} {mark}"


def route_tap(user: str, submission: Any) -> str:
    """Return the id of the tap that asks for a route; the way is told apart by its start."""
    given = json.loads(submission) if isinstance(submission, str) else submission
    return f"{user} route {round((given['start']['lon'] - _START['lon']) * 1e6)}"


def _route(user: str, number: int) -> NewEntry:
    start = _START | {"lon": round(_START["lon"] + number / 1e6, 6)}
    return NewEntry(
        user_id=user,
        operation="create",
        entity_type="route",
        endpoint="/api/v1/routes",
        payload={"start": start, "minutes": 60, "interests": ["history"]},
        profile="routes",
        max_attempts=MANY_TRIES,
    )
