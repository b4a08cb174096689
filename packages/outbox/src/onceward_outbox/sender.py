"""Send an entry, and turn the response into an outcome for the drain.

The request is the same on every send, except for its submission time.

Everything that takes time, such as reading the server's side of a conflict, happens here, so that
the drain can record outcomes and claim the next entries in one short transaction.
"""

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from random import random
from typing import Final, TypeVar, assert_never

import msgspec

from onceward_outbox import conflicts
from onceward_outbox.attempts import Attempts, Retry
from onceward_outbox.completion import ABANDONED
from onceward_outbox.conflicts import ConflictPlan, Merge
from onceward_outbox.correlation import correlation_headers, without_correlation
from onceward_outbox.drain_state import DrainState, Ended
from onceward_outbox.entry import Claimed, Entry, Reason, UnknownBase
from onceward_outbox.entry_request import Mappings, build_request, entity_path
from onceward_outbox.errors import ClaimLostError, EntryInvalidError, UsageError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.outage import TOO_MANY, Outages, is_outage, path_template
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
from onceward_outbox.response_facts import (
    has_server_time,
    is_conclusive,
    is_recognised,
    other_spelling,
    outage_result,
    result_of,
    server_id_in,
)
from onceward_outbox.sequences import Violation, read_violation, requires_number
from onceward_outbox.transport import NoResponse, Request, Response, Transport
from onceward_outbox.versions import produced_by, version_of
from onceward_protocol.clock import Clock
from onceward_protocol.fault_points import SyncFaultPoints
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
from onceward_protocol.retry import is_transient, parse_retry_after

__all__ = ["AtSend", "Retry", "Sender", "Sending", "Token", "bearer_token", "build_request"]

_log = logging.getLogger(__name__)

_MAX_SILENT_SENDS: Final = 3
"""After this many consecutive sends without a response, the network counts as down."""

_MAX_REBUILDS: Final = 3
_MAX_MERGES: Final = 5
"""How often one entry is rebuilt or merged in one wake-up before it is left to a person."""

_MAX_RENUMBERINGS: Final = 5
"""How often one entry gets another number in one wake-up without a delay."""

_OK: Final = 200
_UNAUTHORIZED: Final = 401
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

Sending = Reading[Outcome]
"""The sending of one entry."""


class Sender:
    """Sends entries in one wake-up after another."""

    def __init__(
        self,
        queue: OutboxQueue,
        transport: Transport,
        token: Token,
        *,
        merge: Merge | None,
        at_send: AtSend | None,
        retry: Retry | None,
        clock: Clock,
        fault_points: SyncFaultPoints | None,
        outages: Outages,
        chance: Callable[[], float] = random,
    ) -> None:
        self._queue = queue
        self._transport = transport
        self._token = token
        self._merge = merge
        self._at_send = at_send
        self._clock = clock
        self._fault_points = fault_points
        self._chance = chance
        self._outages = outages
        self._last_date: str | None = None
        self.attempts = Attempts(queue, retry, clock, chance)
        # By entry id, in this wake-up: rounds of conflict or rebuild.
        self._rounds: Counter[str] = Counter()
        self._refused_attestations: Counter[str] = Counter()
        self._renumberings: Counter[str] = Counter()
        # Entries whose last send had a second copy on another connection.
        self._repeated: set[str] = set()

    def reset_attempts(self) -> None:
        """Begin a new wake-up."""
        self.attempts.reset()
        self._refused_attestations.clear()
        self._renumberings.clear()
        self._rounds.clear()

    def retry_position(self, claimed: Claimed, others: Iterable[Claimed]) -> int:
        """Return a random position among other claims for an entry that was sent before.

        A lane keeps its order. Random, because with a fixed position a network that loses every
        n-th response could lose this one each time, until the entry has no attempts left.
        """
        entry = claimed.entry
        first = last = 0
        for place, other in enumerate(others):
            if entry.lane is not None and other.entry.lane == entry.lane:
                if other.entry.sequence_number > entry.sequence_number:
                    break
                first = place + 1
            last = place + 1
        return first + int(self._chance() * (last - first + 1))

    def reach(self, point: str) -> None:
        """Pass a fault point."""
        if self._fault_points is not None:
            self._fault_points.reach(point)

    def send(  # noqa: C901 - each step ends the claim in its own way
        self, claimed: Claimed, state: DrainState
    ) -> Sending:
        """Send an entry: yields requests, is sent their responses, and returns the outcome.

        The caller does the HTTP, so that several entries can be sent at once; the queue and
        the app's functions are used on one thread. If a function of the app raises, the claim is
        ended here and the exception is passed on. Closed early, it leaves the claim as it is.
        """
        entry, queue = claimed.entry, self._queue
        profile = queue.profiles.get(entry.profile)
        try:
            token = bearer_token(self._token, entry.user_id)
            if token is None and callable(self._token):
                return self._sign_in(entry, state, token, "there is no token: sign in")
            request = self.request_of(claimed, token)
            unsent = None
            if entry.outcome_unknown:
                unsent = yield from self._check_key(entry, state, token)
            if unsent is None and _has_unknown_base(claimed, profile):
                unsent = yield from self._read_base(entry, profile, state, token)
        except EntryInvalidError as error:
            return Failed(AttemptResult(error=error.message), reason=Reason.DEPENDENCY)
        except GeneratorExit:
            raise
        except BaseException:
            # The app's functions may raise anything. Nothing was sent.
            with suppress(ClaimLostError):
                queue.record(claimed, Released())
            raise
        if unsent is not None:
            return unsent
        self._begin_send(entry, state)
        try:
            response = yield request
        except GeneratorExit:
            raise
        except BaseException:
            # It may have been sent: back into the queue, as if this process had died. Another
            # process may have claimed it since; the error must not hide the first one.
            with suppress(ClaimLostError):
                again = RetryLater(delay_seconds=0, give_up=False, outcome_unknown=True)
                queue.record(claimed, again)
            raise
        self.reach("drain.after_send")
        state.report.sent += 1
        if isinstance(response, NoResponse):
            queue.emit_about(EventKind.SENT, entry, detail=response.reason)
            return self._no_response(entry, state, response)
        return (yield from self.receive(claimed, state, response, token))

    def receive(
        self, claimed: Claimed, state: DrainState, response: Response, token: str | None
    ) -> Sending:
        """Return the outcome of an entry from its response, which may need further requests.

        The same for a response and for the result of an item of a batch.
        """
        entry, queue = claimed.entry, self._queue
        profile = queue.profiles.get(entry.profile)
        state.note_received(entry.id)
        self._emit_sent(entry, response)
        try:
            self._learn_time(response, profile, state)
            return (yield from self._outcome(claimed, state, response, token))
        except GeneratorExit:
            raise
        except BaseException:
            # The app's functions again. Sent once more, the server gives the same response.
            result = result_of(response)
            if response.status == _UNAUTHORIZED:
                unknown = self._may_have_happened(entry)
                queue.record(claimed, Released(result, sent=True, outcome_unknown=unknown))
            else:
                again = RetryLater(
                    result=result, give_up=False, outcome_unknown=entry.outcome_unknown
                )
                queue.record(claimed, again)
            raise

    def _outcome(  # noqa: C901, PLR0911, PLR0912 - one for each verdict
        self, claimed: Claimed, state: DrainState, response: Response, token: str | None
    ) -> Sending:
        entry = claimed.entry
        if is_outage(response):
            state.note_verdict(TryLater(outcome_unknown=True))
            return self._hold(entry, response)
        profile = self._queue.profiles.get(entry.profile)
        recognised = is_recognised(response, profile)
        if claimed.sequence is not None:
            violation = read_violation(response, claimed.sequence)
            if violation is not None:
                return self._renumber(entry, state, response, violation)
        elif _may_need_number(entry, profile) and requires_number(response):
            return self._number(entry, state, response)
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
            self._note_response(entry)
        match verdict:
            case Done():
                server_id = server_id_in(entry, response)
                if server_id is None and entry.local_id and entry.operation is Operation.CREATE:
                    _log.warning(
                        "no id in the response: entries that refer to %s wait", entry.local_id
                    )
                return Succeeded(result_of(response), server_id, produced_by(response))
            case TryLater() if verdict.outcome_unknown or not self.attempts.had_unclear_422(entry):
                result = result_of(response, response.error_body)
                return self.attempts.retry_later(
                    entry,
                    result if recognised else result._replace(code=UNRECOGNISED),
                    outcome_unknown=verdict.outcome_unknown,
                    retry_after_seconds=self._retry_after(response),
                )
            case TryLater() | Refused():
                return Failed(
                    result_of(response, response.error_body),
                    outcome_unknown=entry.outcome_unknown and not is_conclusive(response, profile),
                )
            case TooOld():
                return Expired(result_of(response, response.error_body))
            case Conflicting():
                return (yield from self._conflict(claimed, state, response, token))
            case OutOfOrder():
                return (yield from self._out_of_order(entry, state, response, token))
            case SignInNeeded():
                return self._sign_in(entry, state, token, _refusal_of(token), response)
            case AttestationNeeded():
                return self._attestation(entry, response)
            case Misdirected():
                return self._redirect(entry, state, response)
            case NotTheService():
                self._count_silent_send(entry, state, _NOT_THE_SERVICE)
                result = result_of(response, _NOT_THE_SERVICE)._replace(code=UNRECOGNISED)
                return self.attempts.retry_later(entry, result, outcome_unknown=True)
            case _:
                assert_never(verdict)

    # ------------------------------------------------------------------ retries

    def request_of(
        self,
        claimed: Claimed,
        token: str | None,
        *,
        mappings: Mappings | None = None,
    ) -> Request:
        """Return the request of an entry: the same on every send, alone or in a batch.

        ``mappings`` returns the server ids of local ids; by default those that are stored. Raises
        ``EntryInvalidError``, and what the app's ``at_send`` raises.
        """
        entry, queue = claimed.entry, self._queue
        return build_request(
            entry,
            queue.profiles.get(entry.profile),
            mappings or queue.mappings,
            now=queue.server_now,
            extra=self._headers(entry, token),
            version=claimed.version,
            sequence=claimed.sequence,
        )

    def token_of(self, user_id: str) -> tuple[str | None, bool]:
        """Return the user's current token, and whether they are signed in."""
        token = bearer_token(self._token, user_id)
        return token, token is not None or not callable(self._token)

    def has_to_read(self, claimed: Claimed) -> bool:
        """Return whether something has to be read, or checked, before an entry is sent."""
        entry, queue = claimed.entry, self._queue
        if entry.outcome_unknown and (queue.has_gap() or queue.key_expired(entry)):
            return True
        return _has_unknown_base(claimed, queue.profiles.get(entry.profile))

    def repeat(self, claimed: Claimed) -> Request | None:
        """Return the request of an entry once more, for a second connection; None without a token.

        The key and the body are the same.
        """
        entry = claimed.entry
        token = bearer_token(self._token, entry.user_id)
        if token is None and callable(self._token):
            return None
        request = self.request_of(claimed, token)
        self._repeated.add(entry.id)
        return request

    def _begin_send(self, entry: Entry, state: DrainState) -> None:
        self.reach("drain.before_send")
        self._repeated.discard(entry.id)
        state.note_sent(entry.id)

    def _may_have_happened(self, entry: Entry) -> bool:
        """Return whether an earlier send, or the other copy of this one, had no response."""
        return entry.outcome_unknown or entry.id in self._repeated

    def abandon(self, claimed: Claimed) -> Outcome:
        """Return the outcome of an entry whose response the drain has no time to wait for."""
        return RetryLater(
            result=AttemptResult(code=ABANDONED, error="no response: the time of the drain was up"),
            policy=self.attempts.policy(claimed.entry),
            give_up=False,
            outcome_unknown=True,
            delay_seconds=0,
        )

    # ------------------------------------------------------------------ batches as a whole

    def begin_batch(self, claims: Iterable[Claimed], state: DrainState) -> None:
        """Note that the send of a batch begins."""
        self.reach("drain.before_send")
        for claimed in claims:
            self._repeated.discard(claimed.entry.id)
            state.note_sent(claimed.entry.id)

    def no_response_to_batch(
        self, claims: Sequence[Claimed], state: DrainState, failure: NoResponse
    ) -> list[Outcome]:
        """Return the outcomes of entries whose batch got no response.

        One that was not sent is an attempt of its first entry alone.
        """
        first, *rest = claims
        if not failure.may_have_been_sent:
            unsent = Released(AttemptResult(error=failure.reason), sent=False)
            for claimed in rest:
                state.note_received(claimed.entry.id)
            return [self._not_sent(first.entry, state, failure.reason), *(unsent for _ in rest)]
        is_alone = not self._count_silent_send(first.entry, state, failure.reason)
        may_hurry = is_alone and not self.attempts.failed(first.entry)
        # It says nothing about a single entry.
        result = AttemptResult(code=SILENT, error=failure.reason)
        return self.retry_batch(claims, state, result, delay_seconds=0 if may_hurry else None)

    def foreign_response_to_batch(
        self, claims: Sequence[Claimed], state: DrainState, response: Response
    ) -> list[Outcome]:
        """Return the outcomes of entries whose batch got a response that is not the service's."""
        state.note_verdict(NotTheService())
        self._count_silent_send(claims[0].entry, state, _NOT_THE_SERVICE)
        result = result_of(response, _NOT_THE_SERVICE)._replace(code=UNRECOGNISED)
        return self.retry_batch(claims, state, result)

    def outage_of_batch(
        self, claims: Sequence[Claimed], state: DrainState, response: Response
    ) -> list[Outcome]:
        """Hold the server, or all endpoints of a batch, after an outage's response to it."""
        state.note_verdict(TryLater(outcome_unknown=True))
        by_path = {path_template(claimed.entry.endpoint): claimed for claimed in reversed(claims)}
        held = by_path.values() if response.status == TOO_MANY else claims[:1]
        seconds = max(self._begin_hold(claimed.entry, response) for claimed in held)
        result = outage_result(response)
        return self.retry_batch(claims, state, result, delay_seconds=seconds, counts=False)

    def retry_batch(
        self,
        claims: Sequence[Claimed],
        state: DrainState,
        result: AttemptResult,
        *,
        delay_seconds: float | None = None,
        retry_after_seconds: float | None = None,
        counts: bool = True,
    ) -> list[Outcome]:
        """Return all entries of a batch to the queue; what happened to them is unknown.

        They have one delay, so that they are sent together again.
        """
        if delay_seconds is None:
            delay_seconds = self.attempts.delay(claims[0].entry)
        outcomes: list[Outcome] = []
        for claimed in claims:
            state.note_received(claimed.entry.id)
            outcomes.append(
                self.attempts.retry_later(
                    claimed.entry,
                    result,
                    outcome_unknown=True,
                    delay_seconds=delay_seconds,
                    retry_after_seconds=retry_after_seconds,
                    counts=counts,
                )
            )
        return outcomes

    def sign_in_for_batch(
        self, claims: Sequence[Claimed], state: DrainState, response: Response, token: str | None
    ) -> list[Outcome]:
        """Pause, because the server does not accept the token of a batch."""
        state.note_verdict(SignInNeeded())
        first, *rest = claims
        for claimed in claims:
            state.note_received(claimed.entry.id)
        outcome = self._sign_in(first.entry, state, token, _refusal_of(token), response)
        return [outcome, *(Released(AttemptResult(), sent=False) for _ in rest)]

    def receive_again(self, claimed: Claimed, state: DrainState, response: Response) -> Outcome:
        """Return the outcome of an item with the same 401 or outage as an earlier one of its batch.

        That one has paused the drain, or has begun the hold.
        """
        entry = claimed.entry
        state.note_received(entry.id)
        self._emit_sent(entry, response)
        if response.status == _UNAUTHORIZED:
            unknown = self._may_have_happened(entry)
            return Released(result_of(response, _SIGN_IN), sent=True, outcome_unknown=unknown)
        return RetryLater(
            result=outage_result(response),
            policy=self.attempts.policy(entry),
            give_up=False,
            outcome_unknown=True,
            # The hold delays it, as it does what was not sent.
            delay_seconds=0,
            retry_after_seconds=self._retry_after(response),
        )

    def retry_after_of(self, response: Response) -> float | None:
        """Return the seconds of ``Retry-After``; None without one."""
        return self._retry_after(response)

    def learn_time_of(self, response: Response, entry: Entry, state: DrainState) -> None:
        """Learn the server's time from the response to a batch with this entry."""
        self._learn_time(response, self._queue.profiles.get(entry.profile), state)

    def _emit_sent(self, entry: Entry, response: Response) -> None:
        self._queue.emit_about(
            EventKind.SENT,
            entry,
            http_status=response.status,
            code=response.code,
            detail=str(response.status),
        )

    # ------------------------------------------------------------------ outages

    def _hold(self, entry: Entry, response: Response) -> Outcome:
        """Send nothing to the server, or the endpoint, for a while. No attempt is counted."""
        policy = self.attempts.policy(entry)
        seconds = self._begin_hold(entry, response)
        return RetryLater(
            result=outage_result(response),
            policy=policy,
            give_up=False,
            # Not recorded under the key: a copy that a gateway has passed on may still happen.
            outcome_unknown=True,
            delay_seconds=seconds,
        )

    def _retry_after_read(
        self, entry: Entry, read: Response, result: AttemptResult, *, outcome_unknown: bool
    ) -> Outcome:
        """Retry an entry because of the response to a read for it.

        An outage holds the server or the endpoint, and the entry for as long. Its own delay, which
        grows with each attempt, would keep its lane waiting long after the outage.
        """
        is_down = is_outage(read)
        return self.attempts.retry_later(
            entry,
            result,
            outcome_unknown=outcome_unknown,
            delay_seconds=self._begin_hold(entry, read) if is_down else None,
            retry_after_seconds=self._retry_after(read),
            counts=not is_down,
        )

    def _begin_hold(self, entry: Entry, response: Response) -> float:
        """Note an outage; returns how long this entry should wait."""
        policy, ceiling = self.attempts.policy(entry), self._queue.settings.max_probe_seconds
        retry_after = self._retry_after(response)

        def delay(failures: int) -> float:
            return min(policy.delay_seconds(failures, random=self._chance()), ceiling)

        outages = self._outages
        seconds, is_new = outages.begin(
            entry.id, entry.endpoint, response, delay=delay, retry_after_seconds=retry_after
        )
        if is_new:
            what = path_template(entry.endpoint) if response.status == TOO_MANY else "the server"
            self._emit_outage(
                EventKind.HELD, f"{response.status}: nothing is sent to {what}", response, seconds
            )
        return seconds

    def _resume(self, entry: Entry) -> None:
        """Note that the server responds, and end the holds that this disproves."""
        for key in self._outages.end(entry.id, entry.endpoint):
            self._emit_outage(EventKind.RESUMED, f"{key or 'the server'} responds again")

    def _emit_outage(
        self,
        kind: EventKind,
        detail: str,
        response: Response | None = None,
        seconds: float | None = None,
    ) -> None:
        self._queue.emit(
            Event(
                kind=kind,
                at=self._clock.now(),
                http_status=None if response is None else response.status,
                delay_seconds=seconds,
                detail=detail,
            )
        )

    def _not_sent(self, entry: Entry, state: DrainState, reason: str) -> Outcome:
        """Wait for the network; the entry can be sent as soon as it is back."""
        state.hold(self.attempts.delay(entry), reason)
        return self.attempts.retry_later(
            entry,
            AttemptResult(code=UNREACHABLE, error=reason),
            outcome_unknown=self._may_have_happened(entry),
            delay_seconds=0,
        )

    def _no_response(self, entry: Entry, state: DrainState, failure: NoResponse) -> Outcome:
        if not failure.may_have_been_sent:
            return self._not_sent(entry, state, failure.reason)
        code = self.attempts.silence_code(entry, state)
        is_alone = not self._count_silent_send(entry, state, failure.reason)
        return self.attempts.retry_later(
            entry,
            AttemptResult(code=code, error=failure.reason),
            outcome_unknown=True,
            # The server has responded to others meanwhile: only this connection was silent.
            delay_seconds=0 if is_alone and not self.attempts.failed(entry) else None,
        )

    def _no_response_to_read(self, entry: Entry, state: DrainState, failure: NoResponse) -> Outcome:
        """Retry later without counting an attempt: the entry itself was not sent."""
        if not failure.may_have_been_sent:
            return self._not_sent(entry, state, failure.reason)
        self._count_silent_send(entry, state, failure.reason)
        return self.attempts.retry_later(
            entry,
            AttemptResult(code=UNREACHABLE, error=failure.reason),
            outcome_unknown=entry.outcome_unknown,
        )

    def _redirect(self, entry: Entry, state: DrainState, response: Response) -> Outcome:
        """Fail on a moved path, retry after a captive portal. Neither redirect is followed."""
        where = response.headers.get("location", "")
        path = entity_path(entry, self._queue.mappings)
        spelling = other_spelling(where, getattr(self._transport, "origin", None), path)
        if spelling is not None:
            why = f"use the path {spelling}: the server redirects ({response.status}) to {where}"
            return Failed(result_of(response, why), outcome_unknown=self._may_have_happened(entry))
        why = f"the response was a redirect ({response.status}), which is not followed"
        self._count_silent_send(entry, state, why)
        return self.attempts.retry_later(
            entry,
            result_of(response, why)._replace(code=UNREACHABLE),
            outcome_unknown=self._may_have_happened(entry),
        )

    def _count_silent_send(self, entry: Entry, state: DrainState, why: str) -> bool:
        """Hold the drain after some; returns False if another response came meanwhile."""
        if not state.count_silent_send(entry.id):
            return False
        if state.silent_sends >= _MAX_SILENT_SENDS:
            state.hold(self.attempts.delay(entry), why)
        return True

    def _retry_after(self, response: Response) -> float | None:
        value = response.headers.get("retry-after")
        return None if value is None else parse_retry_after(value, self._queue.server_now())

    # ------------------------------------------------------ responses that need a follow-up request

    def _sign_in(
        self,
        entry: Entry,
        state: DrainState,
        token: str | None,
        why: str,
        response: Response | None = None,
    ) -> Outcome:
        """Release the entry, and continue only if there is another token.

        Tried once only: if a new token is rejected too, sign-in is needed.
        """
        state.note_refused_token(token)
        again = bearer_token(self._token, entry.user_id)
        if again is None or again in state.refused_tokens or state.refusals > 1:
            state.end(Ended.SIGNED_OUT, why)
            self._emit(EventKind.PAUSED, entry, why)
        if response is None:
            return Released(AttemptResult(error=why), sent=False)
        unknown = self._may_have_happened(entry)
        return Released(result_of(response, why), sent=True, outcome_unknown=unknown)

    def _renumber(
        self, entry: Entry, state: DrainState, response: Response, violation: Violation
    ) -> Outcome:
        """Send the entry again with the number that the server asks for; wait if it goes on so."""
        state.note_verdict(TryLater())
        self._note_response(entry)
        self._renumberings[entry.id] += 1
        is_delayed = self._renumberings[entry.id] > _MAX_RENUMBERINGS
        return Renumbered(
            result_of(response, response.error_body),
            violation,
            self.attempts.policy(entry),
            is_delayed,
        )

    def _number(self, entry: Entry, state: DrainState, response: Response) -> Outcome:
        """Send the entry again at once, with a number."""
        state.note_verdict(TryLater())
        self._note_response(entry)
        return NumberRequired(
            result_of(response, response.error_body), outcome_unknown=self._may_have_happened(entry)
        )

    def _note_response(self, entry: Entry) -> None:
        """Note that the service responds."""
        self._resume(entry)
        self.attempts.note_response(entry)

    def _attestation(self, entry: Entry, response: Response) -> Outcome:
        """Ask the app for another attestation at once, and after that with growing delays.

        It is about this entry alone: others go on, and it never fails because of it.
        """
        why = "the server does not accept the attestation"
        self._emit(EventKind.ATTESTATION, entry, why)
        self._refused_attestations[entry.id] += 1
        refused, policy = self._refused_attestations[entry.id], self.attempts.policy(entry)
        at_once = refused == 1 and self._at_send is not None
        return RetryLater(
            result=result_of(response, why),
            policy=policy,
            give_up=False,
            outcome_unknown=self._may_have_happened(entry),
            delay_seconds=0 if at_once else policy.delay_seconds(refused, random=self._chance()),
            steps_aside=not at_once,
        )

    def _conflict(
        self, claimed: Claimed, state: DrainState, response: Response, token: str | None
    ) -> Sending:
        queue, entry = self._queue, claimed.entry
        self._rounds[entry.id] += 1
        base = queue.base_of(claimed)
        read = None
        if entry.operation is not Operation.CREATE:
            read = yield from self._read(entity_path(entry, queue.mappings), entry, token)
        plan = conflicts.plan_for(
            msgspec.structs.replace(entry, base=base),
            queue.profiles.get(entry.profile),
            response,
            read,
            self._merge,
            may_merge=self._rounds[entry.id] <= _MAX_MERGES,
        )
        if isinstance(plan, Response | NoResponse):
            waits = isinstance(plan, Response) and (plan.status == _UNAUTHORIZED or is_outage(plan))
            if waits or not self.attempts.was_last(entry):
                why = "there is a conflict, and the server's side could not be read"
                return self._unreadable(entry, state, (response, plan), token, why)
            plan = ConflictPlan()  # a person decides without the server's side
        return Conflicted(result_of(response, response.error_body), plan, base)

    def _read_base(
        self, entry: Entry, profile: Profile, state: DrainState, token: str | None
    ) -> Reading[Outcome | None]:
        """Read the entity before an edit that is based on no known version.

        None: send it, because the server has no versions, or no such entity.
        """
        read = yield from self._read(entity_path(entry, self._queue.mappings), entry, token)
        if isinstance(read, NoResponse):
            return self._no_response_to_read(entry, state, read)
        if read.status == _UNAUTHORIZED:
            return self._sign_in(entry, state, token, _refusal_of(token), read)
        if is_transient(read.status) or 300 <= read.status < 400:  # noqa: PLR2004
            why = f"the version to change could not be read ({read.status})"
            # Without the status: the entry itself was not sent, so no version is kept for it.
            result = AttemptResult(code=UNREACHABLE, error=why)
            unknown = entry.outcome_unknown
            return self._retry_after_read(entry, read, result, outcome_unknown=unknown)
        version = version_of(read) if read.status == _OK else None
        if version is None:
            return None
        if profile.unknown_base is UnknownBase.READ:
            return Rebased(version, read.json())
        plan = ConflictPlan(theirs=read.json(), version=version)
        why = "it is not known which version this change was made on"
        return Conflicted(AttemptResult(error=why), plan)

    def _out_of_order(
        self, entry: Entry, state: DrainState, response: Response, token: str | None
    ) -> Sending:
        recovery = self._queue.profiles.get(entry.profile).recovery
        if recovery is not None:
            self._emit(EventKind.PAUSED, entry, f"out of order: reading {recovery.path}")
        self._rounds[entry.id] += 1
        if recovery is None or self._rounds[entry.id] > _MAX_REBUILDS:
            return Failed(result_of(response, response.error_body), reason=Reason.REBUILD)
        read = yield from self._read(recovery.path, entry, token)
        if isinstance(read, NoResponse) or read.status != _OK:
            why = f"out of order, and {recovery.path} could not be read"
            return self._unreadable(entry, state, (response, read), token, why)
        return WrongOrder(result_of(response), recovery, read.json())

    def _unreadable(
        self,
        entry: Entry,
        state: DrainState,
        responses: tuple[Response, Response | NoResponse],
        token: str | None,
        why: str,
    ) -> Outcome:
        """Retry the entry: its response is known, but the read that should follow failed."""
        response, read = responses
        result = result_of(response, why)
        if isinstance(read, NoResponse):
            return self.attempts.retry_later(entry, result, outcome_unknown=False)
        if read.status == _UNAUTHORIZED:
            return self._sign_in(entry, state, token, _refusal_of(token), read)
        if is_outage(read):
            result = result._replace(code=UNREACHABLE)
        return self._retry_after_read(entry, read, result, outcome_unknown=False)

    # ------------------------------------------------------------------ expired keys

    def _check_key(
        self, entry: Entry, state: DrainState, token: str | None
    ) -> Reading[Outcome | None]:
        """Return an outcome instead of sending if the server may have expired the key."""
        queue = self._queue
        unsent = (yield from self._ask_time(entry, state, token)) if queue.has_gap() else None
        if unsent is None and queue.key_expired(entry):
            return KeyExpired()
        return unsent

    def _ask_time(
        self, entry: Entry, state: DrainState, token: str | None
    ) -> Reading[Outcome | None]:
        """Learn how long the device was off, from the ``Date`` of any response to a read."""
        response = yield from self._read(entity_path(entry, self._queue.mappings), entry, token)
        if isinstance(response, NoResponse):
            return self._no_response_to_read(entry, state, response)
        self._learn_time(response, self._queue.profiles.get(entry.profile), state)
        if is_outage(response):
            why = f"the server responded {response.status} to a read before the entry"
            result = AttemptResult(code=UNREACHABLE, error=why)
            return self._retry_after_read(entry, response, result, outcome_unknown=True)
        if not self._queue.has_gap() or not self._queue.key_may_be_expired(entry):
            return None
        why = "it is unknown how long the device was off"
        return self.attempts.retry_later(
            entry, AttemptResult(code=UNREACHABLE, error=why), outcome_unknown=True
        )

    # ------------------------------------------------------------------ helpers

    def _read(self, target: str, entry: Entry, token: str | None) -> Reading[Response | NoResponse]:
        """Read from the server; the page of another is no response."""
        read = yield Request("GET", target, self._headers(entry, token))
        if isinstance(read, NoResponse):
            return read
        if is_outage(read):
            return read
        recognised = is_recognised(read, self._queue.profiles.get(entry.profile))
        verdict = classify(read.status, read.code, entry, recognised=recognised)
        return NoResponse(_NOT_THE_SERVICE) if isinstance(verdict, NotTheService) else read

    def _headers(self, entry: Entry, token: str | None) -> dict[str, str]:
        headers = correlation_headers(entry)
        if self._at_send is not None:
            headers |= without_correlation(self._at_send(entry))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _learn_time(self, response: Response, profile: Profile, state: DrainState) -> None:
        """Store the server's time when it has moved on by a second."""
        date = response.headers.get("date")
        if date is None or date == self._last_date or not has_server_time(response, profile):
            return
        self._last_date = date
        try:
            now = parsedate_to_datetime(date)
        except (ValueError, OverflowError):
            return
        if now.tzinfo is not None and self._queue.learn_server_time(now):
            state.note_missed_time()

    def _emit(self, kind: EventKind, entry: Entry, detail: str) -> None:
        self._queue.emit_about(kind, entry, detail=detail)


# -- before a send ---------------------------------------------------------------------------------


def _has_unknown_base(claimed: Claimed, profile: Profile) -> bool:
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


def _may_need_number(entry: Entry, profile: Profile) -> bool:
    return profile.numbers_on_demand and profile.is_strict_endpoint(entry.endpoint)


def bearer_token(token: Token, user_id: str) -> str | None:
    """Return the user's current token; None if they are not signed in."""
    found = token(user_id) if callable(token) else token
    if found is not None and not (found.isascii() and found.isprintable() and " " not in found):
        # Not shown: it was meant to be a secret.
        raise UsageError("token contains whitespace or non-ASCII characters")
    return found


def _refusal_of(token: str | None) -> str:
    return _NOT_SIGNED_IN if token is None else _SIGN_IN
