"""The user actions of one seed, planned before the simulation starts."""

from random import Random
from typing import Any, Final

import msgspec

from onceward_lab.history import Expect, UserAction
from onceward_outbox.entry import ConflictResolutionName, NewEntry

__all__ = ["Bias", "PlannedAction", "make_uuid", "plan_actions"]

_PROFILES: Final = ("field", "field", "field", "field-read", "field-ask")
_SPANS: Final = (20.0, 100.0, 300.0)
_STRATEGIES: Final[tuple[ConflictResolutionName, ...]] = (
    "server_wins",
    "client_wins",
    "manual",
    "merge",
    "merge",
)
_STALE_VERSION: Final = '"999"'
"""A version that no note has."""


class PlannedAction(msgspec.Struct, kw_only=True):
    """A user action, with its progress."""

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
    strategy: ConflictResolutionName | None = None
    profile: str = "field"
    # The change names a base that the server does not have.
    is_stale: bool = False
    # A lane of its own: the change may be sent at the same time as others of the note.
    lane: str | None = None
    expect: Expect = Expect.EFFECT
    acknowledged: bool = False
    # How often the user has retried it.
    retries: int = 0
    # The first try was acknowledged, so its position in the order is certain.
    first_try: bool = False
    # The key may change, because of an edit, a resolved conflict or a retry of what was refused.
    rekeyed: bool = False
    # The database has lost its effect, or what it needs.
    lost: bool = False
    enqueued_at: float = 0.0
    first_sent_at: float = float("inf")
    # Changes of its note may be sent at the same time.
    is_parallel: bool = False
    # Later changes of its note were sent while it had failed.
    is_overtaken: bool = False
    # When the user has retried it.
    returned_at: float = float("inf")
    # Of notes and their changes.
    max_attempts: int = 6
    # Sent without an outbox, by a client of batches.
    is_direct: bool = False
    # Its lane in a batch.
    batch_lane: str | None = None

    @property
    def endpoint(self) -> str:
        """The path, with ``*`` for ids."""
        paths = {"step": "/steps", "change": "/notes/*", "move": "/moves"}
        return paths.get(self.kind, "/notes")

    def new_entry(self) -> NewEntry:
        """Return the entry to enqueue."""
        shared: dict[str, Any] = {"user_id": self.user, "payload": self.payload, "key": self.key}
        if self.kind == "step":
            return NewEntry(
                operation="create",
                entity_type="step",
                endpoint="/steps",
                profile=self.profile,
                once=self.id,
                **shared,
            )
        if self.kind == "move":
            return NewEntry(
                operation="create",
                entity_type="move",
                endpoint="/moves",
                # Some devices learn from the server that numbers are needed.
                profile="field-on-demand" if sum(self.id.encode()) % 2 else "field-strict",
                max_attempts=self.max_attempts,
                **shared,
            )
        if self.kind == "change":
            return NewEntry(
                operation="patch",
                entity_type="note",
                endpoint=f"/notes/{{local:{self.note}}}",
                headers={"If-Match": _STALE_VERSION} if self.is_stale else {},
                conflict_resolution=self.strategy,
                profile=self.profile,
                lane=self.lane,
                max_attempts=2 * self.max_attempts,
                **shared,
            )
        return NewEntry(
            operation="create",
            entity_type="note",
            endpoint="/notes",
            local_id=self.local_id,
            max_attempts=self.max_attempts,
            profile="field",
            **shared,
        )

    def _is_in_order(self) -> bool:
        is_ordered = self.kind in {"step", "move"}
        has_order = self.batch_lane is not None if self.is_direct else is_ordered
        return has_order and self.first_try and not self.lost

    def to_history(self) -> UserAction:
        """Return the record for the checker."""
        return UserAction(
            id=self.id,
            device=self.device,
            user=self.user,
            tenant=self.user,
            key=None if self.rekeyed else self.key,
            position=self.position,
            acknowledged=self.acknowledged,
            expect=self.expect,
            in_order=self._is_in_order(),
            lane=self.batch_lane,
            has_entry=not self.is_direct,
            enqueues_job=True,
            lost=self.lost,
            enqueued_at=self.enqueued_at,
            first_sent_at=self.first_sent_at,
            may_force=self.profile == "field",
            is_stale=self.is_stale,
            is_parallel=self.is_parallel,
            is_overtaken=self.is_overtaken,
            returned_at=self.returned_at,
            retries=self.retries,
        )


class Bias(msgspec.Struct, frozen=True):
    """Operations that a seed has more of than usual, so that rare ones are reached."""

    refusals: bool = False
    conflicts: bool = False
    manual_conflicts: bool = False
    walks: bool = False
    # Other clients change the notes.
    is_contested: bool = False
    reads: bool = False
    lanes: bool = False
    # Actions of strict sequences.
    moves: bool = False
    # Several actions in a short time.
    is_busy: bool = False
    # The server responds to nothing for a long time.
    is_silent: bool = False
    # A user sets one of several edits of a note aside, and comes back to it after the others.
    returns: bool = False

    @property
    def has_changes(self) -> bool:
        """Whether most actions change notes."""
        return self.conflicts or self.is_contested or self.reads or self.lanes or self.returns


def plan_actions(rng: Random, devices: dict[str, list[str]], bias: Bias) -> list[PlannedAction]:
    """Return a few random actions for each user of each device."""
    span = rng.choice(_SPANS[:2] if bias.is_busy else _SPANS)
    planned: list[PlannedAction] = []
    for device, users in devices.items():
        for user in users:
            planned += _actions_of(rng, device, user, span, bias)
    return planned


def _actions_of(
    rng: Random, device: str, user: str, span: float, bias: Bias
) -> list[PlannedAction]:
    actions: list[PlannedAction] = []
    is_parallel = rng.random() < (0.95 if bias.lanes else 0.06)
    has_changes = bias.has_changes or is_parallel
    sizes = (3, 4) if has_changes or bias.is_busy or bias.moves else (1, 1, 2, 2, 3, 4)
    times = sorted(span * rng.random() for _ in range(rng.choice(sizes)))
    if bias.returns:  # the note is known when its edits are made
        times = [2.0 * rng.random(), *(20.0 + 10.0 * at / span for at in times[1:])]
    if is_parallel:  # the next change waits when the first one is sent
        times = [times[0] + 0.1 * number for number in range(len(times))]
    walks = bias.walks or (rng.random() < 0.6 and not has_changes)  # noqa: PLR2004
    moves = rng.random() < (0.95 if bias.moves else 0.05) and not bias.returns
    chain = rng.choice((None, None, "quest"))
    line = user if rng.random() < 0.6 else None  # noqa: PLR2004
    notes: list[str] = []
    for position, at in enumerate(times):
        kind = "step" if walks and rng.random() < 0.7 else "note"  # noqa: PLR2004
        if notes and (bias.returns or rng.random() < (0.9 if has_changes else 0.5)):
            kind = "change"
        kind = "move" if moves else kind
        action = PlannedAction(
            id=f"{device}-{user}-{position}",
            device=device,
            user=user,
            at=at,
            kind=kind,
            position=position,
            key=make_uuid(rng) if rng.random() < 0.7 else None,  # noqa: PLR2004
            payload={"line": line, "what": {"deep": {"n": rng.randint(0, 99)}}},
            is_parallel=is_parallel,
            max_attempts=2 if bias.is_silent else 6,
        )
        if kind == "step":
            action.profile = "walk" if chain is None else "walk-chain"
            action.payload["chain"] = chain
        action.payload["action_id"] = action.id
        if rng.random() < 0.08:  # noqa: PLR2004
            action.payload["poison"] = True
        _vary(rng, action, notes, bias)
        actions.append(action)
    _expect_parked(actions)
    return actions


def _expect_parked(actions: list[PlannedAction]) -> None:
    """Expect that what follows a refusal in its chain may have no effect."""
    is_refused = False
    for action in actions:
        if action.profile == "walk-chain":
            if is_refused and action.expect is Expect.EFFECT:
                action.expect = Expect.EITHER
            is_refused = is_refused or action.expect is Expect.REFUSAL


def _vary(rng: Random, action: PlannedAction, notes: list[str], bias: Bias) -> None:
    if bias.returns:
        _plan_return(rng, action, notes)
    elif action.kind == "change":
        _vary_change(rng, action, notes, bias)
    elif rng.random() < (0.5 if bias.refusals else 0.12):
        action.payload["refuse"] = True
        action.expect = Expect.REFUSAL
    elif action.kind == "step" and rng.random() < 0.1:  # noqa: PLR2004
        action.payload["unattested"] = True
    elif action.kind == "note":
        action.local_id = make_uuid(rng)
        notes.append(action.local_id)
        if rng.random() < (0.8 if bias.reads else 0.2):
            action.payload["unversioned"] = True


def _plan_return(rng: Random, action: PlannedAction, notes: list[str]) -> None:
    """Make a note, or a plain edit of it."""
    if action.kind == "change":
        action.note = notes[0]
    else:
        action.local_id = make_uuid(rng)
        notes.append(action.local_id)


def _vary_change(rng: Random, action: PlannedAction, notes: list[str], bias: Bias) -> None:
    action.note = notes[0] if bias.lanes else rng.choice(notes)
    action.profile = "field-read" if bias.reads else rng.choice(_PROFILES)
    if rng.random() < 0.5:  # noqa: PLR2004
        action.payload["title"] = action.payload.pop("what")["deep"]["n"]
    if rng.random() < (0.9 if bias.conflicts or bias.is_contested else 0.3):
        strategies = ("manual",) if bias.manual_conflicts else _STRATEGIES
        action.strategy = rng.choice(strategies)
        action.is_stale = rng.random() < (0.7 if bias.conflicts else 0.1)
    if action.is_parallel and rng.random() < 0.7:  # noqa: PLR2004
        action.lane = f"aside {action.id}"
    may_conflict = bias.is_contested or action.is_stale or action.profile == "field-ask"
    if may_conflict or action.is_parallel:
        action.expect, action.rekeyed = Expect.EITHER, True


def make_uuid(rng: Random) -> str:
    """Return a UUID version 4 from the random stream."""
    digits = f"{rng.getrandbits(128):032x}"
    variant = "89ab"[int(digits[16], 16) & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
