"""Complete claims: record the outcome of each, and what follows from it, in one transaction."""

import logging
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final, TypedDict, Unpack, assert_never

import msgspec
from msgspec import UNSET

from onceward_outbox import maintenance, resolution
from onceward_outbox.claims import (
    OUTCOME_UNKNOWN,
    acknowledge,
    begin_stream,
    claim_holder,
    has_ended,
    lost,
    renumber,
)
from onceward_outbox.conflicts import resolved_request
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
    awaited_local,
    created_by,
    entry_of,
    instant,
    json_text,
)
from onceward_outbox.errors import OutcomeUnknownError
from onceward_outbox.events import EventKind
from onceward_outbox.outcome import (
    AttemptResult,
    Conflicted,
    Expired,
    Failed,
    KeyExpired,
    NumberRequired,
    Outcome,
    Rebased,
    Released,
    Renumbered,
    RetryLater,
    Succeeded,
    WrongOrder,
)
from onceward_outbox.profile import ChainAction, Drop, Park, Send, is_client_bug
from onceward_outbox.resolution import Rewrite
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transaction import Transaction
from onceward_outbox.versions import record_read, record_success
from onceward_protocol.ids import new_uuid4
from onceward_protocol.response_classification import SILENT

_log = logging.getLogger(__name__)

ABANDONED: Final = "abandoned"
"""In the history, the code of a send that was not waited for. It may have happened."""

_SENT_UNHEARD: Final = frozenset({None, ABANDONED, SILENT})
"""In the history, the codes of sends without a response."""

_MAX_ERROR_LENGTH: Final = 8192
"""Characters stored of an error body: enough to see what was wrong."""

_MAX_DELAY_SECONDS: Final = 366 * 86_400.0
"""A longer Retry-After is shortened: dates further off do not fit everywhere."""

_FINAL: Final = frozenset({Reason.RESPONSE, Reason.REBUILD, Reason.DEPENDENCY})
"""Why an entry will not happen as it is. With other reasons it may have happened."""


class _Changes(TypedDict, total=False):
    """Changes at the end of a claim besides the status, by the parameters of ``end_claim``."""

    uncount: int
    due_ms: int | None
    next_retry_at: str | None
    reason: Reason | None
    outcome_unknown: bool | None
    theirs: str | None
    theirs_version: str | None
    base: str | None
    conflict_fields: str | None


_UNCHANGED: Final = _Changes(
    uncount=0,
    due_ms=None,
    next_retry_at=None,
    reason=None,
    outcome_unknown=None,
    theirs=None,
    theirs_version=None,
    base=None,
    conflict_fields=None,
)


def record(  # noqa: C901, PLR0911 - one for each outcome
    tx: Transaction,
    claimed: Claimed,
    outcome: Outcome,
    settings: QueueSettings,
    chance: Callable[[], float],
) -> Entry:
    """Record an outcome; returns the entry after that.

    ``ClaimLostError`` is raised before anything is changed.
    """
    match outcome:
        case Succeeded():
            return _succeed(tx, claimed, outcome)
        case RetryLater():
            return _retry_later(tx, claimed, outcome, chance())
        case Released():
            return _release(tx, claimed, outcome)
        case Failed():
            return _fail(tx, claimed, outcome)
        case Expired():
            return _expire(tx, claimed, outcome)
        case Conflicted():
            return _conflict(tx, claimed, outcome, settings)
        case Rebased():
            _release(tx, claimed, Released())
            record_read(tx, claimed.entry, outcome.version)
            base = None if outcome.base is UNSET else msgspec.json.encode(outcome.base).decode()
            return tx.changed("rebase", id=claimed.entry.id, base=base, version=outcome.version)
        case NumberRequired():
            entry = _release(tx, claimed, Released(outcome.result, True, outcome.outcome_unknown))
            begin_stream(tx, entry)
            return entry
        case Renumbered():
            return _renumber(tx, claimed, outcome, chance)
        case WrongOrder():
            return _rebuild(tx, claimed, outcome, settings)
        case KeyExpired():
            return _end_expired_key(tx, claimed, settings)
        case _:
            assert_never(outcome)


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


def map_local_id(
    tx: Transaction, user_id: str, local_id: str, server_id: str | int, *, entity_type: str
) -> None:
    """Record a mapping, and free what waits for it."""
    _map(tx, user_id, local_id, server_id, entity_type, None)
    free_dependents(tx, local=awaited_local(user_id, local_id))


# -- outcomes -------------------------------------------------------------------------------------


def _succeed(tx: Transaction, claimed: Claimed, outcome: Succeeded) -> Entry:
    """Record success, its version, map the local id, and free dependents and the lane."""
    result, server_id = outcome.result, outcome.server_id
    entry = _settle(tx, claimed, Transition.SUCCEED, result, server_id=server_id)
    record_success(tx, claimed, entry, outcome.produced)
    acknowledge(tx, claimed, result.http_status)
    local = None if server_id is None else created_by(entry)
    if local is not None:
        _map(tx, entry.user_id, entry.local_id, server_id, entry.entity_type, entry.id)
    free_dependents(tx, entry=entry.id, local=local)
    _pass_turn(tx, entry)
    tx.emit(EventKind.SUCCEEDED, entry, http_status=result.http_status, code=result.code)
    return entry


def _expire(tx: Transaction, claimed: Claimed, outcome: Expired) -> Entry:
    entry = _settle(tx, claimed, Transition.EXPIRE, outcome.result, reason=Reason.STALE)
    _pass_turn(tx, entry)
    tx.emit(EventKind.EXPIRED, entry)
    park_dependents(tx, entry)
    return entry


def _retry_later(tx: Transaction, claimed: Claimed, outcome: RetryLater, random: float) -> Entry:
    """Return the entry to the queue with a delay, or fail it after its last attempt."""
    attempt, result, policy = claimed.entry.attempt_count, outcome.result, outcome.policy
    if outcome.give_up and policy.gives_up_after(attempt, max_attempts=claimed.entry.max_attempts):
        return _fail(tx, claimed, Failed(result, Reason.ATTEMPTS, outcome.outcome_unknown))
    retry_after = outcome.retry_after_seconds
    if outcome.delay_seconds is None:
        seconds = policy.delay_seconds(
            max(attempt, 1), random=random, retry_after_seconds=retry_after
        )
    else:
        seconds = max(outcome.delay_seconds, retry_after or 0.0)
    seconds = min(seconds, _MAX_DELAY_SECONDS)
    entry = _end_claim(
        tx,
        claimed,
        Transition.RETRY_LATER,
        result,
        keeps_version=outcome.keeps_version,
        due_ms=tx.ms + int(seconds * 1000) if seconds > 0 else None,
        next_retry_at=instant(tx.now + timedelta(seconds=seconds)),
        outcome_unknown=outcome.outcome_unknown,
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
    return step_aside(tx, entry) if outcome.steps_aside else entry


def _release(tx: Transaction, claimed: Claimed, outcome: Released) -> Entry:
    """Return the entry to the queue as if it had not been claimed."""
    entry = _end_claim(
        tx,
        claimed,
        Transition.RELEASE,
        outcome.result,
        in_history=outcome.sent,
        uncount=1,
        outcome_unknown=True if outcome.outcome_unknown else None,
    )
    tx.emit(EventKind.RELEASED, entry, detail=outcome.result.error)
    return entry


def _fail(tx: Transaction, claimed: Claimed, outcome: Failed) -> Entry:
    """Make the entry ``failed`` and park its dependents."""
    reason = outcome.reason
    entry = _end_claim(
        tx,
        claimed,
        Transition.FAIL,
        outcome.result,
        reason=reason,
        outcome_unknown=outcome.outcome_unknown,
    )
    tx.emit(EventKind.FAILED, entry)
    _log_client_bug(tx, entry)
    is_final = reason in _FINAL and not entry.outcome_unknown
    if is_final and reason is Reason.RESPONSE:
        bind_chain(tx, entry)
    park_dependents(tx, entry)
    return leave_lane(tx, entry) if is_final or outcome.leaves_lane else entry


def _conflict(
    tx: Transaction, claimed: Claimed, outcome: Conflicted, settings: QueueSettings
) -> Entry:
    """Make the entry ``conflict`` and store the server's side; resolve it if the plan says how."""
    plan = outcome.plan
    own = resend_on_own(tx, claimed, outcome)
    if own is not None:
        return own
    entry = _end_claim(
        tx,
        claimed,
        Transition.CONFLICT,
        outcome.result,
        outcome_unknown=False,
        theirs=None if plan.theirs is UNSET else msgspec.json.encode(plan.theirs).decode(),
        theirs_version=plan.version,
        base=outcome.base,
        conflict_fields=json_text(list(plan.fields)),
    )
    record_read(tx, entry, plan.version)
    tx.emit(EventKind.CONFLICT, entry)
    if plan.how is None:
        if tx.rows("yield_turn_to_earlier", id=entry.id):
            _pass_turn(tx, entry)
        return entry
    # No person has seen the server's side: later edits are checked against it too.
    rewrite = resolved_request(entry, tx.profiles, plan.how, plan.payload)
    return resolution.resolve(tx, entry.id, plan.how, rewrite, settings, adopts=False)


def resend_on_own(tx: Transaction, claimed: Claimed, outcome: Conflicted) -> Entry | None:
    """Return an edit to the queue that conflicts only with other edits of this device.

    That happens if edits of one entity are in several lanes, and are sent at once. It has a new
    key, because the server may have stored its response. None for any other conflict, and for an
    edit that had failed while later ones of its lane succeeded.
    """
    entry, theirs_version = claimed.entry, outcome.plan.version
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
    _release(tx, claimed, Released(outcome.result, sent=True))
    return tx.changed("resend", id=entry.id, key=new_uuid4())


def _renumber(
    tx: Transaction, claimed: Claimed, outcome: Renumbered, chance: Callable[[], float]
) -> Entry:
    """Send it again with another number; if it may have happened, the stream goes on without it."""
    result, violation = outcome.result, outcome.violation
    if violation.number is None:
        noted = result._replace(error=OUTCOME_UNKNOWN)
        entry = _fail(tx, claimed, Failed(noted, Reason.UNKNOWN, True, leaves_lane=True))
        renumber(tx, claimed, violation)
        return entry
    if outcome.is_delayed:
        again = RetryLater(result=result, policy=outcome.policy, give_up=False)
        _retry_later(tx, claimed, again, chance())
    else:
        _release(tx, claimed, Released(result, sent=True))
    return renumber(tx, claimed, violation)


def _end_expired_key(tx: Transaction, claimed: Claimed, settings: QueueSettings) -> Entry:
    """Leave an entry that may have happened to a person, or expire it if it is too old."""
    entry_id = claimed.entry.id
    _release(tx, claimed, Released())
    maintenance.expire_stale(tx, claimed.entry.user_id, settings)
    entry = tx.entry(entry_id)
    if entry.status is not Status.PENDING:
        return entry
    return resolution.park(tx, entry_id, reason=Reason.UNKNOWN, error=maintenance.KEY_EXPIRED)


# -- recovery from an out-of-order response -------------------------------------------------------


def _rebuild(
    tx: Transaction, claimed: Claimed, outcome: WrongOrder, settings: QueueSettings
) -> Entry:
    """Carry out what the profile's recovery plans for the entry and the pending ones."""
    pending = tx.entries("pending_in_order", user_id=claimed.entry.user_id)
    actions = outcome.recovery.plan(claimed.entry, pending, outcome.state)
    planned = {action.entry.id: action for action in actions}
    own = planned.pop(claimed.entry.id, Send(claimed.entry))
    _end_rejected(tx, claimed, outcome.result, own, settings)
    _carry_out(tx, planned.values(), settings)
    return tx.entry(claimed.entry.id)


def _end_rejected(
    tx: Transaction,
    claimed: Claimed,
    result: AttemptResult,
    action: ChainAction,
    settings: QueueSettings,
) -> None:
    match action:
        case Send():
            noted = result._replace(error=f"the server responded {result.code}")
            _release(tx, claimed, Released(noted, sent=True))
            if action.endpoint is not None:
                # Forced: the server has just rejected this key, so it has not happened.
                _move(tx, claimed.entry.id, action.endpoint, settings, force=True)
        case Park():
            _fail(tx, claimed, Failed(result._replace(error=action.why), Reason.REBUILD))
        case Drop():
            noted = result._replace(error="already done on the server")
            _fail(tx, claimed, Failed(noted, Reason.REBUILD))
            resolution.discard(tx, claimed.entry.id, reason=Reason.REBUILD, with_dependents=False)
        case _:
            assert_never(action)


def _carry_out(tx: Transaction, actions: Iterable[ChainAction], settings: QueueSettings) -> None:
    for action in actions:
        entry_id = action.entry.id
        match action:
            case Drop():
                # Forced: even if it was sent without a response, the server has its effect.
                resolution.cancel(tx, entry_id, reason=Reason.REBUILD, force=True)
            case Park():
                resolution.park(tx, entry_id, reason=Reason.REBUILD, error=action.why)
            case Send(endpoint=str() as endpoint):
                try:
                    _move(tx, entry_id, endpoint, settings, force=False)
                except OutcomeUnknownError:
                    continue  # it may have happened: only the same request can find that out
            case Send():
                pass
            case _:
                assert_never(action)


def _move(
    tx: Transaction, entry_id: str, endpoint: str, settings: QueueSettings, *, force: bool
) -> None:
    rewrite = Rewrite(endpoint=endpoint)
    resolution.edit(tx, entry_id, rewrite, settings, depends_on=UNSET, force=force)


# -- the end of a claim ---------------------------------------------------------------------------


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
        raise lost(claimed)
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
    in_history: bool = True,
    keeps_version: bool = True,
    **changes: Unpack[_Changes],
) -> Entry:
    """End a claim in a status that is not final."""
    unknown = bool(changes.get("outcome_unknown"))
    is_frozen = keeps_version and _is_frozen(transition, result, unknown=unknown)
    found = tx.rows(
        "end_claim",
        **_UNCHANGED | changes,
        id=claimed.entry.id,
        number=claimed.number,
        status=after(transition, Status.IN_FLIGHT).value,
        error=_short(result.error),
        error_code=result.http_status,
        code=result.code,
        sent_version=(claimed.version or "") if is_frozen else None,
    )
    if not found:
        raise lost(claimed)
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


def _map(  # noqa: PLR0917 - the columns of a mapping
    tx: Transaction,
    user_id: str,
    local_id: str | None,
    server_id: str | int | None,
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


def _pass_turn(tx: Transaction, entry: Entry) -> None:
    if entry.lane is not None:
        tx.rows("pass_turn", user_id=entry.user_id, lane=entry.lane)


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


def _short(error: str | None) -> str | None:
    return None if error is None else error[:_MAX_ERROR_LENGTH]
