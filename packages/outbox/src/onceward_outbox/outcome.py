"""Outcomes of sending an entry: values that travel whole, from the response to the queue."""

from typing import Any, NamedTuple

import msgspec

from onceward_outbox.claims import Violation
from onceward_outbox.conflicts import ConflictPlan
from onceward_outbox.entry import Reason
from onceward_outbox.profile import Recovery
from onceward_outbox.versions import Produced
from onceward_protocol.retry import QUEUE, RetryPolicy


class AttemptResult(NamedTuple):
    """One send in the history."""

    # The HTTP status; None without a response.
    http_status: int | None = None
    # The server's machine-readable code.
    code: str | None = None
    # The ``X-Request-ID`` of the response.
    request_id: str | None = None
    # What went wrong, for a person.
    error: str | None = None


class Succeeded(msgspec.Struct, frozen=True):
    """It has happened on the server, now or earlier.

    For a ``create`` with a local id, ``server_id`` is mapped in the same commit, and entries that
    refer to the local id are freed. Without a ``server_id`` those stay blocked until
    ``OutboxQueue.map_local_id``.
    """

    # For the history.
    result: AttemptResult = AttemptResult()
    # The server's id of what was created.
    server_id: str | int | None = None
    # The version that the entity has now: later edits of this device are based on it.
    produced: Produced = Produced()


class Rebased(msgspec.Struct, frozen=True):
    """Not sent: the entity was read, and the edit is now based on that."""

    version: str
    base: Any


class RetryLater(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that may pass: the entry returns to the queue.

    Without ``delay_seconds`` the policy and the number of attempts determine the delay;
    ``retry_after_seconds`` is a floor in either case.
    """

    # For the history.
    result: AttemptResult = AttemptResult()
    # The delays, and the attempts after which it is given up.
    policy: RetryPolicy = QUEUE
    # An entry that has had ``max_attempts`` becomes ``failed`` instead, with reason ``attempts``.
    give_up: bool = True
    # No conclusive response came, so it may have happened. Such an entry is not edited or cancelled
    # without ``force``. It is sent again with the same key and body while the server certainly
    # knows the key; after that it expires or fails (reason ``unknown``).
    outcome_unknown: bool = False
    # The delay; None for that of the policy.
    delay_seconds: float | None = None
    # What the server has asked for by ``Retry-After``.
    retry_after_seconds: float | None = None
    # Whether the strict order of the user goes on without it, if it is a create in no chain.
    steps_aside: bool = False
    # Whether the version of the claim was sent: then every later send has the same. In a batch, the
    # server may have put in another.
    keeps_version: bool = True


class Released(msgspec.Struct, frozen=True):
    """Not an attempt: no attempt is counted, and no delay is set.

    For a stop between claim and send, for a token that is not accepted (401), for local ids that
    are not known yet.
    """

    # For the history.
    result: AttemptResult = AttemptResult()
    # There was a request, which is added to the history; it had a response.
    sent: bool = False
    # A copy of it, or an earlier send, had no response.
    outcome_unknown: bool = False


class Failed(msgspec.Struct, frozen=True):
    """The server refuses it as it is. Dependents are parked.

    The lane goes on if the server has refused the entry for good, unless the profile stops it;
    otherwise it waits until the entry is retried, edited or discarded.
    """

    # For the history.
    result: AttemptResult = AttemptResult()
    # Why it failed.
    reason: Reason = Reason.RESPONSE
    # An earlier send had no response, so it may have happened.
    outcome_unknown: bool = False
    # The lane goes on in any case.
    leaves_lane: bool = False


class Renumbered(msgspec.Struct, frozen=True):
    """The server refuses the number of a strict sequence, and nothing has happened by this send."""

    result: AttemptResult
    violation: Violation
    policy: RetryPolicy
    # Whether to wait before the next send.
    is_delayed: bool = False


class NumberRequired(msgspec.Struct, frozen=True):
    """The server refuses a request without a number, and nothing has happened by this send."""

    result: AttemptResult
    # A copy of it, or an earlier send, had no response.
    outcome_unknown: bool = False


class Expired(msgspec.Struct, frozen=True):
    """The server rejects it as too old. Dependents are parked, the lane continues."""

    # For the history.
    result: AttemptResult = AttemptResult()


class Conflicted(msgspec.Struct, frozen=True):
    """The entity was changed on the server; the plan says how the conflict ends, if it does.

    Without a resolution in the plan the lane waits for ``OutboxQueue.resolve``.
    """

    # For the history.
    result: AttemptResult = AttemptResult()
    # The server's side, and the resolution.
    plan: ConflictPlan = ConflictPlan()
    # What the edit was made on, a JSON text, if it is not the entry's own base.
    base: str | None = None


class WrongOrder(msgspec.Struct, frozen=True):
    """Rejected as out of order; ``state`` is what the recovery reads from the server."""

    result: AttemptResult
    recovery: Recovery
    state: Any


class KeyExpired(msgspec.Struct, frozen=True):
    """Not sent: it may have happened, and the server no longer knows its key."""


Outcome = (
    Succeeded
    | Rebased
    | RetryLater
    | Released
    | Failed
    | Renumbered
    | NumberRequired
    | Expired
    | Conflicted
    | WrongOrder
    | KeyExpired
)
"""Outcome of a claim."""
