"""Outcomes of sending an entry, and how each is recorded in the queue."""

from collections.abc import Iterable
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET

from onceward_outbox.claims import AttemptResult
from onceward_outbox.conflicts import ConflictPlan, resolve_conflict
from onceward_outbox.entry import Claimed, Entry, Reason, Status
from onceward_outbox.errors import OutcomeUnknownError
from onceward_outbox.maintenance import KEY_EXPIRED
from onceward_outbox.profile import ChainAction, Drop, Park, Recovery, Send
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.sequences import OUTCOME_UNKNOWN, Violation
from onceward_outbox.versions import Produced
from onceward_protocol.retry import RetryPolicy

__all__ = [
    "Conflicted",
    "Expired",
    "Failed",
    "KeyExpired",
    "NumberRequired",
    "Outcome",
    "Rebased",
    "Released",
    "Renumbered",
    "RetryLater",
    "Succeeded",
    "WrongOrder",
    "record",
]

_PAGE: Final = 500


class Succeeded(msgspec.Struct, frozen=True):
    """It has happened on the server, now or earlier."""

    result: AttemptResult
    server_id: str | int | None = None
    produced: Produced = Produced()


class Rebased(msgspec.Struct, frozen=True):
    """Not sent: the entity was read, and the edit is now based on that."""

    version: str
    base: Any


class RetryLater(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that may pass; with ``give_up`` this was the last attempt."""

    result: AttemptResult
    policy: RetryPolicy
    give_up: bool
    outcome_unknown: bool
    delay_seconds: float | None = None
    retry_after_seconds: float | None = None
    # Whether the strict order of the user goes on without it.
    steps_aside: bool = False
    # Whether the version of the claim was sent. In a batch, the server may have put in another.
    keeps_version: bool = True


class Released(msgspec.Struct, frozen=True):
    """Not an attempt: the claim is released. ``sent`` says whether there was a request."""

    result: AttemptResult
    sent: bool
    # A copy of it, or an earlier send, had no response.
    outcome_unknown: bool = False


class Failed(msgspec.Struct, frozen=True):
    """The server refuses it as it is."""

    result: AttemptResult
    reason: Reason = Reason.RESPONSE
    outcome_unknown: bool = False


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
    """The server rejects it as too old."""

    result: AttemptResult


class Conflicted(msgspec.Struct, frozen=True):
    """The entity was changed on the server; the plan says how the conflict ends, if it does."""

    result: AttemptResult
    plan: ConflictPlan
    # What the edit was made on, a JSON text, if it is known.
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


def record(  # noqa: C901, PLR0911, PLR0912 - one for each outcome
    queue: OutboxQueue, claimed: Claimed, outcome: Outcome
) -> Entry:
    """Record an outcome, and return the entry after that.

    One operation of the queue, or several in a nested transaction: a claim that turns out to be
    lost (``ClaimLostError``) leaves nothing half done.
    """
    match outcome:
        case Succeeded():
            result = outcome.result
            return queue.succeed(
                claimed,
                server_id=outcome.server_id,
                produced=outcome.produced,
                http_status=result.http_status,
                code=result.code,
                request_id=result.request_id,
            )
        case Rebased():
            return queue.rebase(claimed, base=outcome.base, version=outcome.version)
        case RetryLater():
            return queue.schedule_retry(
                claimed,
                policy=outcome.policy,
                give_up=outcome.give_up,
                outcome_unknown=outcome.outcome_unknown,
                delay_seconds=outcome.delay_seconds,
                retry_after_seconds=outcome.retry_after_seconds,
                steps_aside=outcome.steps_aside,
                keeps_version=outcome.keeps_version,
                **outcome.result._asdict(),
            )
        case Released():
            return queue.release(
                claimed,
                sent=outcome.sent,
                outcome_unknown=outcome.outcome_unknown,
                **outcome.result._asdict(),
            )
        case Failed():
            return queue.fail(
                claimed,
                reason=outcome.reason,
                outcome_unknown=outcome.outcome_unknown,
                **outcome.result._asdict(),
            )
        case Renumbered():
            return _record_renumbered(queue, claimed, outcome)
        case NumberRequired():
            with queue.transaction():
                entry = queue.release(
                    claimed,
                    sent=True,
                    outcome_unknown=outcome.outcome_unknown,
                    **outcome.result._asdict(),
                )
                return queue.begin_stream(entry)
        case Expired():
            return queue.expire(claimed, **outcome.result._asdict())
        case Conflicted():
            plan = outcome.plan
            with queue.transaction():
                own = queue.resend_on_own(
                    claimed, theirs_version=plan.version, **outcome.result._asdict()
                )
                if own is not None:
                    return own
                entry = queue.conflict(
                    claimed,
                    theirs=plan.theirs,
                    theirs_version=plan.version,
                    base=outcome.base,
                    fields=plan.fields,
                    **outcome.result._asdict(),
                )
                if plan.how is None:
                    return entry
                # No person has seen the server's side: later edits are checked against it too.
                return resolve_conflict(queue, entry, plan.how, payload=plan.payload, adopts=False)
        case WrongOrder():
            with queue.transaction():
                pending = _pending_entries(queue, claimed.entry.user_id)
                actions = outcome.recovery.plan(claimed.entry, pending, outcome.state)
                return _apply_plan(queue, claimed, outcome.result, actions)
        case KeyExpired():
            return _record_key_expired(queue, claimed)
        case _:
            assert_never(outcome)


def _record_renumbered(queue: OutboxQueue, claimed: Claimed, outcome: Renumbered) -> Entry:
    """Send it again with another number; if it may have happened, the stream goes on without it."""
    result, violation = outcome.result, outcome.violation
    with queue.transaction():
        if violation.number is None:
            noted = result._replace(error=OUTCOME_UNKNOWN)
            entry = queue.fail(
                claimed,
                reason=Reason.UNKNOWN,
                outcome_unknown=True,
                leaves_lane=True,
                **noted._asdict(),
            )
            queue.renumber(claimed, violation)
            return entry
        if outcome.is_delayed:
            queue.schedule_retry(
                claimed,
                policy=outcome.policy,
                give_up=False,
                outcome_unknown=False,
                **result._asdict(),
            )
        else:
            queue.release(claimed, sent=True, **result._asdict())
        return queue.renumber(claimed, violation)


def _record_key_expired(queue: OutboxQueue, claimed: Claimed) -> Entry:
    """Leave an entry that may have happened to a person, or expire it if it is too old."""
    entry_id = claimed.entry.id
    with queue.transaction():
        queue.release(claimed)
        queue.expire_stale(claimed.entry.user_id)
        entry = queue.get(entry_id)
        if entry.status is Status.PENDING:
            entry = queue.park(entry_id, reason=Reason.UNKNOWN, error=KEY_EXPIRED)
    return entry


# -- recovery from an out-of-order response -------------------------------------------------------


def _pending_entries(queue: OutboxQueue, user_id: str) -> list[Entry]:
    """Return all pending entries of a user, in order."""
    found: list[Entry] = []
    while True:
        after = found[-1].id if found else None
        page = queue.entries(user_id, status=Status.PENDING, limit=_PAGE, after=after)
        found += page
        if len(page) < _PAGE:
            return found


def _apply_plan(
    queue: OutboxQueue, claimed: Claimed, result: AttemptResult, actions: Iterable[ChainAction]
) -> Entry:
    """Carry out the actions in the caller's transaction; returns the claimed entry afterwards."""
    planned = {action.entry.id: action for action in actions}
    _end_claim(queue, claimed, result, planned.pop(claimed.entry.id, Send(claimed.entry)))
    for action in planned.values():
        entry_id = action.entry.id
        match action:
            case Drop():
                # Forced: even if it was sent without a response, the server has its effect.
                queue.cancel(entry_id, reason=Reason.REBUILD, force=True)
            case Park():
                queue.park(entry_id, reason=Reason.REBUILD, error=action.why)
            case Send(endpoint=str() as endpoint):
                try:
                    queue.edit_payload(entry_id, UNSET, endpoint=endpoint)
                except OutcomeUnknownError:
                    continue  # it may have happened: only the same request can find that out
            case Send():
                pass
            case _:
                assert_never(action)
    return queue.get(claimed.entry.id)


def _end_claim(
    queue: OutboxQueue, claimed: Claimed, result: AttemptResult, action: ChainAction
) -> None:
    entry_id = claimed.entry.id
    match action:
        case Send():
            noted = result._replace(error=f"the server responded {result.code}")
            queue.release(claimed, sent=True, **noted._asdict())
            if action.endpoint is not None:
                # Forced: the server has just rejected this key, so it has not happened.
                queue.edit_payload(entry_id, UNSET, endpoint=action.endpoint, force=True)
        case Park():
            noted = result._replace(error=action.why)
            queue.fail(claimed, reason=Reason.REBUILD, **noted._asdict())
        case Drop():
            noted = result._replace(error="already done on the server")
            queue.fail(claimed, reason=Reason.REBUILD, **noted._asdict())
            queue.discard(entry_id, reason=Reason.REBUILD)
        case _:
            assert_never(action)
