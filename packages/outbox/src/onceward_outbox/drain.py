"""The drain: claim → build the request → send → classify the response → record the outcome.

``drain_run`` does this for one user; here is what is configured once and known about the server.
"""

from threading import Event as Flag
from typing import Final, Unpack

from onceward_outbox.backoff import Outages, RoundTrips
from onceward_outbox.batch_offer import Batches
from onceward_outbox.drain_run import DrainRun, Limits, Server
from onceward_outbox.drain_state import DrainReport
from onceward_outbox.exchanges import Exchanges
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.responses import Token
from onceward_outbox.sender import Sender, SenderOptions
from onceward_outbox.transport import Transport
from onceward_protocol.clock import Clock, SystemClock

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
