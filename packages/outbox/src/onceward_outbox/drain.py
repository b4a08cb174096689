"""The drain: claim → build the request → send → classify the response → record the outcome.

``drain_run`` does this for one user; here is what is configured once and known about the server.
"""

import logging
from collections.abc import Callable
from random import random
from threading import Event as Flag
from threading import Lock, RLock, Thread
from time import monotonic
from typing import Final, NamedTuple, Unpack

from onceward_outbox.backoff import Outages, RoundTrips
from onceward_outbox.batch_offer import Batches
from onceward_outbox.drain_run import DrainRun, Limits, Server
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.errors import FileBusyError, UsageError
from onceward_outbox.events import Event, EventKind
from onceward_outbox.exchanges import Exchanges
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.responses import Token, bearer_token
from onceward_outbox.sender import Sender, SenderOptions
from onceward_outbox.transport import Transport
from onceward_protocol.clock import Clock, SystemClock
from onceward_protocol.retry import DEVICE, RetryPolicy

FAULT_POINTS: Final = ("drain.before_send", "drain.after_send", "drain.recorded")
"""Where a test may interrupt a drain, besides the commits of the queue's operations."""


class Drain:
    """Drains the queues of users, one at a time.

    Attempts per wake-up are counted across runs, from the construction or the last ``wake_up``.
    """

    def __init__(
        self,
        queue: OutboxQueue,
        transport: Transport,
        token: Token = None,
        *,
        clock: Clock | None = None,
        outages: Outages | None = None,
        round_trips: RoundTrips | None = None,
        batches: Batches | None = None,
        **options: Unpack[SenderOptions],
    ) -> None:
        """Configure a drain; nothing is sent yet.

        ``outages``, ``round_trips`` and ``batches`` are what is known about the server, for drains
        that share it. ``options``: ``merge`` decides conflicts of entries whose strategy is
        ``merge``. ``at_send`` returns headers that are made anew at each send. ``retry``, one
        policy or a function of the profile, replaces the profile's own.
        """
        self._queue = queue
        self._clock = clock or SystemClock()
        self._transport = transport
        origin = getattr(transport, "origin", "")
        self._server = Server(
            origin=origin,
            # With the path that comes before all others: another one may be another app.
            base_url=getattr(transport, "base_url", origin),
            outages=outages or Outages(self._clock.monotonic),
            round_trips=round_trips or RoundTrips.of(queue.settings),
            batches=batches or Batches(queue.settings, self._clock.monotonic),
        )
        # What is known about outages of the server.
        self.outages = self._server.outages
        self._sender = Sender(
            queue,
            transport,
            token,
            clock=self._clock,
            outages=self.outages,
            batches=self._server.batches,
            **options,
        )

    def wake_up(self) -> None:
        """Reset the counts of attempts per wake-up."""
        self._sender.reset_attempts()
        self._server.batches.reset()

    def run(
        self,
        user_id: str,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
        stop: Flag | None = None,
    ) -> DrainReport:
        """Send what the user's queue holds, and report.

        ``max_seconds`` is kept to within two seconds: what is in flight then is given up. Its
        outcome is unknown, and it is sent again with the same key.
        ``wait``: whether to wait for retries that fall due in that time; by default a drain with a
        limit does, and one without ends when nothing can be sent now. ``stop``, once set, ends it
        after the entries that are being sent.

        The functions of the app (``token``, ``at_send``, ``merge``) are called on this thread.
        """
        server = self._server
        holds, offer = self._queue.server_state(server.origin, server.base_url)
        server.outages.restore(holds)
        server.batches.restore(offer)
        limits = Limits(
            max_seconds=float("inf") if max_seconds is None else max_seconds,
            waits=max_seconds is not None if wait is None else wait,
            stop=stop or Flag(),
        )
        return DrainRun(
            self._queue,
            self._sender,
            user_id,
            server=server,
            clock=self._clock,
            exchanges=Exchanges(self._transport),
            limits=limits,
        ).run()


# -- in the background -----------------------------------------------------------------------------


IDLE_SECONDS: Final = 900.0
"""The queue is checked every quarter of an hour even without an event."""

SLICE_SECONDS: Final = 30.0
"""How long one user may send while others wait."""

_WAKE_EVENTS: Final = frozenset(
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


class _BackOff(NamedTuple):
    """A user whose drains fail: how often in a row, and when to try again."""

    failures: int
    until: float


class Run:
    """One run in the background. It may be stopped before its thread has started."""

    def __init__(self, work: Callable[[Flag], None], turn: Lock) -> None:
        self.stop = Flag()
        self._work = work
        self._turn = turn
        # Held while it runs; reentrant, because a signal handler of this thread may stop it.
        self._running = RLock()

    def __call__(self) -> None:
        # The run before this one may still be sending its last entry.
        with self._running, self._turn:
            try:
                if not self.stop.is_set():
                    self._work(self.stop)
            finally:
                self.stop.set()

    def wait(self) -> None:
        """Return when it is not running."""
        with self._running:
            return


class BackgroundDrain:
    """Drains all users of a queue, again and again: on a thread of its own, or on the caller's.

    Each user backs off separately: a token that cannot be obtained for one says nothing about the
    others; and if the network is down, each of them finds that out once.
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
        """``back_off`` is how long to wait while there is no network."""
        self._queue = queue
        self._drain = drain
        self._token = token
        self._idle_seconds = idle_seconds
        self._back_off = back_off
        self._chance = chance
        # Something may be there to send; and all users are to be tried now.
        self._wake = Flag()
        self._retry_all = Flag()
        self._is_online = True
        # By user, and used by the running thread only.
        self._backing_off: dict[str, _BackOff] = {}
        self._refused: dict[str, str | None] = {}
        self._is_closed = False
        self._lock = Lock()
        self._turn = Lock()
        self._current: Run | None = None
        self._thread: Thread | None = None

    # ------------------------------------------------------------------ called from any thread

    def wake(self) -> None:
        """Check the queue at once, also for users who back off.

        Only a time that the server has named (``Retry-After``) is still waited for.
        """
        self._drain.outages.probe_now()
        self._retry_all.set()
        self._wake.set()

    def online(self) -> None:
        """Note that the network is up: end every user's back-off and check the queue at once.

        Entries that wait for a retry keep their delay.
        """
        self._is_online = True
        self._drain.wake_up()
        self.wake()

    def offline(self) -> None:
        """Note that the network is down: send nothing until ``online``."""
        self._is_online = False

    def start(self) -> None:
        """Begin a run on a new thread."""
        if self._is_closed:
            raise UsageError("the outbox is closed")
        thread = Thread(target=self.new_run(), name="outbox", daemon=True)
        thread.start()
        self._thread = thread  # not before: a thread that has not started cannot be joined

    def new_run(self) -> Run:
        """Return a run, to be called once; after ``close`` it returns at once."""
        with self._lock:
            if self._current is not None and not self._current.stop.is_set():
                raise UsageError("the outbox is running")
            self._current = Run(self._loop, self._turn)
            if self._is_closed:
                self._current.stop.set()
            return self._current

    def request_stop(self) -> Run | None:
        """Ask the current run to end after the entry that is being sent."""
        run = self._current
        if run is not None:
            run.stop.set()
            self.wake()
        return run

    def stop(self) -> None:
        """Stop after the entry that is being sent; returns when that has happened."""
        run = self.request_stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        if run is not None:
            run.wait()

    def close(self) -> None:
        """Stop for good. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.stop()

    # ------------------------------------------------------------------ the loop

    def _loop(self, stop: Flag) -> None:
        """Send, and wait for more, until ``stop`` is set and ``wake`` called.

        Starts without back-off each time; ``offline`` stays in effect. One thread at a time.
        """
        self._refused.clear()
        self._drain.wake_up()
        self._retry_all.set()
        unsubscribe = self._queue.subscribe(self._on_event)
        try:
            while not stop.is_set():
                self._wake.clear()
                if stop.is_set():
                    break
                if self._retry_all.is_set():
                    self._retry_all.clear()
                    self._backing_off.clear()
                pause = self._drain_all(stop) if self._is_online else self._idle_seconds
                self._rest(pause)
        finally:
            unsubscribe()

    def _rest(self, seconds: float) -> None:
        """Wait to be woken, and use the time to prune. A stop wakes too."""
        ends = monotonic() + seconds
        while not self._wake.is_set() and monotonic() < ends:
            if not self._queue.prune_if_due():
                # An event during the pruning has set the flag, and the wait returns at once.
                self._wake.wait(max(0.0, ends - monotonic()))
                return

    def _on_event(self, event: Event) -> None:
        if event.kind in _WAKE_EVENTS:
            self._wake.set()

    def _drain_all(self, stop: Flag) -> float:
        """Drain every user who may send; returns how long to wait if nothing happens."""
        pause, is_idle = self._idle_seconds, True
        for user_id in self._queue.users():
            if stop.is_set():
                break
            seconds = self._drain_user(user_id, stop)
            pause = min(pause, seconds)
            # A user may back off for days: the attempts of the others are reset all the same.
            is_idle &= seconds >= self._idle_seconds or user_id in self._backing_off
        if is_idle:
            self._drain.wake_up()
        return pause

    def _drain_user(self, user_id: str, stop: Flag) -> float:
        """Drain one user; returns after how long to do so again."""
        back_off = self._backing_off.get(user_id)
        if back_off is not None and (left := back_off.until - monotonic()) > 0:
            return left
        if not self._may_send(user_id):
            return self._idle_seconds
        report = self._send(user_id, stop)
        if report is None or report.ended is Ended.OFFLINE:
            return self._start_back_off(user_id)
        self._backing_off.pop(user_id, None)
        if report.ended is Ended.SIGNED_OUT:
            self._refused[user_id] = self._current_token(user_id)
        if report.ended is Ended.TIME_UP:
            return 0.0
        due = report.next_due_seconds
        return self._idle_seconds if due is None else due

    def _send(self, user_id: str, stop: Flag) -> DrainReport | None:
        """Run one drain; None if it raised."""
        try:
            return self._drain.run(user_id, max_seconds=SLICE_SECONDS, wait=False, stop=stop)
        except FileBusyError:
            _log.warning("the outbox is busy; trying again soon")
        except Exception:  # noqa: BLE001 - the app's token function may raise anything
            _log.exception("a drain failed; trying again later")
        return None

    def _start_back_off(self, user_id: str) -> float:
        """Back off from a user, each time for longer; returns for how long."""
        before = self._backing_off.get(user_id)
        failures = 1 if before is None else before.failures + 1
        seconds = self._back_off.delay_seconds(failures, random=self._chance())
        self._backing_off[user_id] = _BackOff(failures, monotonic() + seconds)
        return seconds

    def _may_send(self, user_id: str) -> bool:
        """Return whether a user whose token was refused has another one by now."""
        if user_id not in self._refused:
            return True
        token = self._current_token(user_id)
        if token is None or token == self._refused[user_id]:
            return False
        del self._refused[user_id]
        return True

    def _current_token(self, user_id: str) -> str | None:
        try:
            return bearer_token(self._token, user_id)
        except Exception:  # noqa: BLE001 - the app's own function
            _log.exception("the token function failed")
            return None
