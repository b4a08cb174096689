"""Send entries, alone or several in one request, and turn responses into outcomes for the drain.

::

    claims ──▶ assemble ──▶ one request ──▶ a response each ──▶ Responses.receive ──▶ outcomes
                  │              │
                  │              └─ not sent, silent, unknown, or to be sent alone
                  └─ what has to go alone: a request with one entry, whose response is its result

The request of an entry is the same on every send, except for its submission time.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from random import random
from typing import Final, NamedTuple, TypedDict, Unpack

import msgspec

from onceward_outbox.backoff import (
    SERVER,
    TOO_MANY,
    Backoff,
    Outages,
    Retry,
    is_outage,
    path_template,
)
from onceward_outbox.batch_offer import Batches
from onceward_outbox.completion import ABANDONED
from onceward_outbox.conflicts import Merge
from onceward_outbox.drain_state import DrainState
from onceward_outbox.entry import Claimed, Entry, Reason
from onceward_outbox.errors import ClaimLostError, EntryInvalidError
from onceward_outbox.events import EventKind
from onceward_outbox.outcome import AttemptResult, Failed, Outcome, Released, RetryLater
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.requests import (
    BatchMaker,
    BatchRequest,
    Mappings,
    Part,
    build_request,
    read_results,
    sendable,
)
from onceward_outbox.responses import (
    AtSend,
    Reading,
    Responses,
    Send,
    Token,
    bearer_token,
    has_unknown_base,
)
from onceward_outbox.transport import NoResponse, Request, Response, Transport
from onceward_protocol.clock import Clock
from onceward_protocol.fault_points import SyncFaultPoints
from onceward_protocol.response_classification import UNRECOGNISED, AttestationNeeded, SignInNeeded
from onceward_protocol.retry import is_transient

_log = logging.getLogger(__name__)

_SKIPPED: Final = frozenset({"batch.skipped", "BATCH_SKIPPED"})
_IN_PROGRESS: Final = frozenset({"idempotency.in_progress", "IDEMPOTENCY_IN_PROGRESS"})
_OK, _BAD_REQUEST, _UNAUTHORIZED, _TOO_LARGE, _SKIPPED_STATUS = 200, 400, 401, 413, 424
_SERVER_ERROR: Final = 500
_TO_READ: Final = frozenset({409, 412, 428})
_MISSING: Final = frozenset({404, 405})


class SenderOptions(TypedDict, total=False):
    """How the app takes part in sends."""

    # Decides conflicts of entries whose strategy is ``merge``.
    merge: Merge | None
    # Returns headers that are made anew at each send.
    at_send: AtSend | None
    # One policy, or a function of the profile, in place of the profile's own.
    retry: Retry | None
    # Where a test may interrupt a send.
    fault_points: SyncFaultPoints | None


class Assembled(NamedTuple):
    """A batch made of some claims."""

    # None if fewer than two entries could be in it.
    batch: BatchRequest | None
    # Claims that have to be sent alone, and could be now.
    alone: list[Claimed]
    # Claims that wait for others that are not in the batch, or did not fit.
    left: list[Claimed]


class Received(NamedTuple):
    """Result of a request with several entries."""

    # For each entry its response, or its outcome if it has none.
    results: list[tuple[Claimed, Response | Outcome]]
    # The token it was sent with; None for none.
    token: str | None
    # When to send the rest, if the server has said so.
    pause_seconds: float = 0.0


class Sender:
    """Sends entries in one wake-up after another.

    The caller does the HTTP, so that several requests can be sent at once; the queue and the app's
    functions are used on one thread.
    """

    def __init__(
        self,
        queue: OutboxQueue,
        transport: Transport,
        token: Token,
        *,
        clock: Clock,
        outages: Outages,
        batches: Batches,
        chance: Callable[[], float] = random,
        **options: Unpack[SenderOptions],
    ) -> None:
        self._queue = queue
        self._token = token
        self._fault_points = options.get("fault_points")
        self._chance = chance
        self._outages = outages
        self._batches = batches
        self.backoff = Backoff(queue, options.get("retry"), clock, chance, outages)
        self._responses = Responses(
            queue,
            token,
            origin=getattr(transport, "origin", None),
            merge=options.get("merge"),
            at_send=options.get("at_send"),
            backoff=self.backoff,
            chance=chance,
        )

    def reset_attempts(self) -> None:
        self.backoff.reset()
        self._responses.reset()

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
        if self._fault_points is not None:
            self._fault_points.reach(point)

    # ------------------------------------------------------------------ sending

    def send(self, claimed: Claimed, state: DrainState) -> Reading[Outcome]:
        """Send an entry: yields requests, is sent their responses, and returns the outcome.

        If a function of the app raises, the claim is ended here and the exception is passed on.
        Closed early, it leaves the claim as it is.
        """
        entry = claimed.entry
        try:
            token, is_signed_in = self._token_of(entry.user_id)
            send = Send(claimed, state, token)
            if not is_signed_in:
                return self._responses.sign_in([send], why="there is no token: sign in")[0]
            request = self.request_of(claimed, token)
            unsent, profile = None, self._queue.profiles.get(entry.profile)
            if entry.outcome_unknown or has_unknown_base(claimed, profile):
                unsent = yield from self._responses.before_send(send)
        except EntryInvalidError as error:
            return Failed(AttemptResult(error=error.message), reason=Reason.DEPENDENCY)
        except GeneratorExit:
            raise
        except BaseException:
            # The app's functions may raise anything. Nothing was sent.
            with suppress(ClaimLostError):
                self._queue.record(claimed, Released())
            raise
        if unsent is not None:
            return unsent
        response = yield from self._exchange(request, [send])
        if isinstance(response, NoResponse):
            return self._responses.no_response([send], response)[0]
        return (yield from self._responses.receive(send, response))

    def send_batch(self, batch: BatchRequest, state: DrainState) -> Reading[Received]:
        """Send several entries in one request; returns what came of it, in their order."""
        sends = [Send(part.claimed, state, batch.token) for part in batch.parts]
        response = yield from self._exchange(batch.request, sends)
        try:
            if isinstance(response, NoResponse):
                if response.may_have_been_sent:
                    self._batches.shrink(len(batch.parts))
                return _received(batch, self._responses.no_response(sends, response))
            if response.status == _OK:
                return self._take_apart(batch, sends, response)
            return _received(batch, self._refused(batch, sends, response))
        except BaseException:  # a function of the app has raised
            outcomes = [self.abandon(send.claimed) for send in sends]
            if isinstance(response, Response) and response.status == _UNAUTHORIZED:
                outcomes = [self._responses.released(send, response) for send in sends]
            self._record_all(sends, outcomes)
            raise

    def receive(
        self, claimed: Claimed, state: DrainState, received: Response, token: str | None
    ) -> Reading[Outcome]:
        """Return the outcome of an entry from its result in a batch."""
        return self._responses.receive(Send(claimed, state, token), received)

    def _exchange(self, request: Request, sends: Sequence[Send]) -> Reading[Response | NoResponse]:
        """Send a request with some entries, and count it."""
        self.reach("drain.before_send")
        state, is_single = sends[0].state, len(sends) == 1
        for send in sends:
            self._responses.repeated.discard(send.entry.id)
            state.note_sent(send.entry.id)
        try:
            response = yield request
        except GeneratorExit:
            raise
        except BaseException:
            # It may have been sent: back into the queue, as if this process had died. Another
            # process may have claimed it since; the error must not hide the first one.
            again = RetryLater(delay_seconds=0, give_up=False, outcome_unknown=True)
            self._record_all(
                sends, [again if is_single else self.abandon(send.claimed) for send in sends]
            )
            raise
        self.reach("drain.after_send")
        if isinstance(response, NoResponse):
            state.report.count_sends(len(sends), reached=response.may_have_been_sent)
            if response.may_have_been_sent:
                self._note_sent(sends, response.reason)
        elif is_single:
            state.report.count_sends(1)
        return response

    def _record_all(self, sends: Sequence[Send], outcomes: Sequence[Outcome]) -> None:
        """Record outcomes in one commit, except those of claims that are lost."""
        with self._queue.transaction():
            for send, outcome in zip(sends, outcomes, strict=True):
                with suppress(ClaimLostError):
                    self._queue.record(send.claimed, outcome)

    def _note_sent(self, sends: Sequence[Send], detail: str) -> None:
        """Report entries of a request that has no response to each of them."""
        for send in sends:
            self._queue.emit_about(EventKind.SENT, send.entry, detail=detail)

    def request_of(
        self, claimed: Claimed, token: str | None, *, mappings: Mappings | None = None
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
            extra=self._responses.headers(entry, token),
            version=claimed.version,
            sequence=claimed.sequence,
        )

    def repeat(self, claimed: Claimed) -> Request | None:
        """Return the request of an entry once more, for a second connection; None without a token.

        The key and the body are the same.
        """
        token, is_signed_in = self._token_of(claimed.entry.user_id)
        if not is_signed_in:
            return None
        request = self.request_of(claimed, token)
        self._responses.repeated.add(claimed.entry.id)
        return request

    def abandon(self, claimed: Claimed) -> Outcome:
        """Return the outcome of an entry whose response the drain has no time to wait for."""
        return RetryLater(
            result=AttemptResult(code=ABANDONED, error="no response: the time of the drain was up"),
            policy=self.backoff.policy(claimed.entry),
            give_up=False,
            outcome_unknown=True,
            delay_seconds=0,
        )

    def abandon_batch(self, batch: BatchRequest) -> Received:
        """Return the outcomes of entries whose batch the drain has no time to wait for."""
        return _received(batch, [self.abandon(part.claimed) for part in batch.parts])

    def _token_of(self, user_id: str) -> tuple[str | None, bool]:
        """Return the user's current token, and whether they are signed in."""
        token = bearer_token(self._token, user_id)
        return token, token is not None or not callable(self._token)

    # ------------------------------------------------------------------ making a batch

    def assemble(self, claims: Iterable[Claimed]) -> Assembled:
        """Make a batch of claims, in their order. Raises what the app's functions raise."""
        claims = list(claims)
        token, is_signed_in = self._token_of(claims[0].entry.user_id)
        maker = BatchMaker(
            self._queue,
            self._batches,
            token,
            request_of=self.request_of,
            has_to_read=self._has_to_read,
        )
        alone: list[Claimed] = []
        left: list[Claimed] = []
        for claimed in claims:
            if maker.waits_for_others(claimed):
                left.append(claimed)
            elif not is_signed_in or self._is_alone(claimed):
                alone.append(claimed)
            elif maker.is_full:
                left.append(claimed)
            else:
                item = maker.item_of(claimed)
                if item is not None and maker.fits(claimed, item):
                    maker.add(claimed, item)
                    continue
                (alone if item is None else left).append(claimed)
            maker.leave(claimed)
        alone, waiting = sendable(alone)
        left += waiting
        batch = maker.batch()
        if batch is None:
            # The caller sends them one by one.
            batched, behind = sendable(maker.claims)
            ids = {claimed.entry.id for claimed in (*batched, *alone)}
            singles = [claimed for claimed in claims if claimed.entry.id in ids]
            return Assembled(None, singles, [*left, *behind])
        # They are sent after the batch, unless they are about the same as something in it.
        later = [claimed for claimed in alone if not maker.is_about_the_same(claimed)]
        left += [claimed for claimed in alone if maker.is_about_the_same(claimed)]
        return Assembled(batch, later, left)

    def _is_alone(self, claimed: Claimed) -> bool:
        entry = claimed.entry
        return (
            entry.forced
            or self._batches.is_alone(entry.id, entry.endpoint)
            or self._outages.probed_by(entry.endpoint) is not None
        )

    def _has_to_read(self, claimed: Claimed) -> bool:
        """Return whether something has to be read, or checked, before an entry is sent."""
        entry, queue = claimed.entry, self._queue
        if entry.outcome_unknown and (queue.has_gap() or queue.key_expired(entry)):
            return True
        return has_unknown_base(claimed, queue.profiles.get(entry.profile))

    # ------------------------------------------------------------------ the results of a batch

    def _take_apart(
        self, batch: BatchRequest, sends: Sequence[Send], response: Response
    ) -> Received:
        """Return the response to each entry, or its outcome if it was not run."""
        found = read_results(response, len(batch.parts))
        if found is None:
            # What has happened is not known. Smaller batches have smaller responses.
            self._batches.shrink(len(batch.parts))
            sends[0].state.report.count_sends(len(sends))
            self._note_sent(sends, "the response is not that of a batch")
            return _received(batch, self._responses.not_the_service(sends, response))
        self._batches.grow()
        results: list[tuple[Claimed, Response | Outcome]] = []
        seen: set[str] = set()
        has_failure = is_unknown = False
        outage = max((n for n, each in enumerate(found.responses) if is_outage(each)), default=0)
        for number, (part, send, each) in enumerate(
            zip(batch.parts, sends, found.responses, strict=False)
        ):
            if number < outage and each.status in _TO_READ:
                why = "the server is down: its side of the conflict is read later"
                unread = msgspec.structs.replace(_unsent(send, why), outcome_unknown=True)
                results.append((part.claimed, unread))
                has_failure = True
                continue
            if _is_skipped(each):
                if not has_failure:
                    # There is no reason to skip it: in each further batch it could be skipped
                    # again.
                    self._batches.send_alone(part.claimed.entry.id)
                results.append((part.claimed, _skipped(send, is_unknown=is_unknown)))
                continue
            has_failure |= each.status >= _BAD_REQUEST
            is_unknown |= is_transient(each.status) or each.code in _IN_PROGRESS
            results.append((part.claimed, self._result(part, send, each, seen)))
        results += [
            (send.claimed, _unsent(send, "the server did not get to it"))
            for send in sends[len(results) :]
        ]
        return Received(results, batch.token, found.retry_after_seconds)

    def _result(
        self, part: Part, send: Send, response: Response, seen: set[str]
    ) -> Response | Outcome:
        """Return the response to an entry, or its outcome if it was not run or is a repetition."""
        entry, status = send.entry, response.status
        if status == _BAD_REQUEST:
            return self._send_alone(part, send, response)
        send.state.report.count_sends(1)
        key = self._pauses(entry, response)
        if key is not None:
            if key in seen:
                return self._responses.receive_again(send, response)
            seen.add(key)
        return response

    def _pauses(self, entry: Entry, response: Response) -> str | None:
        """Return the scope that a response pauses: the sign-in, the server or an endpoint."""
        if is_outage(response):
            return path_template(entry.endpoint) if response.status == TOO_MANY else SERVER
        if response.status != _UNAUTHORIZED:
            return None
        codes = self._queue.profiles.get(entry.profile).codes
        if isinstance(codes.get(response.code or ""), AttestationNeeded):
            # The server may not take this header in a batch.
            self._batches.send_alone(entry.id)
            return None
        return "sign-in"

    def _send_alone(self, part: Part, send: Send, response: Response) -> Outcome:
        """Release an entry that may be refused in a batch only: its own response counts."""
        entry = send.entry
        _log.info(
            "entry %s is sent again: in a batch the server responded 400 (%s)",
            entry.id,
            response.code,
        )
        if part.follows is not None:
            # Most likely the response of the one before it had no version.
            self._batches.note_version(part.follows, is_known=False)
        else:
            self._batches.send_alone(entry.id)
        return _unsent(send, "the server does not take it in this batch: it is sent alone")

    def _refused(
        self, batch: BatchRequest, sends: Sequence[Send], response: Response
    ) -> list[Outcome]:
        """Return the outcomes of entries whose batch as a whole got another response than 200."""
        status, responses = response.status, self._responses
        responses.learn_time(sends[0], response)
        if is_outage(response):
            sends[0].state.report.count_sends(len(sends))
            self._note_sent(sends, str(status))
            return responses.outage(sends, response)
        if status >= _SERVER_ERROR or is_transient(status):
            # A server error of the batch itself, which is none of an entry: the code says that it
            # does not count against any of them.
            self._batches.shrink(len(sends))
            sends[0].state.report.count_sends(len(sends))
            self._note_sent(sends, str(status))
            result = AttemptResult(status, UNRECOGNISED, response.request_id, response.error_body)
            seconds = self.backoff.retry_after(response)
            return responses.retry_all(sends, result, retry_after_seconds=seconds)
        # In all other cases no item was run.
        if status == _UNAUTHORIZED:
            sends[0].state.note_verdict(SignInNeeded())
            return responses.sign_in(sends, response)
        if status in _MISSING:
            _log.warning("%s of %s: entries are sent one by one", status, batch.path)
            self._batches.forget_offer()
        elif status == _TOO_LARGE:
            self._batches.shrink(len(sends), for_good=True)
        else:
            _log.warning(
                "the server responded %d (%s) to a batch of %d entries: they are sent one by one",
                status,
                response.code,
                len(sends),
            )
            for send in sends:
                self._batches.send_alone(send.entry.id)
        return [_unsent(send, f"the server responded {status} to the batch") for send in sends]


def _is_skipped(response: Response) -> bool:
    """Return whether the server has not run an item, because one before it has failed."""
    return response.status == _SKIPPED_STATUS and response.code in _SKIPPED


def _skipped(send: Send, *, is_unknown: bool) -> Released:
    """Return the outcome of an entry that was not run, because one before it has failed.

    If the outcome of that one is unknown, a copy of the batch that a proxy has sent may run both.
    """
    released = _unsent(send, "an entry before it in the batch did not succeed")
    return msgspec.structs.replace(released, outcome_unknown=is_unknown)


def _unsent(send: Send, why: str) -> Released:
    send.state.note_received(send.entry.id)
    return Released(AttemptResult(error=why))


def _received(batch: BatchRequest, outcomes: Sequence[Outcome]) -> Received:
    """Return outcomes; which version the followers of others were sent with is not known."""
    results: list[tuple[Claimed, Response | Outcome]] = []
    for part, outcome in zip(batch.parts, outcomes, strict=True):
        kept = outcome
        if part.follows is not None and isinstance(outcome, RetryLater):
            kept = msgspec.structs.replace(outcome, keeps_version=False)
        results.append((part.claimed, kept))
    return Received(results, batch.token)
