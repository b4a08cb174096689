"""What happened, as plain facts: what people tapped, what they were told, what the database holds.

Written down by whoever makes things happen (a simulation, or real processes under fire), and read
by ``checker``. Nothing in here knows how the product works: a fact names a *tap* by an id that the
payload carries through every part, so that even a key that was changed on the way is found out.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

__all__ = [
    "AnswerSeen",
    "Effect",
    "Expect",
    "Fate",
    "FollowUp",
    "History",
    "JobEffect",
    "JobSeen",
    "Tap",
]


class Expect(StrEnum):
    """What should become of a tap once everything has drained."""

    EFFECT = "effect"
    """It happens, exactly once."""
    REFUSAL = "refusal"
    """The server refuses it: it must not happen, and the person must be told."""
    EITHER = "either"
    """It happens once and is told as done, or it does not happen and is told as not done."""


class Tap(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a person did on a device."""

    # What the payload carries: the same in every send, effect and job that comes of it.
    id: str
    device: str
    user: str
    tenant: str
    # The idempotency key; None where the device made one and did not live to tell.
    key: str | None = None
    # The n-th thing this user did on this device.
    position: int = 0
    # The device said that it is kept: ``enqueue`` returned.
    acknowledged: bool = True
    expect: Expect = Expect.EFFECT
    # Has to keep its place among the taps of its user that say so too.
    in_order: bool = False
    # Its effect is to bring one job.
    brings_job: bool = False


class Fate(msgspec.Struct, frozen=True, kw_only=True):
    """What the device's own file says of a tap, at the end."""

    tap: str
    # As in the queue: ``pending``, ``succeeded``, ``failed``, ``expired`` and so on.
    status: str
    key: str | None = None
    # It was sent, and the device says that nobody knows what came of it.
    maybe: bool = False


class AnswerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the server, as it left it; whether it arrived is another matter."""

    # Who asked.
    tenant: str
    key: str
    status: int
    body: bytes
    # What was asked: two requests with the same text here are the same request.
    asked: str = ""
    # The machine's code of an error, if there is one.
    code: str | None = None
    # Whose data the answer shows; None if it does not say.
    shows: str | None = None
    # The endpoint promises to tell this answer again; successes always are.
    kept: bool = True


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One business row in the server's database."""

    tenant: str
    tap: str
    # Grows in the order of commits.
    number: int


class JobEffect(msgspec.Struct, frozen=True, kw_only=True):
    """One row that a job's handler wrote."""

    tenant: str
    job_id: str
    # Which attempt wrote it.
    attempt: int
    # Grows in the order of commits.
    number: int
    # Jobs of one such name are to be done in the order of ``position``.
    order: str | None = None
    position: int = 0


class JobSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One job, wherever it stands in the tables."""

    tenant: str
    job_id: str
    # The tap whose effect brought it; None if it is not about one tap.
    tap: str | None = None
    waits: bool = False
    # The attempt that the completion marker names.
    marker: int | None = None
    is_dead: bool = False
    # Its handler writes a row for each time it is done.
    writes: bool = True


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """Work that follows a changing state: at the end it has to have seen the last state."""

    tenant: str
    name: str
    wanted: int
    seen: int | None


class History(msgspec.Struct, kw_only=True):
    """Everything the checker decides upon."""

    taps: Sequence[Tap]
    effects: Sequence[Effect]
    fates: Sequence[Fate] = ()
    answers: Sequence[AnswerSeen] = ()
    jobs: Sequence[JobSeen] = ()
    job_effects: Sequence[JobEffect] = ()
    follow_ups: Sequence[FollowUp] = ()
    # What had not ended when its time was over, in words.
    undrained: Sequence[str] = ()
    # What went wrong in a way that no rule below foresees, in words.
    mishaps: Sequence[str] = ()
