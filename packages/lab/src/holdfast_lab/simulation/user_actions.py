"""What people do in one seed: taps of every kind, planned before anything happens."""

from random import Random
from typing import Any, Final

import msgspec

from holdfast.core.outbox_entry import NewEntry
from holdfast_lab.history import Expect, UserAction

__all__ = ["Leaning", "Planned", "make_key", "plan_taps"]

_SPANS: Final = (20.0, 100.0, 300.0)
_STRATEGIES: Final = ("server_wins", "client_wins", "manual")


class Planned(msgspec.Struct, kw_only=True):
    """A tap, from the plan to what became of it."""

    id: str
    device: str
    user: str
    at: float
    kind: str
    position: int
    key: str | None
    payload: dict[str, Any]
    local_id: str | None = None
    note: str | None = None
    strategy: str | None = None
    expect: Expect = Expect.EFFECT
    acknowledged: bool = False
    # How often somebody has asked for it to be sent again.
    retries: int = 0
    # It was kept at the first try, so its place in the order is certain.
    at_once: bool = False
    # The key may change: somebody edited it, or a conflict was resolved.
    rekeyed: bool = False

    def entry(self) -> NewEntry:
        """Return what is queued for it."""
        shared: dict[str, Any] = {"user_id": self.user, "payload": self.payload, "key": self.key}
        if self.kind == "step":
            return NewEntry(
                operation="create", entity_type="step", endpoint="/steps", profile="walk", **shared
            )
        if self.kind == "change":
            headers = {} if self.strategy is None else {"If-Match": '"7"'}
            return NewEntry(
                operation="patch",
                entity_type="note",
                endpoint=f"/notes/{{local:{self.note}}}",
                headers=headers,
                conflict_resolution=self.strategy,
                profile="field",
                **shared,
            )
        return NewEntry(
            operation="create",
            entity_type="note",
            endpoint="/notes",
            local_id=self.local_id,
            max_attempts=6,
            profile="field",
            **shared,
        )

    def fact(self) -> UserAction:
        """Return it as the checker reads it."""
        return UserAction(
            id=self.id,
            device=self.device,
            user=self.user,
            tenant=self.user,
            key=None if self.rekeyed else self.key,
            position=self.position,
            acknowledged=self.acknowledged,
            expect=self.expect,
            in_order=self.kind == "step" and self.at_once,
            enqueues_job=True,
        )


class Leaning(msgspec.Struct, frozen=True):
    """What there should be more of than usual, so that seldom things are tortured too."""

    refusals: bool = False
    conflicts: bool = False
    by_hand: bool = False
    walks: bool = False


def plan_taps(chance: Random, devices: dict[str, list[str]], leaning: Leaning) -> list[Planned]:
    """Make up a few taps for each user of each device."""
    span = chance.choice(_SPANS)
    planned: list[Planned] = []
    for device, users in devices.items():
        for user in users:
            planned += _taps_of(chance, device, user, span, leaning)
    return planned


def _taps_of(
    chance: Random, device: str, user: str, span: float, leaning: Leaning
) -> list[Planned]:
    taps: list[Planned] = []
    sizes = (3, 4) if leaning.conflicts else (1, 1, 2, 2, 3, 4)
    times = sorted(span * chance.random() for _ in range(chance.choice(sizes)))
    walks = leaning.walks or (chance.random() < 0.6 and not leaning.conflicts)  # noqa: PLR2004
    line = user if chance.random() < 0.6 else None  # noqa: PLR2004
    notes: list[str] = []
    for position, at in enumerate(times):
        kind = "step" if walks and chance.random() < 0.7 else "note"  # noqa: PLR2004
        if notes and chance.random() < (0.9 if leaning.conflicts else 0.5):
            kind = "change"
        tap = Planned(
            id=f"{device}-{user}-{position}",
            device=device,
            user=user,
            at=at,
            kind=kind,
            position=position,
            key=make_key(chance) if chance.random() < 0.7 else None,  # noqa: PLR2004
            payload={"line": line, "what": {"deep": {"n": chance.randint(0, 99)}}},
        )
        tap.payload["tap"] = tap.id
        if chance.random() < 0.08:  # noqa: PLR2004
            tap.payload["poison"] = True
        _vary(chance, tap, notes, leaning)
        taps.append(tap)
    return taps


def _vary(chance: Random, tap: Planned, notes: list[str], leaning: Leaning) -> None:
    if tap.kind == "change":
        tap.note = chance.choice(notes)
        if chance.random() < (0.9 if leaning.conflicts else 0.3):
            tap.strategy = "manual" if leaning.by_hand else chance.choice(_STRATEGIES)
            tap.expect, tap.rekeyed = Expect.EITHER, True
    elif chance.random() < (0.5 if leaning.refusals else 0.12):
        tap.payload["refuse"] = True
        tap.expect = Expect.REFUSAL
    elif tap.kind == "note":
        tap.local_id = make_key(chance)
        notes.append(tap.local_id)


def make_key(chance: Random) -> str:
    """Make a UUID version 4 of the seed's chance."""
    digits = f"{chance.getrandbits(128):032x}"
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
