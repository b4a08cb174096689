"""The verdict of the demo: what was tapped against what has happened, by the database alone."""

from collections import Counter
from typing import Any

import msgspec

from holdfast_lab.demo.device import PLACES, USER
from holdfast_lab.effects import Effects
from holdfast_lab.user_actions import SHORT_DAY, marks_of, visit

__all__ = ["Verdict", "judge"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The counts, and what they come to."""

    taps: int
    requests: int
    answers_lost: int
    kills: int
    replays: int
    effects: int
    duplicates: int
    lost: int
    in_order: bool
    # Entries that the device gave up, in words.
    troubles: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything happened exactly once, and walk in its order."""
        return not (self.duplicates or self.lost or self.troubles) and self.in_order


def judge(effects: Effects, **counts: Any) -> Verdict:
    """Compare what was tapped with what has happened; the other counts are passed on."""
    acts = effects.walk.get(USER, [])
    documents = effects.documents.get(USER, [])
    happened = Counter[object](acts)
    happened.update(mark for document in documents for mark in document.marks)
    # A change that happened twice leaves one mark and one version too many.
    changes = sum(max(0, document.version - len(document.marks)) for document in documents)
    wanted = Counter[object](SHORT_DAY)
    for place in PLACES:
        wanted.update(mark for entry in visit(USER, place) for mark in marks_of(entry.payload))
    return Verdict(
        taps=wanted.total(),
        effects=effects.count,
        duplicates=(happened - wanted).total() + changes,
        lost=(wanted - happened).total(),
        in_order=list(dict.fromkeys(acts)) == [act for act in SHORT_DAY if act in happened],
        **counts,
    )
