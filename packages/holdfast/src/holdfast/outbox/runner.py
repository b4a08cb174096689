"""Draining by itself: wakes up when there is something to send, backs off, and ends when told."""

import logging
from collections.abc import Callable
from random import random
from threading import Event as Flag
from time import monotonic
from typing import Final, NamedTuple

from holdfast.core.retry import DEVICE, RetryPolicy
from holdfast.errors import FileBusyError
from holdfast.outbox.drain import Drain
from holdfast.outbox.events import Event, EventKind
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.report import DrainReport, Ended
from holdfast.outbox.sending import Token, bearer

__all__ = ["Runner"]

IDLE_SECONDS: Final = 900.0
"""A wake-up without a reason, every quarter of an hour: a hint may have got lost."""

SLICE_SECONDS: Final = 30.0
"""How long one user may send while others wait for their turn."""

_NEWS: Final = frozenset(
    {
        EventKind.ENQUEUED,
        EventKind.MERGED,
        EventKind.RETRIED,
        EventKind.EDITED,
        EventKind.RESOLVED,
        EventKind.REVIVED,
    }
)
"""After these there may be something to send."""

_log = logging.getLogger(__name__)


class _Away(NamedTuple):
    """A user for whom nothing gets through: how often that was so, and when to try again."""

    failures: int
    until: float


class Runner:
    """Drains all users of a queue, again and again, on the thread that calls ``run``.

    Each user backs off alone. What is wrong with one, such as a token that cannot be had, says
    nothing about the others; and if it is the network, each of them finds that out once.
    """

    def __init__(
        self,
        queue: OutboxQueue,
        drain: Drain,
        token: Token,
        *,
        idle_seconds: float = IDLE_SECONDS,
        back_off: RetryPolicy = DEVICE,
        chance: Callable[[], float] = random,
    ) -> None:
        """Take what to drain; ``back_off`` is how long to wait while there is no network."""
        self._queue = queue
        self._drain = drain
        self._token = token
        self._idle_seconds = idle_seconds
        self._back_off = back_off
        self._chance = chance
        # Something may be there to send; and somebody wants everybody to be tried now.
        self._news = Flag()
        self._hint = Flag()
        self._is_online = True
        # By user, and touched by the thread that runs only.
        self._away: dict[str, _Away] = {}
        self._refused: dict[str, str | None] = {}

    # ------------------------------------------------------------------ hints, from any thread

    def wake(self) -> None:
        """Look at once, also for those who back off."""
        self._hint.set()
        self._news.set()

    def online(self) -> None:
        """Take the app's word that there is a network: send now, however long the wait was."""
        self._is_online = True
        self._drain.wake_up()
        self.wake()

    def offline(self) -> None:
        """Take the app's word that there is none: do not try until ``online``."""
        self._is_online = False

    # ------------------------------------------------------------------ the loop

    def run(self, stop: Flag) -> None:
        """Send what there is, and wait for more, until ``stop`` is set and ``wake`` called.

        Begins anew each time, but for the app's word about the network. One thread at a time.
        """
        self._refused.clear()
        self._drain.wake_up()
        self._hint.set()
        unsubscribe = self._queue.subscribe(self._listen)
        try:
            while not stop.is_set():
                self._news.clear()
                if stop.is_set():
                    break
                if self._hint.is_set():
                    self._hint.clear()
                    self._away.clear()
                pause = self._round(stop) if self._is_online else self._idle_seconds
                self._rest(pause)
        finally:
            unsubscribe()

    def _rest(self, seconds: float) -> None:
        """Wait for news, and use the time to prune. A stop is news too."""
        ends = monotonic() + seconds
        while not self._news.is_set() and monotonic() < ends:
            if not self._queue.prune_in_passing():
                # What came meanwhile has set the flag, and the wait is over at once.
                self._news.wait(max(0.0, ends - monotonic()))
                return

    def _listen(self, event: Event) -> None:
        if event.kind in _NEWS:
            self._news.set()

    def _round(self, stop: Flag) -> float:
        """Let everybody send who may; returns how long to wait if nothing happens."""
        pause, is_idle = self._idle_seconds, True
        for user_id in self._queue.users():
            if stop.is_set():
                break
            seconds = self._turn(user_id, stop)
            pause = min(pause, seconds)
            # Those who back off may do so for days: the tries of the others are counted anew.
            is_idle &= seconds >= self._idle_seconds or user_id in self._away
        if is_idle:
            self._drain.wake_up()
        return pause

    def _turn(self, user_id: str, stop: Flag) -> float:
        """Let one user send; returns after how long they want another turn."""
        away = self._away.get(user_id)
        if away is not None and (left := away.until - monotonic()) > 0:
            # What they queue meanwhile has to wait with the rest.
            return left
        if not self._may_send(user_id):
            return self._idle_seconds
        report = self._send(user_id, stop)
        if report is None or report.ended is Ended.OFFLINE:
            return self._back_off_from(user_id)
        self._away.pop(user_id, None)
        if report.ended is Ended.SIGNED_OUT:
            self._refused[user_id] = self._current(user_id)
        if report.ended is Ended.TIME_UP:
            return 0.0
        due = report.next_due_seconds
        return self._idle_seconds if due is None else due

    def _send(self, user_id: str, stop: Flag) -> DrainReport | None:
        """Send what there is for one user; None if that could not even be tried."""
        try:
            return self._drain.run(user_id, max_seconds=SLICE_SECONDS, wait=False, stop=stop)
        except FileBusyError:
            _log.warning("the outbox is busy; trying again soon")
        except Exception:  # noqa: BLE001 - the app's token function may raise anything
            _log.exception("a drain failed; trying again later")
        return None

    def _back_off_from(self, user_id: str) -> float:
        """Leave a user alone, each time for longer; returns for how long."""
        before = self._away.get(user_id)
        failures = 1 if before is None else before.failures + 1
        seconds = self._back_off.delay_seconds(failures, random=self._chance())
        self._away[user_id] = _Away(failures, monotonic() + seconds)
        return seconds

    def _may_send(self, user_id: str) -> bool:
        """Leave a user alone whose token was refused, until there is another."""
        if user_id not in self._refused:
            return True
        token = self._current(user_id)
        if token is None or token == self._refused[user_id]:
            return False
        del self._refused[user_id]
        return True

    def _current(self, user_id: str) -> str | None:
        try:
            return bearer(self._token, user_id)
        except Exception:  # noqa: BLE001 - the app's own function
            _log.exception("the token function failed")
            return None
