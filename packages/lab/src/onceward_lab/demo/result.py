"""The result of the demo: the user actions compared with the effects in the database."""

from collections import Counter
from typing import Any

import msgspec

from onceward_lab.demo.device import PLACES, USER
from onceward_lab.effects import Effects
from onceward_lab.user_actions import SHORT_DAY, marks_of, visit

__all__ = ["DemoResult", "compare"]


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of a run."""

    actions: int
    requests: int
    responses_lost: int
    kills: int
    replays: int
    effects: int
    doubled: int
    lost: int
    in_order: bool
    # Entries that failed on the device.
    errors: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every action took effect exactly once, and walk actions in order."""
        return not (self.doubled or self.lost or self.errors) and self.in_order


def compare(effects: Effects, **counts: Any) -> DemoResult:
    """Compare the user actions with the effects; ``counts`` are the other fields of the result."""
    walk = effects.walk.get(USER, [])
    documents = effects.documents.get(USER, [])
    happened = Counter[object](walk)
    happened.update(mark for document in documents for mark in document.marks)
    # A change that was made twice leaves one mark and two versions.
    extra = sum(max(0, document.version - len(document.marks)) for document in documents)
    expected = Counter[object](SHORT_DAY)
    for place in PLACES:
        expected.update(mark for entry in visit(USER, place) for mark in marks_of(entry.payload))
    return DemoResult(
        actions=expected.total(),
        effects=effects.count,
        doubled=(happened - expected).total() + extra,
        lost=(expected - happened).total(),
        in_order=list(dict.fromkeys(walk))
        == [action for action in SHORT_DAY if action in happened],
        **counts,
    )
