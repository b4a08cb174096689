"""Ends of claims, as an app that sends by itself records them."""

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET

from onceward_outbox import Claimed, Entry, OutboxQueue
from onceward_outbox.conflicts import ConflictPlan
from onceward_outbox.entry import Reason
from onceward_outbox.outcome import (
    AttemptResult,
    Conflicted,
    Expired,
    Failed,
    Rebased,
    Released,
    RetryLater,
    Succeeded,
)
from onceward_outbox.versions import Produced

_RESULT = AttemptResult._fields


def _split(fields: dict[str, Any]) -> tuple[AttemptResult, dict[str, Any]]:
    """The result of the attempt, and the fields of the outcome itself."""
    result = AttemptResult(**{name: fields.pop(name) for name in _RESULT if name in fields})
    return result, fields


def succeed(
    queue: OutboxQueue,
    claimed: Claimed,
    *,
    server_id: str | int | None = None,
    produced: Produced = Produced(),  # noqa: B008 - immutable
    **result: Any,
) -> Entry:
    return queue.record(claimed, Succeeded(AttemptResult(**result), server_id, produced))


def retry_later(queue: OutboxQueue, claimed: Claimed, **fields: Any) -> Entry:
    result, own = _split(fields)
    return queue.record(claimed, RetryLater(result=result, **own))


def release(queue: OutboxQueue, claimed: Claimed, **fields: Any) -> Entry:
    result, own = _split(fields)
    return queue.record(claimed, Released(result, **own))


def fail(
    queue: OutboxQueue, claimed: Claimed, *, reason: Reason = Reason.RESPONSE, **fields: Any
) -> Entry:
    result, own = _split(fields)
    return queue.record(claimed, Failed(result, reason, **own))


def record_conflict(
    queue: OutboxQueue,
    claimed: Claimed,
    *,
    theirs: Any = UNSET,
    theirs_version: str | None = None,
    fields: Iterable[str] = (),
    http_status: int = 409,
    **result: Any,
) -> Entry:
    plan = ConflictPlan(theirs=theirs, version=theirs_version, fields=tuple(fields))
    return queue.record(claimed, Conflicted(AttemptResult(http_status, **result), plan))


def expire(queue: OutboxQueue, claimed: Claimed, **result: Any) -> Entry:
    return queue.record(claimed, Expired(AttemptResult(**result)))


def rebase(queue: OutboxQueue, claimed: Claimed, *, base: Any, version: str) -> Entry:
    return queue.record(claimed, Rebased(version, base))
