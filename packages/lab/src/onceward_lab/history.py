"""History of a run: user actions, responses, device queues and database rows.

The simulation and the chaos runner write it, ``checker`` reads it. Nothing here depends on how
Onceward works. Every record names a user action by an id that the payload carries through all
parts, so a key that was changed on the way is detected.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

__all__ = [
    "Conflict",
    "Contact",
    "Delay",
    "Effect",
    "EntryState",
    "Exhausted",
    "Expect",
    "FollowUp",
    "History",
    "Idle",
    "JobEffect",
    "JobState",
    "Move",
    "ResponseSeen",
    "UserAction",
    "VersionSeen",
    "Write",
]


class Expect(StrEnum):
    """The expected result of a user action once everything has drained."""

    EFFECT = "effect"
    """Exactly one effect."""
    REFUSAL = "refusal"
    """The server refuses it: no effect, and the entry ends as failed."""
    EITHER = "either"
    """One effect and the entry succeeded, or no effect and the entry did not."""


class UserAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action of a user on a device."""

    # Part of the payload, so the same in every request, effect and job.
    id: str
    device: str
    user: str
    tenant: str
    # The idempotency key; None if the device was killed before it reported one.
    key: str | None = None
    # The n-th action of this user on this device.
    position: int = 0
    # ``enqueue`` returned.
    acknowledged: bool = True
    expect: Expect = Expect.EFFECT
    # Effects of such actions of one user must come in the order of ``position``.
    in_order: bool = False
    # Effects of one lane must come in this order; None for those of the whole device.
    lane: str | None = None
    # It is in the outbox of the device.
    has_entry: bool = True
    # Its effect enqueues one job.
    enqueues_job: bool = False
    # The database has lost its effect, or what it needs, in a restore. It may have happened again.
    lost: bool = False
    # When it was enqueued, in seconds since the start.
    enqueued_at: float = 0.0
    # When it was sent for the first time. A retry names the same version.
    first_sent_at: float = float("inf")
    # If it is not known, the change is sent without a check.
    may_force: bool = True
    # The change names a version that the server never had.
    is_stale: bool = False
    # Changes of the same entity may be sent at the same time.
    is_parallel: bool = False
    # It had left the order of its entity, and later changes were sent before it came back.
    is_overtaken: bool = False
    # When it came back; infinite if it never left.
    returned_at: float = float("inf")
    # How often a person has retried it. What was refused has another key then.
    retries: int = 0


class EntryState(msgspec.Struct, frozen=True, kw_only=True):
    """The entry of a user action in the outbox file, at the end of the run."""

    action: str
    # As in the queue: ``pending``, ``succeeded``, ``failed``, ``expired`` and so on.
    status: str
    key: str | None = None
    # It was sent, and the device does not know the result.
    outcome_unknown: bool = False
    # The server had another version than the one it was made on. A person, or a strategy, may have
    # decided against it, or for another key.
    had_conflict: bool = False


class ResponseSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One response as the server sent it, whether it arrived or not."""

    # The sender of the request.
    tenant: str
    key: str
    status: int
    body: bytes
    # Identifies the request: two requests with the same text here are the same.
    request: str = ""
    # The error code, if there is one.
    code: str | None = None
    # The tenant whose data the response contains; None if unknown.
    data_of: str | None = None
    # Whether the endpoint stores this response and replays it; successes always are.
    stored: bool = True
    # ``Onceward-Effect``.
    effect: str | None = None
    # The user action that was sent.
    action: str | None = None
    # The request was served after a restore, and so late that caches must know of it.
    is_after_restore: bool = False
    # The database was restored, or days were skipped, while it was served or shortly before: only
    # that its sender has used the key counts.
    is_unsettled: bool = False


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """One business row in the server's database."""

    tenant: str
    action: str
    # Grows in the order of commits.
    number: int


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """An effect of a strict sequence: one number of one stream."""

    stream: str
    sequence: int
    action: str
    # Grows in the order of commits.
    number: int


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an entity in the server's database."""

    entity: str
    version: int
    # The user action that made it.
    action: str
    # Made by another client than the device.
    is_foreign: bool = False
    # The server has compared the version before with one that the request named.
    is_checked: bool = True


class VersionSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A version of an entity that a device has got from the server."""

    user: str
    entity: str
    version: int
    at: float
    # ``response`` to a write, ``read``, ``base`` (read before an edit that was based on no known
    # version), ``conflict`` (read, and reported as one), or ``decided``: a person has seen it.
    how: str
    # The user action whose entry was sent; None for ``decided``, which is about all.
    action: str | None = None


class Conflict(msgspec.Struct, frozen=True, kw_only=True):
    """A conflict that a device has reported."""

    entity: str
    action: str
    # The version that the request named; None if it named none, or nothing was sent.
    sent: int | None = None
    # The server's version; None if it is not known.
    theirs: int | None = None


class Exhausted(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that has failed because it had all its attempts."""

    action: str
    max_attempts: int
    # Sends with a result that is about the entry: not those of outages.
    sends: int


class Delay(msgspec.Struct, frozen=True, kw_only=True):
    """An action that could be sent and was not, while another one was refused."""

    action: str
    behind: str
    seconds: float


class Contact(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the contact between a process of a device and the server."""

    device: str
    # One run of a process: after a restart it has another name.
    process: str
    # In seconds since the start.
    at: float
    # ``sent``; its result: ``held`` (the response is that of an outage), ``responded`` (any other
    # response of the service) or ``none``; ``stored`` (what the process knows of holds is on disk);
    # ``online`` (the system reports a network).
    what: str
    # The request, for what was sent and for its result.
    number: int = 0
    action: str = ""
    # The path, with ``*`` for ids.
    endpoint: str = ""
    # Those of all items, for a batch that was sent.
    endpoints: tuple[str, ...] = ()
    # What is held: this endpoint only.
    is_endpoint: bool = False
    # Retry-After; None if the server has named no time.
    retry_after_seconds: float | None = None
    # When the drain began that sends: it reads then what other processes have stored.
    drain_began_at: float = 0.0
    # How much the device's clock is ahead.
    clock_seconds: float = 0.0
    # How often the server's time may have corrected the device's: at the first response after a
    # start of the device, which does not know for how long it was off.
    clock_corrections: int = 0


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """A drain that has ended although an action could be sent."""

    action: str
    # Why it ended, as it was reported.
    ended: str
    # After how long it should be called again; None for not before something happens.
    next_seconds: float | None


class JobEffect(msgspec.Struct, frozen=True, kw_only=True):
    """One row that a job's handler wrote."""

    tenant: str
    job_id: str
    # The attempt that wrote it.
    attempt: int
    # Grows in the order of commits.
    number: int
    # Jobs with the same value must run in the order of ``position``.
    order: str | None = None
    position: int = 0
    # Another attempt held the lease when the row was written.
    is_stale: bool = False
    # It was claimed while its queue was paused.
    is_of_paused_queue: bool = False


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """One job, in whichever table it is."""

    tenant: str
    job_id: str
    # The user action whose effect enqueued it; None if it belongs to no single action.
    action: str | None = None
    is_waiting: bool = False
    # The attempt in the completion marker.
    marker: int | None = None
    is_dead: bool = False
    # Whether its handler writes one row per completion.
    writes: bool = True


class FollowUp(msgspec.Struct, frozen=True, kw_only=True):
    """A job that follows a changing state: at the end it must have seen the last version."""

    tenant: str
    name: str
    wanted: int
    seen: int | None


class History(msgspec.Struct, kw_only=True):
    """The input of the checker."""

    actions: Sequence[UserAction]
    effects: Sequence[Effect]
    entries: Sequence[EntryState] = ()
    responses: Sequence[ResponseSeen] = ()
    jobs: Sequence[JobState] = ()
    job_effects: Sequence[JobEffect] = ()
    # Tenant and id of jobs that an operator has cancelled while they waited.
    cancelled_jobs: Sequence[tuple[str, str]] = ()
    follow_ups: Sequence[FollowUp] = ()
    writes: Sequence[Write] = ()
    moves: Sequence[Move] = ()
    # By stream: the numbers that were used, as the server has stored them.
    used_numbers: Mapping[str, int] = {}
    seen: Sequence[VersionSeen] = ()
    conflicts: Sequence[Conflict] = ()
    exhausted: Sequence[Exhausted] = ()
    delays: Sequence[Delay] = ()
    contacts: Sequence[Contact] = ()
    idle: Sequence[Idle] = ()
    # Versions were lost in a restore: own writes may look foreign.
    are_versions_lost: bool = False
    # Descriptions of retries that named another version than the first send.
    changed_retries: Sequence[str] = ()
    # Descriptions of responses that differ from the records at the time they were sent.
    unrecorded: Sequence[str] = ()
    # Descriptions of requests that were not run and have left a record or an effect.
    left_behind: Sequence[str] = ()
    # Descriptions of sends of a chain after its refusal.
    sent_after_refusal: Sequence[str] = ()
    # Descriptions of what had not finished before the deadline.
    unfinished: Sequence[str] = ()
    # Descriptions of errors that no injected fault explains.
    errors: Sequence[str] = ()
