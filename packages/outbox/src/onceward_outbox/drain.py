"""The drain: claim → build the request → send → classify the response → record the outcome.

``drain_run`` does this for one user; here is what is configured once and known about the server.
"""

from threading import Event as Flag
from typing import Final

from onceward_outbox.attempts import Retry
from onceward_outbox.batch_offer import Batches
from onceward_outbox.batch_sender import BatchSender
from onceward_outbox.conflicts import Merge
from onceward_outbox.drain_run import DrainRun
from onceward_outbox.drain_state import DrainReport
from onceward_outbox.exchanges import Exchanges
from onceward_outbox.outage import Outages
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.round_trips import RoundTrips
from onceward_outbox.sender import AtSend, Sender, Token
from onceward_outbox.transport import Transport
from onceward_protocol.clock import Clock, SystemClock
from onceward_protocol.fault_points import SyncFaultPoints

__all__ = ["FAULT_POINTS", "Drain"]

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
        merge: Merge | None = None,
        at_send: AtSend | None = None,
        retry: Retry | None = None,
        clock: Clock | None = None,
        fault_points: SyncFaultPoints | None = None,
        outages: Outages | None = None,
        round_trips: RoundTrips | None = None,
        batches: Batches | None = None,
    ) -> None:
        """Configure a drain; nothing is sent yet.

        ``merge`` decides conflicts of entries whose strategy is ``merge``. ``at_send`` returns
        headers that are made anew at each send. ``retry``, one policy or a function of the profile,
        replaces the profile's own. ``outages``, ``round_trips`` and ``batches`` are what is
        known about the server, for drains that share it.
        """
        self._queue = queue
        self._clock = clock or SystemClock()
        self._transport = transport
        self._server: str = getattr(transport, "origin", "")
        # With the path that comes before all others: another one may be another app.
        self._base_url: str = getattr(transport, "base_url", self._server)
        self._round_trips = round_trips or RoundTrips.of(queue.settings)
        # What is known about outages of the server.
        self.outages = outages or Outages(self._clock.monotonic)
        self._sender = Sender(
            queue,
            transport,
            token,
            merge=merge,
            at_send=at_send,
            retry=retry,
            clock=self._clock,
            fault_points=fault_points,
            outages=self.outages,
        )
        # What is known about batches to the server.
        self.batches = batches or Batches(queue.settings, self._clock.monotonic)
        self._batch_sender = BatchSender(queue, self._sender, self.batches, self.outages)

    def wake_up(self) -> None:
        """Reset the counts of attempts per wake-up."""
        self._sender.reset_attempts()
        self.batches.reset()

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
        holds, offer = self._queue.server_state(self._server, self._base_url)
        self.outages.restore(holds)
        self.batches.restore(offer)
        run = DrainRun(
            self._queue,
            self._sender,
            user_id,
            batch_sender=self._batch_sender,
            batches=self.batches,
            base_url=self._base_url,
            clock=self._clock,
            exchanges=Exchanges(self._transport),
            round_trips=self._round_trips,
            outages=self.outages,
            server=self._server,
            stop=stop or Flag(),
            max_seconds=float("inf") if max_seconds is None else max_seconds,
            waits=max_seconds is not None if wait is None else wait,
        )
        return run.run()
