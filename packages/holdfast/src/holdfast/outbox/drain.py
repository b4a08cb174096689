"""The drain: claim, send, look at the answer, record what came of it; then the next.

An entry is claimed durably before it is sent; what came of it may be recorded a moment later. So
the outcomes of some entries and the claims on the next ones are one commit, as many as fit into a
twentieth of a second: a quick network does not wait for the disk each time, and a slow one waits
for nothing. Whatever happens between two commits, the queue knows enough: an entry that was
claimed and not recorded comes back with its key, and the server answers it from its memory.

That goes for the entries of one lane too. They are sent one after the other, each only when the one
before it has happened on the server; that its success is on the disk by then is not needed, because
after a crash both are sent again in the same order, and the server knows their keys.
"""

import logging
from collections import deque
from threading import Event as Flag
from typing import Any, Final

from holdfast.clock import SystemClock
from holdfast.core.outbox_entry import Claimed, Status
from holdfast.errors import ClaimLostError
from holdfast.outbox.conflicts import Merge
from holdfast.outbox.dispatch import AtSend, Dispatcher, Retry, Settle
from holdfast.outbox.events import Event, EventKind
from holdfast.outbox.exchange import Transport
from holdfast.outbox.lease import LeaseKeeper
from holdfast.outbox.profile import unknown_profile
from holdfast.outbox.progress import Progress
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.report import DrainReport, Ended
from holdfast.outbox.sending import Token
from holdfast.outbox.world import FaultPoints
from holdfast.ports import Clock

__all__ = ["FAULT_POINTS", "Drain", "drain"]

_log = logging.getLogger(__name__)

FAULT_POINTS: Final = ("drain.before_send", "drain.after_send", "drain.recorded")
"""Where a test may interrupt a drain, beside the commits of the queue's own operations."""

_COMMIT_SECONDS: Final = 0.05
"""How long an outcome may wait to be recorded. Nobody sees it later than that."""

_MOST_CLAIMS: Final = 64
"""Entries claimed at once. Nobody can edit or undo one while it is."""

_POLL_SECONDS: Final = 0.5
"""How often to look whether another process is done with what it sends."""

_FOREVER: Final = float("inf")


def drain(
    queue: OutboxQueue,
    user_id: str,
    transport: Transport,
    token: Token = None,
    *,
    max_seconds: float | None = None,
    wait: bool | None = None,
    stop: Flag | None = None,
    **options: Any,
) -> DrainReport:
    """Send what a user's queue holds. ``options`` are those of ``Drain``; see ``Drain.run``."""
    worker = Drain(queue, transport, token, **options)
    return worker.run(user_id, max_seconds=max_seconds, wait=wait, stop=stop)


class Drain:
    """Drains the queues of users, one at a time. One object is one wake-up, see ``wake_up``."""

    def __init__(
        self,
        queue: OutboxQueue,
        transport: Transport,
        token: Token = None,
        *,
        merge: Merge | None = None,
        at_send: AtSend | None = None,
        retry: Retry | None = None,
        clock: Clock | None = None,
        fault_points: FaultPoints | None = None,
    ) -> None:
        """Take what to drain and how to send.

        ``merge`` decides conflicts of entries whose strategy is ``merge``. ``at_send`` gives
        headers that are made anew at each send. ``retry``, one policy or a function of the profile,
        replaces the profile's own.
        """
        self._queue = queue
        self._clock = clock or SystemClock()
        self._dispatcher = Dispatcher(
            queue,
            transport,
            token,
            merge=merge,
            at_send=at_send,
            retry=retry,
            clock=self._clock,
            fault_points=fault_points,
        )

    def wake_up(self) -> None:
        """Reset the count of attempts per wake-up."""
        self._dispatcher.wake_up()

    def run(
        self,
        user_id: str,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
        stop: Flag | None = None,
    ) -> DrainReport:
        """Send what the user's queue holds, and report.

        ``max_seconds`` is looked at between entries: a send is not cut off, its own time-out ends
        it. ``wait``: whether to wait for retries that fall due in that time; unless said otherwise
        a drain with a limit does, and one without ends when nothing can be sent now. ``stop``, once
        set, ends it after the entry that is being sent.
        """
        waits = max_seconds is not None if wait is None else wait
        limit = _FOREVER if max_seconds is None else max_seconds
        return _Run(self._queue, self._dispatcher, self._clock, stop or Flag()).run(
            Progress(user_id), limit, waits=waits
        )


class _Run:
    """One drain of one user."""

    def __init__(
        self, queue: OutboxQueue, dispatcher: Dispatcher, clock: Clock, stop: Flag
    ) -> None:
        self._queue = queue
        self._dispatcher = dispatcher
        self._clock = clock
        self._stop = stop
        self._began = clock.monotonic()
        # Claimed and not sent; sent and not recorded; not to be sent after all.
        self._claims: deque[Claimed] = deque()
        self._outcomes: list[Settle] = []
        self._unsent: list[Claimed] = []
        # How many to claim at once: as many as one commit's time is enough for.
        self._size = 1

    def run(self, progress: Progress, max_seconds: float, *, waits: bool) -> DrainReport:
        queue, report = self._queue, progress.report
        report.revived = len(queue.watchdog())
        report.expired = len(queue.expire_stale(report.user_id))
        with LeaseKeeper(queue) as keeper:
            try:
                self._commit(progress, max_seconds, keeper)
                while self._claims or self._wait(progress, max_seconds, waits=waits):
                    if self._claims:
                        self._send_some(progress, max_seconds)
                    self._commit(progress, max_seconds, keeper)
            except BaseException:
                progress.end(Ended.STOPPED)
                self._commit(progress, max_seconds, keeper)
                raise
        self._finish(progress)
        return report

    def _send_some(self, progress: Progress, max_seconds: float) -> None:
        """Send what is claimed, until it is time for a commit."""
        began = self._clock.monotonic()
        while self._claims and not self._is_over(progress, max_seconds):
            # Out of the claims once it is dealt with: whoever raises has given it back.
            claimed = self._claims.popleft()
            self._outcomes.append(self._dispatcher.dispatch(claimed, progress))
            if not progress.is_done:
                self._hold_back(claimed.entry.lane)
            if progress.held_seconds is not None or progress.has_aged:
                return
            if self._clock.monotonic() - began >= _COMMIT_SECONDS:
                self._size = max(1, len(self._outcomes))
                return
        self._size = min(2 * self._size, _MOST_CLAIMS)

    def _commit(self, progress: Progress, max_seconds: float, keeper: LeaseKeeper) -> None:
        """Record what came of the last entries, and claim the next ones."""
        has_news = bool(self._outcomes)
        with self._queue.transaction(savepoints=False):
            # Before the outcomes: what follows from one may be decided about those behind it.
            self._let_go()
            for settle in self._outcomes:
                _record(settle, progress.report)
            self._outcomes.clear()
            if (
                progress.held_seconds is not None
                or progress.has_aged
                or self._is_over(progress, max_seconds)
            ):
                self._hold_back_from(0)
            else:
                # The network has become slower: what has to wait can be undone meanwhile.
                self._hold_back_from(self._size)
            self._let_go()
            if progress.has_aged:
                progress.has_aged = False
                report = progress.report
                report.expired += len(self._queue.expire_stale(report.user_id))
            if len(self._claims) < self._size and progress.held_seconds is None:
                self._claim(progress)
        keeper.hold(tuple(self._claims))
        if has_news:
            self._dispatcher.reach("drain.recorded")

    def _claim(self, progress: Progress) -> None:
        wanted = self._size - len(self._claims)
        if progress.ended is not None or wanted <= 0:
            return
        skip = progress.unknown_profiles
        known = len(skip)
        again: list[Claimed] = []
        for claimed in self._queue.claim_some(progress.report.user_id, wanted, skip_profiles=skip):
            if self._queue.profiles.find(claimed.entry.profile) is None:
                # Not sent under the rules of another profile: later claims skip it.
                self._queue.release(claimed)
                skip.add(claimed.entry.profile)
            elif self._dispatcher.is_tired(claimed.entry):
                self._queue.release(claimed)
                progress.end(Ended.WAITING, "an entry was tried as often as one wake-up allows")
            elif claimed.entry.attempt_count > 1:
                again.append(claimed)
            else:
                self._claims.append(claimed)
        for claimed in again:
            self._claims.insert(self._dispatcher.place_for(claimed, self._claims), claimed)
        if len(skip) > known:
            self._claim(progress)

    def _hold_back(self, lane: str | None) -> None:
        """Send nothing more of a lane whose head has not happened."""
        if lane is not None:
            self._unsent += [behind for behind in self._claims if behind.entry.lane == lane]
            self._claims = deque(kept for kept in self._claims if kept.entry.lane != lane)

    def _hold_back_from(self, size: int) -> None:
        """Keep the first claims only."""
        while len(self._claims) > size:
            self._unsent.append(self._claims.pop())

    def _let_go(self) -> None:
        """Give back what was claimed and will not be sent."""
        for claimed in self._unsent:
            try:
                self._queue.release(claimed)
            except ClaimLostError:
                continue
        self._unsent.clear()

    def _wait(self, progress: Progress, max_seconds: float, *, waits: bool) -> bool:
        """Wait until there may be something to send; False if the drain is over."""
        if self._is_over(progress, max_seconds):
            return False
        user_id = progress.report.user_id
        held = progress.held_seconds
        due = self._queue.next_due_seconds(user_id) if held is None else None
        if due == 0:
            return True
        pause = due if held is None else held
        if pause is None and self._queue.in_flight(user_id):
            # Another process is sending. What it leaves, or leaves behind, is ours.
            pause = min(_POLL_SECONDS, self._queue.settings.lease_seconds / 2)
        left = max_seconds - (self._clock.monotonic() - self._began)
        if pause is None or not waits or pause > left:
            if held is not None:
                progress.end(Ended.OFFLINE, progress.report.detail)
            elif due is not None:
                progress.end(Ended.WAITING)
            return False
        self._stop.wait(pause)
        progress.held_seconds = None
        progress.report.revived += len(self._queue.watchdog())
        return True

    def _is_over(self, progress: Progress, max_seconds: float) -> bool:
        if progress.ended is None:
            if self._stop.is_set():
                progress.end(Ended.STOPPED)
            elif self._clock.monotonic() - self._began >= max_seconds:
                progress.end(Ended.TIME_UP)
        return progress.ended is not None

    def _finish(self, progress: Progress) -> None:
        report = progress.report
        report.unsent = self._queue.unsent(report.user_id)
        report.next_due_seconds = self._queue.next_due_seconds(report.user_id)
        if self._queue.in_flight(report.user_id):
            # Claimed by another process. If that one is dead, the claim ends with its lease, and
            # nobody but the next drain will notice.
            lease, due = self._queue.settings.lease_seconds, report.next_due_seconds
            report.next_due_seconds = lease if due is None else min(due, lease)
        report.ended = progress.ended or (Ended.BLOCKED if report.unsent else Ended.EMPTY)
        for name in sorted(progress.unknown_profiles):
            _log.error("entries of %s were not sent: %s", report.user_id, unknown_profile(name))
            if report.ended is Ended.BLOCKED:
                report.detail = unknown_profile(name)
        report.elapsed_seconds = self._clock.monotonic() - self._began
        self._queue.emit(
            Event(
                kind=EventKind.DRAINED,
                at=self._clock.now(),
                user_id=report.user_id,
                count=report.sent,
                detail=report.ended,
            )
        )


def _record(settle: Settle, report: DrainReport) -> None:
    try:
        entry = settle()
    except ClaimLostError:
        # The lease ran out and another process has it: what it finds out counts.
        report.lost += 1
        return
    match entry.status:
        case Status.SUCCEEDED:
            report.succeeded += 1
        case Status.FAILED:
            report.failed += 1
        case Status.CONFLICT:
            report.conflicts += 1
        case Status.EXPIRED:
            report.expired += 1
        case _:
            pass
