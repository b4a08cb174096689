"""Draining by itself: wakes up when there is something to send, backs off, and ends when told."""

import logging
from collections.abc import Callable
from random import random
from threading import Event as Flag
from threading import Lock
from typing import Final

from holdfast.core.retry import DEVICE, RetryPolicy
from holdfast.device.drain import Drain
from holdfast.device.events import Event, EventKind
from holdfast.device.queue import OutboxQueue
from holdfast.device.report import DrainReport, Ended
from holdfast.device.sending import Token, bearer
from holdfast.errors import FileBusyError

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


class Runner:
    """Drains all users of a queue, again and again, on the thread that calls ``run``."""

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
        self._lock = Lock()
        self._stop = Flag()
        # Something may be there to send; and somebody wants to have it tried now.
        self._news = Flag()
        self._hint = Flag()
        self._is_online = True
        self._failures = 0
        self._refused: dict[str, str | None] = {}

    # ------------------------------------------------------------------ hints, from any thread

    def wake(self) -> None:
        """Look at once."""
        with self._lock:
            self._failures = 0
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

    def stop(self) -> None:
        """End after the entry that is being sent."""
        self._stop.set()
        self._hint.set()
        self._news.set()

    @property
    def is_stopping(self) -> bool:
        """Whether ``stop`` was called."""
        return self._stop.is_set()

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        """Send what there is, and wait for more, until ``stop``."""
        unsubscribe = self._queue.subscribe(self._listen)
        try:
            while not self._stop.is_set():
                self._news.clear()
                self._hint.clear()
                if self._stop.is_set():
                    break
                reports = self._round() if self._is_online else []
                # What came meanwhile has set the flag, and the wait is over at once. Without a
                # network what is queued has to wait with the rest: only a hint ends that.
                is_away = any(report.ended is Ended.OFFLINE for report in reports)
                (self._hint if is_away else self._news).wait(self._pause(reports))
        finally:
            unsubscribe()

    def _listen(self, event: Event) -> None:
        if event.kind in _NEWS:
            self._news.set()

    def _round(self) -> list[DrainReport]:
        reports = []
        for user_id in self._queue.users():
            if self._stop.is_set():
                break
            if not self._may_send(user_id):
                continue
            try:
                report = self._drain.run(
                    user_id, max_seconds=SLICE_SECONDS, wait=False, stop=self._stop
                )
            except FileBusyError:
                _log.warning("the outbox is busy; trying again soon")
                continue
            except Exception:  # noqa: BLE001 - the app's token function may raise anything
                _log.exception("a drain failed; trying again later")
                report = DrainReport(user_id=user_id, ended=Ended.OFFLINE)
            if report.ended is Ended.SIGNED_OUT:
                self._refused[user_id] = self._current(user_id)
            reports.append(report)
        return reports

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

    def _pause(self, reports: list[DrainReport]) -> float:
        """Say how long to wait if nothing happens."""
        if any(report.ended is Ended.OFFLINE for report in reports):
            with self._lock:
                self._failures += 1
                failures = self._failures
            return self._back_off.delay_seconds(failures, random=self._chance())
        if any(report.ended is Ended.TIME_UP for report in reports):
            return 0.0
        self._failures = 0
        due = [report.next_due_seconds for report in reports]
        pause = min([self._idle_seconds, *(seconds for seconds in due if seconds is not None)])
        if pause >= self._idle_seconds:
            self._drain.wake_up()
        return pause
