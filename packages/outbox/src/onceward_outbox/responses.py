"""Meaning of a response to an entry: its outcome, after the reads that it takes to know that.

Everything that takes time, such as reading the server's side of a conflict, happens here, so that
the drain can record outcomes and claim the next entries in one short transaction.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple, TypeVar, assert_never
from urllib.parse import urlsplit

import msgspec

from onceward_outbox import conflicts
from onceward_outbox.backoff import (
    TOO_MANY,
    Backoff,
    is_outage,
    outage_result,
    path_template,
    result_of,
)
from onceward_outbox.claims import Violation, read_violation, requires_number
from onceward_outbox.conflicts import ConflictPlan, Merge
from onceward_outbox.drain_state import DrainState, Ended
from onceward_outbox.entry import Claimed, Entry, Reason, UnknownBase
from onceward_outbox.errors import UsageError
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
from onceward_outbox.profile import Profile
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.requests import correlation_headers, entity_path, without_correlation
from onceward_outbox.transport import NoResponse, Request, Response
from onceward_outbox.versions import produced_by, version_of
from onceward_protocol.effect import is_conclusive
from onceward_protocol.operation import Operation
from onceward_protocol.response_classification import (
    SILENT,
    UNREACHABLE,
    UNRECOGNISED,
    AttestationNeeded,
    Conflicting,
    Done,
    Misdirected,
    NotTheService,
    OutOfOrder,
    Refused,
    SignInNeeded,
    TooOld,
    TryLater,
    classify,
)
from onceward_protocol.retry import is_transient

_log = logging.getLogger(__name__)

_MAX_REBUILDS: Final = 3
_MAX_MERGES: Final = 5
"""How often one entry is rebuilt or merged in one wake-up before it is left to a person."""

_MAX_RENUMBERINGS: Final = 5
"""How often one entry gets another number in one wake-up without a delay."""

_OK: Final = 200
_UNAUTHORIZED: Final = 401
_SERVER_ERROR: Final = 500
_ABOUT_THE_KEY: Final = frozenset({409, 422})
_GONE: Final = frozenset({404, 410})
_MAX_INTEGER: Final = 2**63
_NOT_THE_SERVICE: Final = (
    "the response is not the service's: a sign-in page of the network, or a proxy"
)
_SIGN_IN: Final = "the server does not accept the token: sign in"
_NOT_SIGNED_IN: Final = "the server needs a token: sign in"

Token = str | Callable[[str], str | None] | None
"""A token, or a function that returns the token of a user at each send; None for none."""

AtSend = Callable[[Entry], Mapping[str, str]]
"""Returns headers that are made anew for each send of an entry, such as an attestation.

After the server has refused an attestation, ``entry.last_error_code`` is 401.
"""

_Result = TypeVar("_Result")
Reading = Generator[Request, Response | NoResponse, _Result]
"""Work that yields requests, is sent their responses, and returns something."""


class Send(NamedTuple):
    """One send of an entry, alone or in a batch."""

    claimed: Claimed
    state: DrainState
    # The token it is sent with; None for none.
    token: str | None

    @property
    def entry(self) -> Entry:
        return self.claimed.entry


class Responses:
    """Turns responses into outcomes, in one wake-up after another."""

    def __init__(
        self,
        queue: OutboxQueue,
        token: Token,
        *,
        origin: str | None,
        merge: Merge | None,
        at_send: AtSend | None,
        backoff: Backoff,
        chance: Callable[[], float],
    ) -> None:
        self._queue = queue
        self._token = token
        self._origin = origin
        self._merge = merge
        self._at_send = at_send
        self._backoff = backoff
        self._chance = chance
        self._last_date: str | None = None
        # By entry id, in this wake-up: rounds of conflict or rebuild.
        self._rounds: Counter[str] = Counter()
        self._refused_attestations: Counter[str] = Counter()
        self._renumberings: Counter[str] = Counter()
        # Entries whose last send had a second copy on another connection.
        self.repeated: set[str] = set()

    def reset(self) -> None:
        self._refused_attestations.clear()
        self._renumberings.clear()
        self._rounds.clear()

    def receive(self, send: Send, response: Response) -> Reading[Outcome]:
        """Return the outcome of an entry from its response, which may need further requests.

        The same for a response and for the result of an item of a batch.
        """
        entry = send.entry
        send.state.note_received(entry.id)
        self.emit_sent(entry, response)
        try:
            self.learn_time(send, response)
            return (yield from self._outcome(send, response))
        except GeneratorExit:
            raise
        except BaseException:
            # The app's functions again. Sent once more, the server gives the same response.
            result, unknown = result_of(response), entry.outcome_unknown
            outcome: Outcome = RetryLater(result=result, give_up=False, outcome_unknown=unknown)
            if response.status == _UNAUTHORIZED:
                outcome = self.released(send, response)
            self._queue.record(send.claimed, outcome)
            raise

    def released(self, send: Send, response: Response) -> Outcome:
        """Return the outcome of an entry that was sent with a token that is not accepted."""
        unknown = self._may_have_happened(send.entry)
        return Released(result_of(response), sent=True, outcome_unknown=unknown)

    def _outcome(  # noqa: C901, PLR0911, PLR0912 - one for each verdict
        self, send: Send, response: Response
    ) -> Reading[Outcome]:
        if is_outage(response):
            return self.outage([send], response)[0]
        claimed, entry, state = send.claimed, send.entry, send.state
        profile = self._profile_of(entry)
        recognised = _is_recognised(response, profile)
        if claimed.sequence is not None:
            violation = read_violation(response, claimed.sequence)
            if violation is not None:
                return self._renumber(send, response, violation)
        elif _may_need_number(entry, profile) and requires_number(response):
            return self._number(send, response)
        verdict = classify(
            response.status,
            response.code,
            entry,
            profile.codes,
            has_retry_after="retry-after" in response.headers,
            recognised=recognised,
        )
        state.note_verdict(verdict)
        if not isinstance(verdict, Misdirected | NotTheService):
            self._backoff.note_response(entry, state)
        match verdict:
            case Done():
                server_id = _server_id_in(entry, response)
                if server_id is None and entry.local_id and entry.operation is Operation.CREATE:
                    _log.warning(
                        "no id in the response: entries that refer to %s wait", entry.local_id
                    )
                return Succeeded(result_of(response), server_id, produced_by(response))
            case TryLater() if verdict.outcome_unknown or not self._backoff.had_unclear_422(entry):
                result = result_of(response, response.error_body)
                return self._backoff.retry_later(
                    entry,
                    result if recognised else result._replace(code=UNRECOGNISED),
                    outcome_unknown=verdict.outcome_unknown,
                    retry_after_seconds=self._backoff.retry_after(response),
                )
            case TryLater() | Refused():
                return Failed(
                    result_of(response, response.error_body),
                    outcome_unknown=entry.outcome_unknown and not _is_conclusive(response, profile),
                )
            case TooOld():
                return Expired(result_of(response, response.error_body))
            case Conflicting():
                return (yield from self._conflict(send, response))
            case OutOfOrder():
                return (yield from self._out_of_order(send, response))
            case SignInNeeded():
                return self.sign_in([send], response)[0]
            case AttestationNeeded():
                return self._attestation(entry, response)
            case Misdirected():
                return self._redirect(send, response)
            case NotTheService():
                return self.not_the_service([send], response)[0]
            case _:
                assert_never(verdict)

    # ------------------------------------------- responses to one entry, or to all of a batch

    def no_response(self, sends: Sequence[Send], failure: NoResponse) -> list[Outcome]:
        """Return the outcomes of entries whose request got no response.

        One that was not sent is an attempt of its first entry alone.
        """
        first, *rest = sends
        if not failure.may_have_been_sent:
            for each in rest:
                each.state.note_received(each.entry.id)
            unsent = Released(AttemptResult(error=failure.reason))
            return [self._not_sent(first, failure.reason), *(unsent for _ in rest)]
        # Silence about a batch says nothing about a single entry.
        code = SILENT if rest else self._backoff.silence_code(first.entry, first.state)
        is_alone = not self._backoff.count_silent_send(first.entry, first.state, failure.reason)
        # The server has responded to others meanwhile: only this connection was silent.
        delay = 0 if is_alone and not self._backoff.failed(first.entry) else None
        return self.retry_all(sends, AttemptResult(code=code, error=failure.reason), delay)

    def not_the_service(self, sends: Sequence[Send], response: Response) -> list[Outcome]:
        """Return the outcomes of entries whose request got a response of another."""
        first = sends[0]
        first.state.note_verdict(NotTheService())
        self._backoff.count_silent_send(first.entry, first.state, _NOT_THE_SERVICE)
        result = result_of(response, _NOT_THE_SERVICE)._replace(code=UNRECOGNISED)
        return self.retry_all(sends, result)

    def outage(self, sends: Sequence[Send], response: Response) -> list[Outcome]:
        """Send nothing to the server, or to the endpoints, for a while. No attempt is counted.

        It is not recorded under the key: a copy that a gateway has passed on may still happen.
        """
        sends[0].state.note_verdict(TryLater(outcome_unknown=True))
        by_path = {path_template(each.entry.endpoint): each for each in reversed(sends)}
        held = by_path.values() if response.status == TOO_MANY else sends[:1]
        seconds = max(self._backoff.hold(each.entry, response) for each in held)
        return self.retry_all(sends, outage_result(response), seconds, counts=False)

    def retry_all(
        self,
        sends: Sequence[Send],
        result: AttemptResult,
        delay_seconds: float | None = None,
        *,
        retry_after_seconds: float | None = None,
        counts: bool = True,
    ) -> list[Outcome]:
        """Return all entries of a request to the queue; what happened to them is unknown.

        Those of a batch have one delay, so that they are sent together again.
        """
        if delay_seconds is None and len(sends) > 1:
            delay_seconds = self._backoff.delay(sends[0].entry)
        outcomes: list[Outcome] = []
        for each in sends:
            each.state.note_received(each.entry.id)
            outcomes.append(
                self._backoff.retry_later(
                    each.entry,
                    result,
                    outcome_unknown=True,
                    delay_seconds=delay_seconds,
                    retry_after_seconds=retry_after_seconds,
                    counts=counts,
                )
            )
        return outcomes

    def sign_in(
        self, sends: Sequence[Send], response: Response | None = None, why: str | None = None
    ) -> list[Outcome]:
        """Release the entries, and continue only if there is another token.

        Tried once only: if a new token is rejected too, sign-in is needed. ``response`` is None if
        nothing was sent, because there is no token.
        """
        first, *rest = sends
        entry, state, token = first.entry, first.state, first.token
        why = why or (_NOT_SIGNED_IN if token is None else _SIGN_IN)
        for each in sends:
            state.note_received(each.entry.id)
        state.note_refused_token(token)
        again = bearer_token(self._token, entry.user_id)
        if again is None or again in state.refused_tokens or state.refusals > 1:
            state.end(Ended.SIGNED_OUT, why)
            self._queue.emit_about(EventKind.PAUSED, entry, detail=why)
        released = Released(AttemptResult(error=why))
        if response is not None:
            unknown = self._may_have_happened(entry)
            released = Released(result_of(response, why), sent=True, outcome_unknown=unknown)
        return [released, *(Released() for _ in rest)]

    def receive_again(self, send: Send, response: Response) -> Outcome:
        """Return the outcome of an item with the same 401 or outage as an earlier one of its batch.

        That one has paused the drain, or has begun the hold.
        """
        entry = send.entry
        send.state.note_received(entry.id)
        self.emit_sent(entry, response)
        if response.status == _UNAUTHORIZED:
            unknown = self._may_have_happened(entry)
            return Released(result_of(response, _SIGN_IN), sent=True, outcome_unknown=unknown)
        return RetryLater(
            result=outage_result(response),
            policy=self._backoff.policy(entry),
            give_up=False,
            outcome_unknown=True,
            # The hold delays it, as it does what was not sent.
            delay_seconds=0,
            retry_after_seconds=self._backoff.retry_after(response),
        )

    # ------------------------------------------------------------------ one entry

    def _may_have_happened(self, entry: Entry) -> bool:
        """Return whether an earlier send, or the other copy of this one, had no response."""
        return entry.outcome_unknown or entry.id in self.repeated

    def _not_sent(self, send: Send, reason: str) -> Outcome:
        """Wait for the network; the entry can be sent as soon as it is back."""
        send.state.hold(self._backoff.delay(send.entry), reason)
        return self._backoff.retry_later(
            send.entry,
            AttemptResult(code=UNREACHABLE, error=reason),
            outcome_unknown=self._may_have_happened(send.entry),
            delay_seconds=0,
        )

    def _redirect(self, send: Send, response: Response) -> Outcome:
        """Fail on a moved path, retry after a captive portal. Neither redirect is followed."""
        entry = send.entry
        where = response.headers.get("location", "")
        spelling = _other_spelling(where, self._origin, entity_path(entry, self._queue.mappings))
        unknown = self._may_have_happened(entry)
        if spelling is not None:
            why = f"use the path {spelling}: the server redirects ({response.status}) to {where}"
            return Failed(result_of(response, why), outcome_unknown=unknown)
        why = f"the response was a redirect ({response.status}), which is not followed"
        self._backoff.count_silent_send(entry, send.state, why)
        result = result_of(response, why)._replace(code=UNREACHABLE)
        return self._backoff.retry_later(entry, result, outcome_unknown=unknown)

    def _renumber(self, send: Send, response: Response, violation: Violation) -> Outcome:
        """Send the entry again with the number that the server asks for; wait if it goes on so."""
        entry = send.entry
        send.state.note_verdict(TryLater())
        self._backoff.note_response(entry, send.state)
        self._renumberings[entry.id] += 1
        is_delayed = self._renumberings[entry.id] > _MAX_RENUMBERINGS
        result = result_of(response, response.error_body)
        return Renumbered(result, violation, self._backoff.policy(entry), is_delayed)

    def _number(self, send: Send, response: Response) -> Outcome:
        """Send the entry again at once, with a number."""
        send.state.note_verdict(TryLater())
        self._backoff.note_response(send.entry, send.state)
        result = result_of(response, response.error_body)
        return NumberRequired(result, outcome_unknown=self._may_have_happened(send.entry))

    def _attestation(self, entry: Entry, response: Response) -> Outcome:
        """Ask the app for another attestation at once, and after that with growing delays.

        It is about this entry alone: others go on, and it never fails because of it.
        """
        why = "the server does not accept the attestation"
        self._queue.emit_about(EventKind.ATTESTATION, entry, detail=why)
        self._refused_attestations[entry.id] += 1
        refused, policy = self._refused_attestations[entry.id], self._backoff.policy(entry)
        at_once = refused == 1 and self._at_send is not None
        return RetryLater(
            result=result_of(response, why),
            policy=policy,
            give_up=False,
            outcome_unknown=self._may_have_happened(entry),
            delay_seconds=0 if at_once else policy.delay_seconds(refused, random=self._chance()),
            steps_aside=not at_once,
        )

    # ------------------------------------------------------------------ reads after a response

    def _conflict(self, send: Send, response: Response) -> Reading[Outcome]:
        queue, entry = self._queue, send.entry
        self._rounds[entry.id] += 1
        base = queue.base_of(send.claimed)
        read = None
        if entry.operation is not Operation.CREATE:
            read = yield from self._read(send, entity_path(entry, queue.mappings))
        plan = conflicts.plan_for(
            msgspec.structs.replace(entry, base=base),
            self._profile_of(entry),
            response,
            read,
            self._merge,
            may_merge=self._rounds[entry.id] <= _MAX_MERGES,
        )
        if isinstance(plan, Response | NoResponse):
            waits = isinstance(plan, Response) and (plan.status == _UNAUTHORIZED or is_outage(plan))
            if waits or not self._backoff.was_last(entry):
                why = "there is a conflict, and the server's side could not be read"
                return self._unreadable(send, response, plan, why)
            plan = ConflictPlan()  # a person decides without the server's side
        return Conflicted(result_of(response, response.error_body), plan, base)

    def _out_of_order(self, send: Send, response: Response) -> Reading[Outcome]:
        entry = send.entry
        recovery = self._profile_of(entry).recovery
        if recovery is not None:
            why = f"out of order: reading {recovery.path}"
            self._queue.emit_about(EventKind.PAUSED, entry, detail=why)
        self._rounds[entry.id] += 1
        if recovery is None or self._rounds[entry.id] > _MAX_REBUILDS:
            return Failed(result_of(response, response.error_body), reason=Reason.REBUILD)
        read = yield from self._read(send, recovery.path)
        if isinstance(read, NoResponse) or read.status != _OK:
            why = f"out of order, and {recovery.path} could not be read"
            return self._unreadable(send, response, read, why)
        return WrongOrder(result_of(response), recovery, read.json())

    def _unreadable(
        self, send: Send, response: Response, read: Response | NoResponse, why: str
    ) -> Outcome:
        """Retry the entry: its response is known, but the read that should follow failed."""
        result = result_of(response, why)
        if isinstance(read, NoResponse):
            return self._backoff.retry_later(send.entry, result, outcome_unknown=False)
        if read.status == _UNAUTHORIZED:
            return self.sign_in([send], read)[0]
        if is_outage(read):
            result = result._replace(code=UNREACHABLE)
        return self._retry_after_read(send.entry, read, result, outcome_unknown=False)

    def _retry_after_read(
        self, entry: Entry, read: Response, result: AttemptResult, *, outcome_unknown: bool
    ) -> Outcome:
        """Retry an entry because of the response to a read for it.

        An outage holds the server or the endpoint, and the entry for as long. Its own delay, which
        grows with each attempt, would keep its lane waiting long after the outage.
        """
        is_down = is_outage(read)
        return self._backoff.retry_later(
            entry,
            result,
            outcome_unknown=outcome_unknown,
            delay_seconds=self._backoff.hold(entry, read) if is_down else None,
            retry_after_seconds=self._backoff.retry_after(read),
            counts=not is_down,
        )

    # ------------------------------------------------------------------ reads before a send

    def before_send(self, send: Send) -> Reading[Outcome | None]:
        """Return an outcome instead of sending, after the reads that an entry may need; or None."""
        entry, queue = send.entry, self._queue
        if entry.outcome_unknown:
            unsent = (yield from self._ask_time(send)) if queue.has_gap() else None
            if unsent is None and queue.key_expired(entry):
                return KeyExpired()
            if unsent is not None:
                return unsent
        has_to_read = has_unknown_base(send.claimed, self._profile_of(entry))
        return (yield from self._read_base(send)) if has_to_read else None

    def _read_base(self, send: Send) -> Reading[Outcome | None]:
        """Read the entity before an edit that is based on no known version.

        None: send it, because the server has no versions, or no such entity.
        """
        entry = send.entry
        read = yield from self._read(send, entity_path(entry, self._queue.mappings))
        if isinstance(read, NoResponse):
            return self._no_response_to_read(send, read)
        if read.status == _UNAUTHORIZED:
            return self.sign_in([send], read)[0]
        if is_transient(read.status) or 300 <= read.status < 400:  # noqa: PLR2004
            why = f"the version to change could not be read ({read.status})"
            # Without the status: the entry itself was not sent, so no version is kept for it.
            result = AttemptResult(code=UNREACHABLE, error=why)
            unknown = entry.outcome_unknown
            return self._retry_after_read(entry, read, result, outcome_unknown=unknown)
        version = version_of(read) if read.status == _OK else None
        if version is None:
            return None
        if self._profile_of(entry).unknown_base is UnknownBase.READ:
            return Rebased(version, read.json())
        plan = ConflictPlan(theirs=read.json(), version=version)
        why = "it is not known which version this change was made on"
        return Conflicted(AttemptResult(error=why), plan)

    def _ask_time(self, send: Send) -> Reading[Outcome | None]:
        """Learn how long the device was off, from the ``Date`` of any response to a read."""
        entry = send.entry
        response = yield from self._read(send, entity_path(entry, self._queue.mappings))
        if isinstance(response, NoResponse):
            return self._no_response_to_read(send, response)
        self.learn_time(send, response)
        if is_outage(response):
            why = f"the server responded {response.status} to a read before the entry"
            result = AttemptResult(code=UNREACHABLE, error=why)
            return self._retry_after_read(entry, response, result, outcome_unknown=True)
        if not self._queue.has_gap() or not self._queue.key_may_be_expired(entry):
            return None
        why = "it is unknown how long the device was off"
        result = AttemptResult(code=UNREACHABLE, error=why)
        return self._backoff.retry_later(entry, result, outcome_unknown=True)

    def _no_response_to_read(self, send: Send, failure: NoResponse) -> Outcome:
        """Retry later without counting an attempt: the entry itself was not sent."""
        if not failure.may_have_been_sent:
            return self._not_sent(send, failure.reason)
        entry = send.entry
        self._backoff.count_silent_send(entry, send.state, failure.reason)
        result = AttemptResult(code=UNREACHABLE, error=failure.reason)
        return self._backoff.retry_later(entry, result, outcome_unknown=entry.outcome_unknown)

    def _read(self, send: Send, target: str) -> Reading[Response | NoResponse]:
        """Read from the server; the page of another is no response."""
        entry = send.entry
        read = yield Request("GET", target, self.headers(entry, send.token))
        if isinstance(read, NoResponse) or is_outage(read):
            return read
        recognised = _is_recognised(read, self._profile_of(entry))
        verdict = classify(read.status, read.code, entry, recognised=recognised)
        return NoResponse(_NOT_THE_SERVICE) if isinstance(verdict, NotTheService) else read

    # ------------------------------------------------------------------ helpers

    def headers(self, entry: Entry, token: str | None) -> dict[str, str]:
        """Return the headers that are made anew for each request about an entry."""
        headers = correlation_headers(entry)
        if self._at_send is not None:
            headers |= without_correlation(self._at_send(entry))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def learn_time(self, send: Send, response: Response) -> None:
        """Store the server's time when it has moved on by a second."""
        date = response.headers.get("date")
        if date is None or date == self._last_date:
            return
        if not _has_server_time(response, self._profile_of(send.entry)):
            return
        self._last_date = date
        try:
            now = parsedate_to_datetime(date)
        except (ValueError, OverflowError):
            return
        if now.tzinfo is not None and self._queue.learn_server_time(now):
            # Stale entries are expired before the next claim.
            send.state.has_aged = True

    def emit_sent(self, entry: Entry, response: Response) -> None:
        status, code = response.status, response.code
        kind = EventKind.SENT
        self._queue.emit_about(kind, entry, http_status=status, code=code, detail=str(status))

    def _profile_of(self, entry: Entry) -> Profile:
        return self._queue.profiles.get(entry.profile)


def has_unknown_base(claimed: Claimed, profile: Profile) -> bool:
    """Return whether the profile has a rule for an edit that is based on no known version."""
    entry = claimed.entry
    return (
        profile.unknown_base is not UnknownBase.FORCE
        and entry.operation is not Operation.CREATE
        and claimed.version is None
        and entry.sent_version is None
        and not entry.forced
        and not any(name.lower() == "if-match" for name in entry.headers)
    )


def bearer_token(token: Token, user_id: str) -> str | None:
    """Return the user's current token; None if they are not signed in."""
    found = token(user_id) if callable(token) else token
    if found is not None and not (found.isascii() and found.isprintable() and " " not in found):
        # Not shown: it was meant to be a secret.
        raise UsageError("token contains whitespace or non-ASCII characters")
    return found


def _may_need_number(entry: Entry, profile: Profile) -> bool:
    return profile.numbers_on_demand and profile.is_strict_endpoint(entry.endpoint)


# -- what a response says -------------------------------------------------------------------------


def _server_id_in(entry: Entry, response: Response) -> str | int | None:
    """Return the server's id of what was created; None for other operations."""
    if entry.operation is not Operation.CREATE:
        return None
    body = response.json()
    found = body.get("id") if isinstance(body, dict) else None
    if isinstance(found, bool) or not isinstance(found, str | int):
        return None
    # SQLite has no larger numbers; as text it is the same id in a path.
    is_large = isinstance(found, int) and not -_MAX_INTEGER <= found < _MAX_INTEGER
    return str(found) if is_large else found


def _is_recognised(response: Response, profile: Profile) -> bool:
    """Return whether this is a response of the service, not the page of a proxy or a portal."""
    return profile.recognise(response.status, response.headers, response.body)


def _is_conclusive(response: Response, profile: Profile) -> bool:
    """Return whether the server looked up the key before it refused, so no earlier send succeeded.

    A missing permission, a body that is too large or an unknown path are found before that, unless
    the server says otherwise.
    """
    if response.status in _GONE:
        return _is_recognised(response, profile)
    return response.status in _ABOUT_THE_KEY or is_conclusive(response.headers)


def _has_server_time(response: Response, profile: Profile) -> bool:
    """Return whether this is a response of the service, not of a proxy with its own clock."""
    if response.status >= _SERVER_ERROR or 300 <= response.status < 400:  # noqa: PLR2004
        return False
    return _is_recognised(response, profile)


def _other_spelling(location: str, origin: str | None, path: str) -> str | None:
    """Return the path if a redirect leads to the same one of the same server, spelt otherwise.

    Like ``path`` it has no prefix that the URL of the server has.
    """
    try:
        parts = urlsplit(location)
    except ValueError:
        return None
    if (parts.scheme or parts.netloc) and f"{parts.scheme}://{parts.netloc}".lower() != origin:
        return None
    target, asked = parts.path.rstrip("/"), path.rstrip("/")
    if not target.lower().endswith(asked.lower()):
        return None
    return parts.path[len(target) - len(asked) :]
