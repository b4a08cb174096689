"""Claim entries and record their outcomes, in the caller's transaction."""

import logging
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from heapq import heapify, heappop, heappush
from itertools import takewhile
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from onceward_outbox.claim_holder import claim_holder, has_ended
from onceward_outbox.dependencies import (
    bind_chain,
    free_dependents,
    is_overtaken,
    leave_lane,
    park_dependents,
    step_aside,
)
from onceward_outbox.entry import (
    Claimed,
    Entry,
    Reason,
    Status,
    Transition,
    after,
)
from onceward_outbox.errors import ClaimLostError
from onceward_outbox.events import EventKind
from onceward_outbox.failure_cause import is_client_bug
from onceward_outbox.sequences import acknowledge, number_claim
from onceward_outbox.sql import awaited_local, created_by, entry_of, instant, json_text
from onceward_outbox.transaction import Transaction
from onceward_outbox.versions import Produced, record_read, record_success
from onceward_protocol.ids import new_uuid4
from onceward_protocol.response_classification import SILENT
from onceward_protocol.retry import RetryPolicy

__all__ = [
    "ABANDONED",
    "AttemptResult",
    "Claiming",
    "claim_some",
    "conflict",
    "expire",
    "fail",
    "map_local_id",
    "rebase",
    "release",
    "renew",
    "resend_on_own",
    "retry_later",
    "return_expired_claims",
    "succeed",
]

ABANDONED: Final = "abandoned"
"""In the history, the code of a send that was not waited for. It may have happened."""

_SENT_UNHEARD: Final = frozenset({None, ABANDONED, SILENT})
"""In the history, the codes of sends without a response."""

_log = logging.getLogger(__name__)

_MAX_ERROR_LENGTH: Final = 8192
"""Characters stored of an error body: enough to see what was wrong."""

_MAX_DELAY_SECONDS: Final = 366 * 86_400.0
"""A longer Retry-After is shortened: dates further off do not fit everywhere."""


_FINAL: Final = frozenset({Reason.RESPONSE, Reason.REBUILD, Reason.DEPENDENCY})
"""Why an entry will not happen as it is. With other reasons it may have happened."""


class AttemptResult(NamedTuple):
    """What the history keeps of one send."""

    http_status: int | None = None
    code: str | None = None
    request_id: str | None = None
    error: str | None = None


# -- claiming -------------------------------------------------------------------------------------


def claim_some(
    tx: Transaction,
    user_id: str,
    *,
    limit: int,
    lease_seconds: float,
    worker: str,
    skip_profiles: Iterable[str] = (),
    held_paths: Iterable[str] = (),
) -> list[Claimed]:
    """Claim the next entries of a user, in the order in which to send them.

    First the heads of their lanes; if there are fewer than ``limit``, also those behind them, as
    far as only the one before blocks them.
    """
    claiming = Claiming(
        tx,
        lease_seconds=lease_seconds,
        worker=worker,
        skip_profiles=skip_profiles,
        held_paths=held_paths,
    )
    heads = claiming.claim_heads(user_id, limit)
    behind: dict[str, deque[Entry]] = {}
    left = limit - len(heads)
    for head in heads:
        ids = _sendable_behind(tx, head, left, claiming.skip) if left > 0 else []
        if ids:
            followers = claiming.claim_behind(ids)
            followers.sort(key=attrgetter("sequence_number"))
            behind[str(head.lane)] = deque(followers)
            left -= len(followers)
    return claiming.claimed(_in_send_order(heads, behind))


class Claiming:
    """Claims of one transaction, which have the same lease."""

    def __init__(
        self,
        tx: Transaction,
        *,
        lease_seconds: float,
        worker: str,
        skip_profiles: Iterable[str],
        held_paths: Iterable[str],
    ) -> None:
        self._tx = tx
        self._lease_seconds = lease_seconds
        self._columns = {
            "claimed_by": worker,
            "now": tx.now_text,
            "ms": tx.ms,
            "lease_ms": tx.ms + int(lease_seconds * 1000),
        }
        # Parameters of statements that leave out profiles and endpoints.
        self.skip = {
            "skip": msgspec.json.encode(sorted(skip_profiles)).decode(),
            "held": _patterns(held_paths),
        }
        self._versions: dict[str, str] = {}

    def claim_heads(self, user_id: str, limit: int) -> list[Entry]:
        """Claim the heads of lanes that can be sent now, in no particular order."""
        self._tx.rows("promote_due", user_id=user_id, ms=self._tx.ms)
        return self._claim("claim_some", user_id=user_id, limit=limit, **self.skip)

    def claim_behind(self, ids: list[str]) -> list[Entry]:
        """Claim entries that can be sent after others, in no particular order."""
        return self._claim("claim_behind", ids=msgspec.json.encode(ids).decode())

    def claimed(self, entries: Iterable[Entry]) -> list[Claimed]:
        """Return the claims on entries, in this order, and emit their events."""
        found = []
        for entry in entries:
            self._tx.emit(EventKind.CLAIMED, entry)
            version = self._versions.get(entry.id)
            profile = self._tx.profiles.find(entry.profile)
            sequence = number_claim(self._tx, entry, profile)
            found.append(
                Claimed(entry, entry.claim_number, self._lease_seconds, version, sequence=sequence)
            )
        return found

    def _claim(self, name: str, **params: Any) -> list[Entry]:
        found = []
        for *row, version in self._tx.rows(name, **params, **self._columns):
            entry = entry_of(row)
            found.append(entry)
            if version:
                self._versions[entry.id] = version
        return found


def _patterns(paths: Iterable[str]) -> str:
    """Return each path template with a pattern of the paths that have more segments."""
    patterns = [(path, "*/" * (path.count("/") + 1) + "*") for path in sorted(paths)]
    return msgspec.json.encode(patterns).decode()


def _sendable_behind(tx: Transaction, head: Entry, limit: int, skip: dict[str, str]) -> list[str]:
    if head.lane is None:
        return []
    rows = tx.rows(
        "behind",
        user_id=head.user_id,
        lane=head.lane,
        sequence_number=head.sequence_number,
        limit=limit,
        **skip,
    )
    return [entry_id for entry_id, _ in takewhile(lambda row: row[1], rows)]


def _in_send_order(heads: list[Entry], behind: dict[str, deque[Entry]]) -> list[Entry]:
    """Return the order in which single claims would come if each send succeeds."""
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


def renew(tx: Transaction, claimed: Claimed) -> None:
    """Restart the lease. Raises ``ClaimLostError``."""
    lease_ms = tx.ms + int(claimed.lease_seconds * 1000)
    if not tx.rows("renew", id=claimed.entry.id, number=claimed.number, lease_ms=lease_ms):
        raise _lost(claimed)


def return_expired_claims(tx: Transaction) -> list[Entry]:
    """Return entries to ``pending`` whose process has ended, or whose lease has expired."""
    holders = [name for (name,) in tx.rows("claim_holders", own=claim_holder()) if has_ended(name)]
    if holders:
        tx.rows("end_leases_of", holders=msgspec.json.encode(holders).decode())
    result = AttemptResult(error="no outcome was recorded: the process that sent it ended")
    returned = []
    for entry_id, number in tx.rows("lapsed", ms=tx.ms):
        claimed = Claimed(tx.entry(entry_id), number, 0.0)
        entry = _end_claim(
            tx, claimed, Transition.WATCHDOG, result, uncount=1, outcome_unknown=True
        )
        tx.emit(EventKind.RELEASED, entry, detail=result.error)
        returned.append(entry)
    return returned


# -- outcomes -------------------------------------------------------------------------------------


def succeed(
    tx: Transaction,
    claimed: Claimed,
    result: AttemptResult,
    *,
    server_id: str | int | None,
    produced: Produced,
) -> Entry:
    """Record success, its version, map the local id, and free dependents and the lane."""
    entry = _settle(tx, claimed, Transition.SUCCEED, result, server_id=server_id)
    record_success(tx, claimed, entry, produced)
    acknowledge(tx, claimed, result.http_status)
    local = None if server_id is None else created_by(entry)
    if local is not None:
        kind, made_by = entry.entity_type, entry.id
        _map(tx, entry.user_id, entry.local_id, server_id, entity_type=kind, entry_id=made_by)
    free_dependents(tx, entry=entry.id, local=local)
    _pass_turn(tx, entry)
    tx.emit(EventKind.SUCCEEDED, entry, http_status=result.http_status, code=result.code)
    return entry


def expire(tx: Transaction, claimed: Claimed, result: AttemptResult) -> Entry:
    """Record that the server rejected the entry as too old."""
    entry = _settle(tx, claimed, Transition.EXPIRE, result, reason=Reason.STALE)
    _pass_turn(tx, entry)
    tx.emit(EventKind.EXPIRED, entry)
    park_dependents(tx, entry)
    return entry


def retry_later(
    tx: Transaction,
    claimed: Claimed,
    result: AttemptResult,
    *,
    policy: RetryPolicy,
    random: float,
    give_up: bool,
    outcome_unknown: bool,
    delay_seconds: float | None,
    retry_after_seconds: float | None,
    steps_aside: bool = False,
    keeps_version: bool = True,
) -> Entry:
    """Return the entry to the queue with a delay, or fail it after its last attempt.

    ``steps_aside``: the entries behind it need not wait for it, see ``step_aside``.
    ``keeps_version``: the version of the claim was sent; if not, it is derived again.
    """
    attempt = claimed.entry.attempt_count
    if give_up and policy.gives_up_after(attempt, max_attempts=claimed.entry.max_attempts):
        return fail(tx, claimed, result, reason=Reason.ATTEMPTS, outcome_unknown=outcome_unknown)
    if delay_seconds is None:
        seconds = policy.delay_seconds(
            max(attempt, 1), random=random, retry_after_seconds=retry_after_seconds
        )
    else:
        seconds = max(delay_seconds, retry_after_seconds or 0.0)
    seconds = min(seconds, _MAX_DELAY_SECONDS)
    entry = _end_claim(
        tx,
        claimed,
        Transition.RETRY_LATER,
        result,
        due_ms=tx.ms + int(seconds * 1000) if seconds > 0 else None,
        next_retry_at=instant(tx.now + timedelta(seconds=seconds)),
        outcome_unknown=outcome_unknown,
        keeps_version=keeps_version,
    )
    tx.emit(
        EventKind.RETRYING,
        entry,
        http_status=result.http_status,
        code=result.code,
        delay_seconds=seconds,
        # An empty body says nothing.
        detail=None
        if result.http_status is None or result.error
        else f"HTTP {result.http_status}, next attempt in {seconds:.0f} s",
    )
    return step_aside(tx, entry) if steps_aside else entry


def release(
    tx: Transaction,
    claimed: Claimed,
    result: AttemptResult,
    *,
    sent: bool,
    outcome_unknown: bool = False,
) -> Entry:
    """Return the entry to the queue as if it had not been claimed."""
    entry = _end_claim(
        tx,
        claimed,
        Transition.RELEASE,
        result,
        uncount=1,
        in_history=sent,
        outcome_unknown=True if outcome_unknown else None,
    )
    tx.emit(EventKind.RELEASED, entry, detail=result.error)
    return entry


def fail(
    tx: Transaction,
    claimed: Claimed,
    result: AttemptResult,
    *,
    reason: Reason,
    outcome_unknown: bool,
    leaves_lane: bool = False,
) -> Entry:
    """Make the entry ``failed`` and park its dependents.

    If the server has refused it for good, or with ``leaves_lane``, the lane goes on, unless the
    profile stops it.
    """
    entry = _end_claim(
        tx, claimed, Transition.FAIL, result, reason=reason, outcome_unknown=outcome_unknown
    )
    tx.emit(EventKind.FAILED, entry)
    _log_client_bug(tx, entry)
    is_final = reason in _FINAL and not entry.outcome_unknown
    if is_final and reason is Reason.RESPONSE:
        bind_chain(tx, entry)
    park_dependents(tx, entry)
    return leave_lane(tx, entry) if is_final or leaves_lane else entry


def conflict(
    tx: Transaction,
    claimed: Claimed,
    result: AttemptResult,
    *,
    theirs: Any,
    theirs_version: str | None,
    base: str | None,
    fields: Iterable[str],
) -> Entry:
    """Make the entry ``conflict`` and store the server's side."""
    entry = _end_claim(
        tx,
        claimed,
        Transition.CONFLICT,
        result,
        outcome_unknown=False,
        theirs=None if theirs is UNSET else msgspec.json.encode(theirs).decode(),
        theirs_version=theirs_version,
        base=base,
        conflict_fields=json_text(list(fields)),
    )
    record_read(tx, entry, theirs_version)
    tx.emit(EventKind.CONFLICT, entry)
    return entry


def rebase(tx: Transaction, claimed: Claimed, *, base: str | None, version: str) -> Entry:
    """Return the entry to the queue, based on the version that the server has now."""
    # First, because it raises if the claim is lost.
    release(tx, claimed, AttemptResult(), sent=False)
    record_read(tx, claimed.entry, version)
    return tx.changed("rebase", id=claimed.entry.id, base=base, version=version)


def resend_on_own(
    tx: Transaction, claimed: Claimed, result: AttemptResult, *, theirs_version: str | None
) -> Entry | None:
    """Return an edit to the queue that conflicts only with other edits of this device.

    That happens if edits of one entity are in several lanes, and are sent at once. It has a new
    key, because the server may have stored its response. None for any other conflict, and for an
    edit that had failed while later ones of its lane succeeded.
    """
    entry = claimed.entry
    if claimed.version is None or theirs_version is None or theirs_version == claimed.version:
        return None
    is_own = tx.rows(
        "is_own_version",
        user_id=entry.user_id,
        entity=entry.entity,
        sent=claimed.version,
        version=theirs_version,
    )
    if not is_own or is_overtaken(tx, entry):
        return None
    release(tx, claimed, result, sent=True)
    return tx.changed("resend", id=entry.id, key=new_uuid4())


def map_local_id(
    tx: Transaction, user_id: str, local_id: str, server_id: str | int, *, entity_type: str
) -> None:
    """Record a mapping, and free what waits for it."""
    _map(tx, user_id, local_id, server_id, entity_type=entity_type, entry_id=None)
    free_dependents(tx, local=awaited_local(user_id, local_id))


def _map(
    tx: Transaction,
    user_id: str,
    local_id: str | None,
    server_id: str | int | None,
    *,
    entity_type: str,
    entry_id: str | None,
) -> None:
    tx.rows(
        "map_local_id",
        user_id=user_id,
        local_id=local_id,
        server_id=server_id,
        entity_type=entity_type,
        entry_id=entry_id,
        now=tx.now_text,
    )


def _settle(
    tx: Transaction,
    claimed: Claimed,
    transition: Transition,
    result: AttemptResult,
    *,
    server_id: str | int | None = None,
    reason: Reason | None = None,
) -> Entry:
    """End a claim in a final status."""
    status = after(transition, Status.IN_FLIGHT)
    done = status is Status.SUCCEEDED
    error = _short(result.error)
    error_code, code = (None, None) if done else (result.http_status, result.code)
    found = tx.rows(
        "settle",
        id=claimed.entry.id,
        number=claimed.number,
        status=status.value,
        server_id=server_id,
        synced_at=tx.now_text if done else None,
        error=error,
        error_code=error_code,
        code=code,
        reason=reason,
        ms=tx.ms,
    )
    if not found:
        raise _lost(claimed)
    _add_attempt(tx, claimed, transition, result)
    # A claimed entry is changed by its holder only, so it need not be read again.
    entry = claimed.entry
    return msgspec.structs.replace(
        entry,
        status=status,
        server_id=entry.server_id if server_id is None else server_id,
        synced_at=tx.now if done else None,
        last_error=error,
        last_error_code=error_code,
        last_code=code,
        reason=reason,
        outcome_unknown=False,
        next_retry_at=None,
    )


def _end_claim(
    tx: Transaction,
    claimed: Claimed,
    transition: Transition,
    result: AttemptResult,
    *,
    uncount: int = 0,
    in_history: bool = True,
    due_ms: int | None = None,
    next_retry_at: str | None = None,
    reason: Reason | None = None,
    outcome_unknown: bool | None = None,
    theirs: str | None = None,
    theirs_version: str | None = None,
    base: str | None = None,
    conflict_fields: str | None = None,
    keeps_version: bool = True,
) -> Entry:
    """End a claim in a status that is not final."""
    found = tx.rows(
        "end_claim",
        id=claimed.entry.id,
        number=claimed.number,
        status=after(transition, Status.IN_FLIGHT).value,
        uncount=uncount,
        due_ms=due_ms,
        next_retry_at=next_retry_at,
        error=_short(result.error),
        error_code=result.http_status,
        code=result.code,
        reason=reason,
        outcome_unknown=outcome_unknown,
        theirs=theirs,
        theirs_version=theirs_version,
        base=base,
        conflict_fields=conflict_fields,
        sent_version=(claimed.version or "")
        if keeps_version and _is_frozen(transition, result, unknown=bool(outcome_unknown))
        else None,
    )
    if not found:
        raise _lost(claimed)
    if in_history:
        _add_attempt(tx, claimed, transition, result)
    return entry_of(found[0])


def _is_frozen(transition: Transition, result: AttemptResult, *, unknown: bool) -> bool:
    """Return whether later sends must repeat the version of this one.

    After ``watchdog`` it is not known whether it was sent; the same version is derived again.
    """
    if transition is Transition.FAIL:
        return unknown
    was_sent = result.http_status is not None or (unknown and result.code in _SENT_UNHEARD)
    return was_sent and transition in (Transition.RETRY_LATER, Transition.CONFLICT)


def _add_attempt(
    tx: Transaction, claimed: Claimed, transition: Transition, result: AttemptResult
) -> None:
    tx.rows(
        "add_attempt",
        id=claimed.entry.id,
        now=tx.now_text,
        outcome=transition.value,
        http_status=result.http_status,
        code=result.code,
        request_id=result.request_id,
        error=_short(result.error),
    )


def _log_client_bug(tx: Transaction, entry: Entry) -> None:
    """Log a refusal that only a new version of the app can prevent."""
    cause = tx.cause_of(entry)
    if is_client_bug(cause):
        _log.error(
            "the server refuses entry %s, %s %s: %s (%s): the app has to be corrected",
            entry.id,
            entry.method,
            entry.endpoint.partition("?")[0],
            entry.last_code or entry.last_error_code,
            cause,
            extra={
                "entry_id": entry.id,
                "entity_type": entry.entity_type,
                "endpoint": entry.endpoint.partition("?")[0],
                "http_status": entry.last_error_code,
                "code": entry.last_code,
                "cause": cause,
            },
        )


def _pass_turn(tx: Transaction, entry: Entry) -> None:
    if entry.lane is not None:
        tx.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)


def _short(error: str | None) -> str | None:
    return None if error is None else error[:_MAX_ERROR_LENGTH]


def _lost(claimed: Claimed) -> ClaimLostError:
    return ClaimLostError(
        f"claim {claimed.number} of {claimed.entry.id} is over: its lease expired or it was ended"
    )
