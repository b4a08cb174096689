"""Claims and what comes of them, each in the transaction of the caller. Nothing is sent here."""

from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from holdfast.core.outbox_entry import Action, Claimed, Entry, Reason, Status, after
from holdfast.core.retry import RetryPolicy
from holdfast.errors import ClaimLostError
from holdfast.outbox.dependencies import free_dependents, park_dependents
from holdfast.outbox.events import EventKind
from holdfast.outbox.rows import awaited_local, created_by, entry_of, instant
from holdfast.outbox.unit import Unit

__all__ = [
    "Answer",
    "Pause",
    "claim",
    "claim_some",
    "conflict",
    "expire",
    "fail",
    "map_local_id",
    "mappings",
    "next_due_seconds",
    "release",
    "renew",
    "retry_later",
    "succeed",
    "watchdog",
]

_LONGEST_ERROR: Final = 8192
"""Characters kept of what the server said: enough to see what was wrong, not a whole page."""

_LONGEST_PAUSE_SECONDS: Final = 366 * 86_400.0
"""No server means more than a year; dates further off do not fit everywhere."""


class Answer(NamedTuple):
    """What came back from a send."""

    http_status: int | None
    code: str | None
    request_id: str | None
    error: str | None


class Pause(NamedTuple):
    """How long to wait before the next try."""

    delay_seconds: float | None
    retry_after_seconds: float | None
    policy: RetryPolicy
    chance: float
    give_up: bool

    def seconds(self, attempt: int) -> float:
        """Return the wait after this many attempts."""
        floor = self.retry_after_seconds
        if self.delay_seconds is None:
            delay = self.policy.delay_seconds(
                max(attempt, 1), random=self.chance, retry_after_seconds=floor
            )
        else:
            delay = max(self.delay_seconds, floor or 0.0)
        return min(delay, _LONGEST_PAUSE_SECONDS)


def claim(unit: Unit, user_id: str, *, lease_seconds: float, worker: str) -> Claimed | None:
    """Take the next entry of a user."""
    unit.rows("promote_due", user_id=user_id, ms=unit.ms)
    entry = unit.one(
        "claim",
        user_id=user_id,
        claimed_by=worker,
        now=unit.now_text,
        ms=unit.ms,
        lease_ms=unit.ms + int(lease_seconds * 1000),
    )
    if entry is None:
        return None
    unit.tell(EventKind.CLAIMED, entry)
    return Claimed(entry, entry.claim_number, lease_seconds)


def claim_some(
    unit: Unit,
    user_id: str,
    *,
    limit: int,
    lease_seconds: float,
    worker: str,
    skip_profiles: Iterable[str] = (),
) -> list[Claimed]:
    """Take the next entries of a user, in the order in which to send them.

    First those that have the turn in their lanes; if there are fewer than wanted, also those behind
    them, as far as nothing but the one before them keeps them.
    """
    unit.rows("promote_due", user_id=user_id, ms=unit.ms)
    how = {
        "claimed_by": worker,
        "now": unit.now_text,
        "ms": unit.ms,
        "lease_ms": unit.ms + int(lease_seconds * 1000),
    }
    skip = msgspec.json.encode(sorted(skip_profiles)).decode()
    heads = unit.entries("claim_some", user_id=user_id, limit=limit, skip=skip, **how)
    behind: dict[str, deque[Entry]] = {}
    left = limit - len(heads)
    for head in heads:
        ids = _sendable_behind(unit, head, left, skip) if left > 0 else []
        if ids:
            followers = unit.entries("claim_behind", ids=msgspec.json.encode(ids).decode(), **how)
            followers.sort(key=_number)
            behind[str(head.lane)] = deque(followers)
            left -= len(followers)
    entries = _in_turn(heads, behind)
    for entry in entries:
        unit.tell(EventKind.CLAIMED, entry)
    return [Claimed(entry, entry.claim_number, lease_seconds) for entry in entries]


def _sendable_behind(unit: Unit, head: Entry, limit: int, skip: str) -> list[str]:
    if head.lane is None:
        return []
    rows = unit.rows(
        "behind",
        user_id=head.user_id,
        lane=head.lane,
        sequence_number=head.sequence_number,
        limit=limit,
        skip=skip,
    )
    return [entry_id for entry_id, _ in takewhile(lambda row: row[1], rows)]


def _in_turn(heads: list[Entry], behind: dict[str, deque[Entry]]) -> list[Entry]:
    """Return the order in which they would be claimed one by one, if each succeeds."""
    waiting = [(-entry.priority, entry.sequence_number, entry) for entry in heads]
    heapify(waiting)
    order = []
    while waiting:
        entry = heappop(waiting)[2]
        order.append(entry)
        followers = behind.get(entry.lane or "")
        if followers:
            follower = followers.popleft()
            heappush(waiting, (-follower.priority, follower.sequence_number, follower))
    return order


def _number(entry: Entry) -> int:
    return entry.sequence_number


def renew(unit: Unit, claimed: Claimed) -> None:
    """Start the lease anew."""
    lease_ms = unit.ms + int(claimed.lease_seconds * 1000)
    if not unit.rows("renew", id=claimed.entry.id, number=claimed.number, lease_ms=lease_ms):
        raise _lost(claimed)


def succeed(unit: Unit, claimed: Claimed, answer: Answer, *, server_id: str | int | None) -> Entry:
    """Settle it as done, map its id, and let others go on."""
    entry = _settle(unit, claimed, Action.SUCCEED, answer, server_id=server_id)
    local = None if server_id is None else created_by(entry)
    if local is not None:
        kind, made_by = entry.entity_type, entry.id
        _map(unit, entry.user_id, entry.local_id, server_id, entity_type=kind, entry_id=made_by)
    free_dependents(unit, entry=entry.id, local=local)
    _pass_turn(unit, entry)
    unit.tell(EventKind.SUCCEEDED, entry)
    return entry


def expire(unit: Unit, claimed: Claimed, answer: Answer) -> Entry:
    """Settle it as too old."""
    entry = _settle(unit, claimed, Action.EXPIRE, answer, reason=Reason.STALE)
    _pass_turn(unit, entry)
    unit.tell(EventKind.EXPIRED, entry)
    park_dependents(unit, entry)
    return entry


def retry_later(
    unit: Unit, claimed: Claimed, answer: Answer, pause: Pause, *, outcome_unknown: bool
) -> Entry:
    """Send it back to wait, or fail it if it has had all its attempts."""
    attempt = claimed.entry.attempt_count
    if pause.give_up and pause.policy.gives_up_after(
        attempt, max_attempts=claimed.entry.max_attempts
    ):
        return fail(unit, claimed, answer, reason=Reason.ATTEMPTS, outcome_unknown=outcome_unknown)
    seconds = pause.seconds(attempt)
    entry = _give_back(
        unit,
        claimed,
        Action.RETRY_LATER,
        answer,
        due_ms=unit.ms + int(seconds * 1000) if seconds > 0 else None,
        next_retry_at=instant(unit.now + timedelta(seconds=seconds)),
        outcome_unknown=outcome_unknown,
    )
    unit.tell(EventKind.RETRYING, entry, delay_seconds=seconds)
    return entry


def release(unit: Unit, claimed: Claimed, answer: Answer, *, sent: bool) -> Entry:
    """Give the claim back as if it had not been taken."""
    entry = _give_back(unit, claimed, Action.RELEASE, answer, uncount=1, noted=sent)
    unit.tell(EventKind.RELEASED, entry, detail=answer.error)
    return entry


def fail(
    unit: Unit, claimed: Claimed, answer: Answer, *, reason: Reason, outcome_unknown: bool
) -> Entry:
    """Leave it for a person."""
    entry = _give_back(
        unit, claimed, Action.FAIL, answer, reason=reason, outcome_unknown=outcome_unknown
    )
    unit.tell(EventKind.FAILED, entry)
    park_dependents(unit, entry)
    return entry


def conflict(
    unit: Unit, claimed: Claimed, answer: Answer, *, theirs: Any, theirs_version: str | None
) -> Entry:
    """Keep both sides until somebody has decided."""
    entry = _give_back(
        unit,
        claimed,
        Action.CONFLICT,
        answer,
        outcome_unknown=False,
        theirs=None if theirs is UNSET else msgspec.json.encode(theirs).decode(),
        theirs_version=theirs_version,
    )
    unit.tell(EventKind.CONFLICT, entry)
    return entry


def watchdog(unit: Unit) -> list[Entry]:
    """Bring back all claims whose lease is over."""
    answer = Answer(None, None, None, "no outcome was recorded: the process that sent it ended")
    back = []
    for entry_id, number in unit.rows("lapsed", ms=unit.ms):
        claimed = Claimed(unit.entry(entry_id), number, 0.0)
        entry = _give_back(unit, claimed, Action.WATCHDOG, answer, uncount=1, outcome_unknown=True)
        unit.tell(EventKind.RELEASED, entry, detail=answer.error)
        back.append(entry)
    return back


def map_local_id(
    unit: Unit, user_id: str, local_id: str, server_id: str | int, *, entity_type: str
) -> None:
    """Record a mapping, and free what waits for it."""
    _map(unit, user_id, local_id, server_id, entity_type=entity_type, entry_id=None)
    free_dependents(unit, local=awaited_local(user_id, local_id))


def _map(
    unit: Unit,
    user_id: str,
    local_id: str | None,
    server_id: str | int | None,
    *,
    entity_type: str,
    entry_id: str | None,
) -> None:
    unit.rows(
        "map_local_id",
        user_id=user_id,
        local_id=local_id,
        server_id=server_id,
        entity_type=entity_type,
        entry_id=entry_id,
        now=unit.now_text,
    )


def mappings(unit: Unit, user_id: str, local_ids: Iterable[str]) -> dict[str, str | int]:
    """Return the mappings there are."""
    wanted = msgspec.json.encode(list(local_ids)).decode()
    return dict(unit.rows("mappings", user_id=user_id, local_ids=wanted))


def next_due_seconds(unit: Unit, user_id: str) -> float | None:
    """Return how long until the first waiting retry."""
    due_ms = unit.rows("next_due", user_id=user_id)[0][0]
    return None if due_ms is None else max(0, due_ms - unit.ms) / 1000


def _settle(
    unit: Unit,
    claimed: Claimed,
    action: Action,
    answer: Answer,
    *,
    server_id: str | int | None = None,
    reason: Reason | None = None,
) -> Entry:
    status = after(action, Status.IN_FLIGHT)
    done = status is Status.SUCCEEDED
    error, error_code = _short(answer.error), None if done else answer.http_status
    found = unit.rows(
        "settle",
        id=claimed.entry.id,
        number=claimed.number,
        status=status.value,
        server_id=server_id,
        synced_at=unit.now_text if done else None,
        error=error,
        error_code=error_code,
        reason=reason,
        ms=unit.ms,
    )
    if not found:
        raise _lost(claimed)
    _note(unit, claimed, action, answer)
    # Nobody can have changed it while it was claimed, so it need not be read again.
    entry = claimed.entry
    return msgspec.structs.replace(
        entry,
        status=status,
        server_id=entry.server_id if server_id is None else server_id,
        synced_at=unit.now if done else None,
        last_error=error,
        last_error_code=error_code,
        reason=reason,
        outcome_unknown=False,
        next_retry_at=None,
    )


def _give_back(
    unit: Unit,
    claimed: Claimed,
    action: Action,
    answer: Answer,
    *,
    uncount: int = 0,
    noted: bool = True,
    due_ms: int | None = None,
    next_retry_at: str | None = None,
    reason: Reason | None = None,
    outcome_unknown: bool | None = None,
    theirs: str | None = None,
    theirs_version: str | None = None,
) -> Entry:
    found = unit.rows(
        "give_back",
        id=claimed.entry.id,
        number=claimed.number,
        status=after(action, Status.IN_FLIGHT).value,
        uncount=uncount,
        due_ms=due_ms,
        next_retry_at=next_retry_at,
        error=_short(answer.error),
        error_code=answer.http_status,
        reason=reason,
        outcome_unknown=outcome_unknown,
        theirs=theirs,
        theirs_version=theirs_version,
    )
    if not found:
        raise _lost(claimed)
    if noted:
        _note(unit, claimed, action, answer)
    return entry_of(found[0])


def _note(unit: Unit, claimed: Claimed, action: Action, answer: Answer) -> None:
    unit.rows(
        "note_attempt",
        id=claimed.entry.id,
        now=unit.now_text,
        outcome=action.value,
        http_status=answer.http_status,
        code=answer.code,
        request_id=answer.request_id,
        error=_short(answer.error),
    )


def _pass_turn(unit: Unit, entry: Entry) -> None:
    if entry.lane is not None:
        unit.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)


def _short(error: str | None) -> str | None:
    return None if error is None else error[:_LONGEST_ERROR]


def _lost(claimed: Claimed) -> ClaimLostError:
    return ClaimLostError(
        f"the claim {claimed.number} on {claimed.entry.id} is over: it ran out or was ended before"
    )
