"""One entry on its way: its request is sent, its answer looked at. What follows is not done here.

``Dispatcher.dispatch`` returns what records the outcome, for the drain to run in the transaction in
which it also claims the next entry. Everything that takes time, reading the server's side of a
conflict for example, has happened by then.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from random import random
from typing import Any, Final, assert_never

from holdfast.core.outbox_entry import Action, Claimed, Entry, Operation, Reason, Status
from holdfast.core.response_classification import (
    BY_CODE,
    Conflicting,
    Done,
    Misdirected,
    OutOfOrder,
    Refused,
    SignInNeeded,
    TooOld,
    TryLater,
    classify,
)
from holdfast.core.retry import RetryPolicy, parse_retry_after
from holdfast.errors import EntryInvalidError
from holdfast.outbox import conflicts
from holdfast.outbox.answers import (
    facts,
    is_within,
    server_id_in,
    settles,
    speaks_for_the_service,
)
from holdfast.outbox.conflicts import Merge, Plan, said
from holdfast.outbox.events import Event, EventKind, about
from holdfast.outbox.exchange import Answer, NoAnswer, Transport
from holdfast.outbox.profile import Profile
from holdfast.outbox.progress import Progress
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.recovery import apply_plan, pending_entries
from holdfast.outbox.report import Ended
from holdfast.outbox.sending import Token, bearer, reading, request_for, target_of
from holdfast.outbox.upkeep import MAYBE
from holdfast.outbox.world import FaultPoints
from holdfast.ports import Clock

__all__ = ["UNREACHABLE", "AtSend", "Dispatcher", "Retry", "Settle"]

_log = logging.getLogger(__name__)

UNREACHABLE: Final = "unreachable"
"""In the history, the code of a send that never reached the server."""

_SILENCES: Final = 3
"""So many sends in a row without an answer are the network's fault, not the entries'."""

_REBUILDS: Final = 3
_MERGES: Final = 5
"""How often one entry may go round in one wake-up before a person has to look."""

_OK: Final = 200
_SIGN_IN: Final = 401
_UNCLEAR: Final = 422
_UNCOUNTED: Final = frozenset({Action.RELEASE, Action.WATCHDOG})
_REFUSED_TOKEN: Final = "the server does not take the token: sign in"  # noqa: S105 - for a person

AtSend = Callable[[Entry], Mapping[str, str]]
"""Gives headers that are made anew for each send of an entry, such as an attestation."""

Retry = RetryPolicy | Callable[[Profile], RetryPolicy]
"""When to try again: the same for all entries, or by their profile."""

Settle = Callable[[], Entry]
"""Records an outcome, and returns the entry as it is after that.

One operation of the queue, or several in a transaction of their own: a claim that turns out to be
lost leaves nothing half done.
"""


class Dispatcher:
    """Sends entries, and counts how often it has in one wake-up."""

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
        fault_points: FaultPoints | None,
        chance: Callable[[], float] = random,
    ) -> None:
        """Take what ``Drain`` was given."""
        self._queue = queue
        self._transport = transport
        self._token = token
        self._merge = merge
        self._at_send = at_send
        self._retry_policy = retry
        self._clock = clock
        self._fault_points = fault_points
        self._chance = chance
        self._date: str | None = None
        self._rounds: Counter[str] = Counter()
        self._tries: Counter[str] = Counter()

    def wake_up(self) -> None:
        """Begin anew to count."""
        self._tries.clear()
        self._rounds.clear()

    def is_tired(self, entry: Entry) -> bool:
        """Say whether an entry has had all its tries of this wake-up."""
        attempts = self._policy(entry).attempts
        return attempts is not None and self._tries[entry.id] >= attempts

    def place_for(self, claimed: Claimed, others: Iterable[Claimed]) -> int:
        """Say where among others to send an entry that was tried before; a lane keeps its order.

        Anywhere: were its place always the same, a network that loses every n-th answer could lose
        this one each time, until the entry has no attempts left.
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

    def dispatch(self, claimed: Claimed, progress: Progress) -> Settle:
        """Send an entry, and return what records the outcome."""
        entry, queue = claimed.entry, self._queue
        progress.is_done = False
        profile = queue.profiles.get(entry.profile)
        try:
            token = bearer(self._token, entry.user_id)
            if token is None and callable(self._token):
                return self._sign_in(claimed, progress, token, "there is no token: sign in")
            extra = self._headers(entry, token)
            request = request_for(entry, profile, queue.mappings, now=queue.server_now, extra=extra)
            instead = self._ask_first(claimed, progress, token)
        except EntryInvalidError as error:
            message = error.message
            return lambda: queue.fail(claimed, reason=Reason.DEPENDENCY, error=message)
        except BaseException:
            # The app's own functions may raise anything. Nothing was sent.
            queue.release(claimed)
            raise
        if instead is not None:
            return instead
        self.reach("drain.before_send")
        try:
            answer = self._transport.send(request)
        except BaseException:
            # It may have left. Back into the queue, as it would be if this process had died.
            queue.schedule_retry(claimed, delay_seconds=0, give_up=False, outcome_unknown=True)
            raise
        self.reach("drain.after_send")
        progress.report.sent += 1
        if queue.is_heard:
            queue.emit(_sent(entry, answer, self._clock.now()))
        if isinstance(answer, NoAnswer):
            return self._unanswered(claimed, progress, answer)
        progress.has_aged |= self._learn(answer)
        try:
            return self._answered(claimed, progress, answer, token)
        except BaseException:
            # The app's own functions again. Sent once more, the server says once more what it said.
            if answer.status == _SIGN_IN:
                queue.release(claimed, sent=True, **facts(answer))
            else:
                unknown = entry.outcome_unknown
                queue.schedule_retry(
                    claimed, give_up=False, outcome_unknown=unknown, **facts(answer)
                )
            raise

    def _answered(  # noqa: PLR0911 - one for each verdict
        self, claimed: Claimed, progress: Progress, answer: Answer, token: str | None
    ) -> Settle:
        queue, entry = self._queue, claimed.entry
        codes = queue.profiles.get(entry.profile).codes
        verdict = classify(answer.status, answer.code, entry, codes)
        progress.heard(verdict)
        match verdict:
            case Done():
                progress.is_done = True
                server_id = server_id_in(entry, answer)
                if server_id is None and entry.local_id and entry.operation is Operation.CREATE:
                    _log.warning("no id in the answer: what refers to %s waits", entry.local_id)
                return lambda: queue.succeed(claimed, server_id=server_id, **facts(answer))
            case TryLater() if verdict.outcome_unknown or not self._was_unclear(entry):
                return self._later(claimed, progress, answer, verdict.outcome_unknown)
            case TryLater() | Refused():
                unknown = entry.outcome_unknown and not settles(answer)
                return lambda: queue.fail(
                    claimed, outcome_unknown=unknown, error=said(answer), **facts(answer)
                )
            case TooOld():
                return lambda: queue.expire(claimed, error=said(answer), **facts(answer))
            case Conflicting():
                return self._conflict(claimed, progress, answer, token)
            case OutOfOrder():
                return self._out_of_order(claimed, progress, answer, token)
            case SignInNeeded():
                return self._sign_in(claimed, progress, token, _REFUSED_TOKEN, answer)
            case Misdirected():
                return self._misdirected(claimed, progress, answer)
            case _:
                assert_never(verdict)

    # ------------------------------------------------------------------ try again

    def _unanswered(self, claimed: Claimed, progress: Progress, silence: NoAnswer) -> Settle:
        if not silence.left:
            return self._unreached(claimed, progress, silence.why)
        progress.silences += 1
        if progress.silences >= _SILENCES:
            progress.hold(self._delay(claimed.entry), silence.why)
        return self._retry(claimed, progress, outcome_unknown=True, error=silence.why)

    def _misdirected(self, claimed: Claimed, progress: Progress, answer: Answer) -> Settle:
        """Tell a path that has moved from a hotel's sign-in page. Neither is followed."""
        where = answer.headers.get("location", "")
        unknown = claimed.entry.outcome_unknown
        target = target_of(claimed.entry, self._queue.mappings)
        if is_within(where, getattr(self._transport, "origin", None), target):
            why = f"the server has this under another path ({answer.status}): {where}"
            return lambda: self._queue.fail(
                claimed, outcome_unknown=unknown, error=why, **facts(answer)
            )
        why = f"the answer was a redirect ({answer.status}), which is not followed"
        progress.silences += 1
        if progress.silences >= _SILENCES:
            progress.hold(self._delay(claimed.entry), why)
        told = facts(answer) | {"code": UNREACHABLE}
        return self._retry(claimed, progress, unknown, error=why, **told)

    def _unreached(self, claimed: Claimed, progress: Progress, why: str) -> Settle:
        """Wait for the network. It is the drain that waits: the entry can go once it is back."""
        progress.hold(self._delay(claimed.entry), why)
        return self._retry(
            claimed,
            progress,
            claimed.entry.outcome_unknown,
            error=why,
            code=UNREACHABLE,
            delay_seconds=0,
        )

    def _later(
        self, claimed: Claimed, progress: Progress, answer: Answer, outcome_unknown: bool
    ) -> Settle:
        return self._retry(
            claimed,
            progress,
            outcome_unknown,
            retry_after_seconds=self._floor(answer),
            error=said(answer),
            **facts(answer),
        )

    def _retry(
        self, claimed: Claimed, progress: Progress, outcome_unknown: bool, **answer: Any
    ) -> Settle:
        entry = claimed.entry
        policy = self._policy(entry)
        give_up = answer.get("code") != UNREACHABLE and self._gives_up(entry, policy)
        self._tries[entry.id] += 1
        progress.report.retrying += not give_up
        return lambda: self._queue.schedule_retry(
            claimed, policy=policy, give_up=give_up, outcome_unknown=outcome_unknown, **answer
        )

    def _gives_up(self, entry: Entry, policy: RetryPolicy) -> bool:
        """Say whether this was an entry's last attempt.

        Attempts that never reached the server do not count: being offline fails no entry.
        """
        if policy.attempts is not None or entry.attempt_count < entry.max_attempts:
            return False
        history = self._queue.attempts(entry.id)[-entry.attempt_count :]
        unreached = sum(attempt.code == UNREACHABLE for attempt in history)
        return entry.attempt_count - unreached >= entry.max_attempts

    def _policy(self, entry: Entry) -> RetryPolicy:
        chosen = self._retry_policy
        if isinstance(chosen, RetryPolicy):
            return chosen
        profile = self._queue.profiles.get(entry.profile)
        return profile.retry if chosen is None else chosen(profile)

    def _delay(self, entry: Entry) -> float:
        tries = self._tries[entry.id] + 1
        return self._policy(entry).delay_seconds(tries, random=self._chance())

    def _floor(self, answer: Answer) -> float | None:
        value = answer.headers.get("retry-after")
        return None if value is None else parse_retry_after(value, self._queue.server_now())

    # ------------------------------------------------------------------ ask first

    def _sign_in(
        self,
        claimed: Claimed,
        progress: Progress,
        token: str | None,
        why: str,
        answer: Answer | None = None,
    ) -> Settle:
        """Give the entry back, and ask for another token; go on only if there is one.

        Once: a server that does not take a fresh one either takes none, however many are made.
        """
        progress.refused_tokens.add(token)
        progress.refusals += 1
        again = bearer(self._token, claimed.entry.user_id)
        if again is None or again in progress.refused_tokens or progress.refusals > 1:
            progress.end(Ended.SIGNED_OUT, why)
            self._tell(EventKind.PAUSED, claimed.entry, why)
        told = {} if answer is None else facts(answer)
        return lambda: self._queue.release(claimed, sent=answer is not None, error=why, **told)

    def _conflict(
        self, claimed: Claimed, progress: Progress, answer: Answer, token: str | None
    ) -> Settle:
        queue, entry = self._queue, claimed.entry
        self._rounds[entry.id] += 1
        merge = self._merge if self._rounds[entry.id] <= _MERGES else None
        plan = conflicts.plan_for(
            entry,
            queue.profiles.get(entry.profile),
            lambda: self._read(target_of(entry, queue.mappings), entry, token),
            merge,
        )
        is_signed_out = isinstance(plan, Answer) and plan.status == _SIGN_IN
        if (
            isinstance(plan, Answer | NoAnswer)
            and not is_signed_out
            and self._gives_up(entry, self._policy(entry))
        ):
            plan = Plan()  # it was tried often enough: a person decides without the server's side
        if isinstance(plan, Answer | NoAnswer):
            why = "there is a conflict, and the server's side could not be read"
            return self._unread(claimed, progress, (answer, plan), token, why)
        settled = plan

        def settle() -> Entry:
            with queue.transaction():
                recorded = conflicts.record(queue, claimed, answer, settled)
            progress.report.resolved += recorded.status is not Status.CONFLICT
            return recorded

        return settle

    def _out_of_order(
        self, claimed: Claimed, progress: Progress, answer: Answer, token: str | None
    ) -> Settle:
        queue, entry = self._queue, claimed.entry
        recovery = queue.profiles.get(entry.profile).recovery
        if recovery is not None:
            self._tell(EventKind.PAUSED, entry, f"out of order: reading {recovery.path}")
        self._rounds[entry.id] += 1
        if recovery is None or self._rounds[entry.id] > _REBUILDS:
            return lambda: queue.fail(
                claimed, reason=Reason.REBUILD, error=said(answer), **facts(answer)
            )
        state = self._read(recovery.path, entry, token)
        if isinstance(state, NoAnswer) or state.status != _OK:
            why = f"out of order, and {recovery.path} could not be read"
            return self._unread(claimed, progress, (answer, state), token, why)

        def settle() -> Entry:
            with queue.transaction():
                pending = pending_entries(queue, entry.user_id)
                actions = recovery.plan(entry, pending, state.json())
                rebuilt = apply_plan(queue, claimed, answer, actions)
            progress.report.rebuilt += 1
            return rebuilt

        return settle

    def _unread(
        self,
        claimed: Claimed,
        progress: Progress,
        answers: tuple[Answer, Answer | NoAnswer],
        token: str | None,
        why: str,
    ) -> Settle:
        """Try the entry again later: its answer is known, but not what follows from it."""
        answer, heard = answers
        floor = None
        if isinstance(heard, Answer):
            if heard.status == _SIGN_IN:
                return self._sign_in(claimed, progress, token, _REFUSED_TOKEN, heard)
            floor = self._floor(heard)
        return self._retry(
            claimed, progress, False, error=why, retry_after_seconds=floor, **facts(answer)
        )

    def _read(self, target: str, entry: Entry, token: str | None) -> Answer | NoAnswer:
        return self._transport.send(reading(target, self._headers(entry, token)))

    # ------------------------------------------------------------------ small things

    def _headers(self, entry: Entry, token: str | None) -> dict[str, str]:
        headers = {} if self._at_send is None else dict(self._at_send(entry))
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _ask_first(self, claimed: Claimed, progress: Progress, token: str | None) -> Settle | None:
        """Return what to do instead of sending: what may have happened is not always sent again."""
        queue, entry = self._queue, claimed.entry
        if not entry.outcome_unknown:
            return None
        instead = self._ask_the_time(claimed, progress, token) if queue.has_gap() else None
        if instead is None and queue.is_forgotten(entry):
            return lambda: _too_late(queue, claimed)
        return instead

    def _ask_the_time(
        self, claimed: Claimed, progress: Progress, token: str | None
    ) -> Settle | None:
        """Learn how long the device was off: whatever the server says to a read tells the time."""
        entry = claimed.entry
        heard = self._read(target_of(entry, self._queue.mappings), entry, token)
        if isinstance(heard, NoAnswer):
            return self._unanswered(claimed, progress, heard)
        progress.has_aged |= self._learn(heard)
        if not self._queue.has_gap() or not self._queue.seems_forgotten(entry):
            return None
        why = "nobody has said how long the device was off"
        return self._retry(claimed, progress, True, error=why, code=UNREACHABLE)

    def _was_unclear(self, entry: Entry) -> bool:
        """Say whether an entry has had its second chance after a 422 that nobody understands."""
        left = entry.attempt_count - 1
        known = self._queue.profiles.get(entry.profile).codes
        for one in reversed(self._queue.attempts(entry.id)):
            if left <= 0:
                return False
            if one.status == _UNCLEAR and one.code not in BY_CODE and one.code not in known:
                return True
            left -= one.outcome not in _UNCOUNTED
        return False

    def _learn(self, answer: Answer) -> bool:
        """Take the server's time, when it has moved on by a second.

        Returns whether time had passed unseen: entries may be older than they seemed.
        """
        date = answer.headers.get("date")
        if date is None or date == self._date or not speaks_for_the_service(answer):
            return False
        self._date = date
        try:
            now = parsedate_to_datetime(date)
        except (ValueError, OverflowError):
            return False
        return now.tzinfo is not None and self._queue.learn_server_time(now)

    def _tell(self, kind: EventKind, entry: Entry, detail: str) -> None:
        self._queue.emit(about(kind, entry, self._clock.now(), detail=detail))


def _sent(entry: Entry, answer: Answer | NoAnswer, at: datetime) -> Event:
    told = answer.why if isinstance(answer, NoAnswer) else str(answer.status)
    return about(EventKind.SENT, entry, at, detail=told)


def _too_late(queue: OutboxQueue, claimed: Claimed) -> Entry:
    """Leave an entry that may have happened, and that nobody can ask for any more, to a person."""
    entry_id = claimed.entry.id
    with queue.transaction():
        queue.release(claimed)
        queue.expire_stale(claimed.entry.user_id)
        entry = queue.get(entry_id)
        if entry.status is Status.PENDING:
            entry = queue.park(entry_id, reason=Reason.UNKNOWN, error=MAYBE)
    return entry
