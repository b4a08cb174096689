"""The outbox as an app uses it: one file, one server, and the drain between them.

::

    outbox = Outbox.open("outbox.db", server="https://api.example", token=current_token)
    outbox.enqueue(NewEntry(user_id="ada", operation="create", …))
    outbox.start()          # sends in the background from now on
    …
    outbox.close()
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Iterable
from functools import partial
from threading import Event as Flag
from threading import Lock, RLock, Thread
from typing import Any, Self, TypedDict, Unpack

from msgspec import UNSET

from onceward_outbox.async_calls import AsyncCalls, AsyncUserOutbox, drain_on_thread, finished
from onceward_outbox.background import IDLE_SECONDS, BackgroundDrain
from onceward_outbox.backoff import Outages, Retry, RoundTrips
from onceward_outbox.batch_offer import Batches
from onceward_outbox.conflicts import Merge, resolve_conflict
from onceward_outbox.drain import Drain
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entry import (
    Entry,
    NewEntry,
    Reason,
    ReasonName,
    Resolution,
    ResolutionName,
    Status,
    StatusName,
)
from onceward_outbox.errors import UsageError
from onceward_outbox.event_stream import EventStream, Publisher
from onceward_outbox.events import Listener
from onceward_outbox.maintenance import PayloadMigration
from onceward_outbox.profile import Profile
from onceward_outbox.queue import OutboxQueue
from onceward_outbox.sender import AtSend, Token
from onceward_outbox.settings import QueueSettings
from onceward_outbox.transport import HttpTransport, Transport
from onceward_outbox.user_outbox import UserOutbox
from onceward_protocol.clock import SystemClock
from onceward_protocol.retry import DEVICE, RetryPolicy

__all__ = ["AsyncOutbox", "AsyncUserOutbox", "Outbox", "OutboxOptions"]


class _Run:
    """One background run. It may be stopped before its thread has started."""

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


class OutboxOptions(TypedDict, total=False):
    """Options of ``Outbox`` that ``Outbox.open`` passes on."""

    # The app's own conflict strategy, for entries with the strategy ``merge``.
    merge: Merge | None
    # Called before each send; it may replace the request or refuse it.
    at_send: AtSend | None
    # Delays between attempts, in place of the profile's.
    retry: Retry | None
    # How long the background drain sleeps when there is nothing to send.
    idle_seconds: float
    # Delays after the server was not reachable.
    back_off: RetryPolicy


class Outbox:
    """A queue, the server it is for, and the drain that sends from one to the other."""

    def __init__(
        self,
        queue: OutboxQueue,
        transport: Transport,
        token: Token = None,
        *,
        merge: Merge | None = None,
        at_send: AtSend | None = None,
        retry: Retry | None = None,
        idle_seconds: float = IDLE_SECONDS,
        back_off: RetryPolicy = DEVICE,
    ) -> None:
        """Use ``open`` unless you need your own queue or transport."""
        # The file, with every operation on it.
        self.queue = queue
        self._transport = transport
        self._streams: list[EventStream] = []

        outages = Outages(SystemClock().monotonic)
        round_trips = RoundTrips.of(queue.settings)
        batches = Batches(queue.settings, SystemClock().monotonic)

        def new_drain() -> Drain:
            return Drain(
                queue,
                transport,
                token,
                merge=merge,
                at_send=at_send,
                retry=retry,
                outages=outages,
                round_trips=round_trips,
                batches=batches,
            )

        self._new_drain = new_drain
        self._background = BackgroundDrain(
            queue, new_drain(), token, idle_seconds=idle_seconds, back_off=back_off
        )
        self._is_closed = False
        self._lock = Lock()
        self._turn = Lock()
        self._run: _Run | None = None
        self._thread: Thread | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        server: str,
        token: Token = None,
        users: Iterable[str] = (),
        passphrase: str | bytes | None = None,
        allow_weak_passphrase: bool = False,
        listeners: Iterable[Listener] = (),
        settings: QueueSettings | None = None,
        payloads: PayloadMigration | None = None,
        profiles: Iterable[Profile] = (),
        tls: ssl.SSLContext | None = None,
        allow_http: bool = False,
        **options: Unpack[OutboxOptions],
    ) -> Self:
        """Open or create the file, for one server.

        ``token`` is a text, or a function that returns the current token of a user, None if they
        are not signed in. ``users`` are added to the queue.
        ``passphrase``, ``allow_weak_passphrase``, ``settings``, ``payloads`` and ``profiles`` are
        those of ``OutboxQueue.open``, ``tls`` and ``allow_http`` are those of ``HttpTransport``,
        and ``options`` are those of the class itself.
        """
        transport = HttpTransport(server, tls=tls, allow_http=allow_http)
        try:
            queue = OutboxQueue.open(
                path,
                passphrase=passphrase,
                allow_weak_passphrase=allow_weak_passphrase,
                listeners=listeners,
                settings=settings,
                payloads=payloads,
                profiles=profiles,
            )
        except BaseException:
            transport.close()
            raise
        outbox = cls(queue, transport, token, **options)
        try:
            for user_id in users:
                queue.add_user(user_id)
        except BaseException:
            outbox.close()
            raise
        return outbox

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop sending after the current entry, and close the file. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.stop()
        for stream in self._streams:
            stream.close()
        self.queue.close()
        if isinstance(self._transport, HttpTransport):
            self._transport.close()

    # ------------------------------------------------------------------ the queue

    def enqueue(self, new: NewEntry, *, coalesce: bool = False) -> Entry:
        """Queue one mutation durably. See ``OutboxQueue.enqueue``."""
        return self.queue.enqueue(new, coalesce=coalesce)

    def enqueue_many(self, news: Iterable[NewEntry], *, coalesce: bool = False) -> list[Entry]:
        """Queue several mutations in one commit."""
        return self.queue.enqueue_many(news, coalesce=coalesce)

    def resolve(
        self, entry_id: str, how: Resolution | ResolutionName, *, payload: Any = UNSET
    ) -> Entry:
        """End a conflict as a person has decided. See ``OutboxQueue.resolve``."""
        return resolve_conflict(self.queue, self.queue.get(entry_id), how, payload=payload)

    def retry_all(
        self,
        user_id: str,
        *,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Retry all failed entries that match. See ``OutboxQueue.retry_all``."""
        return self.queue.retry_all(user_id, reason=reason, code=code, dry_run=dry_run)

    def discard_all(
        self,
        user_id: str,
        *,
        status: Status | StatusName | Iterable[Status | StatusName] = Status.FAILED,
        reason: Reason | ReasonName | None = None,
        code: str | None = None,
        with_dependents: bool = False,
        dry_run: bool = False,
    ) -> list[Entry]:
        """Discard all failed entries that match. See ``OutboxQueue.discard_all``."""
        return self.queue.discard_all(
            user_id,
            status=status,
            reason=reason,
            code=code,
            with_dependents=with_dependents,
            dry_run=dry_run,
        )

    def wait(self, entry_id: str, timeout: float | None = None) -> Entry:
        """Wait until an entry has an outcome. See ``OutboxQueue.wait``."""
        return self.queue.wait(entry_id, timeout)

    def for_user(self, user_id: str) -> UserOutbox:
        """Return the outbox as one user may see it: for the session of a signed-in person."""
        return UserOutbox(self.queue, user_id, self.drain, self._open_stream)

    # ------------------------------------------------------------------ sending

    def drain(
        self,
        user_id: str,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
        stop: Flag | None = None,
    ) -> DrainReport:
        """Send now, on this thread. See ``Drain.run``. Prunes a batch if there is time left."""
        report = self._new_drain().run(user_id, max_seconds=max_seconds, wait=wait, stop=stop)
        if report.ended not in (Ended.STOPPED, Ended.TIME_UP):
            self.queue.prune_if_due()
        return report

    def run_forever(self) -> None:
        """Send in a loop, on this thread, until ``stop`` is called from another.

        May be called again after that. When the outbox is closed it returns at once.
        """
        self._new_run()()

    def start(self) -> None:
        """Send in the background, on a new thread."""
        if self._is_closed:
            raise UsageError("the outbox is closed")
        thread = Thread(target=self._new_run(), name="outbox", daemon=True)
        thread.start()
        self._thread = thread  # not before: a thread that has not started cannot be joined

    def stop(self) -> None:
        """Stop after the entry that is being sent; returns when that has happened."""
        run = self._request_stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        if run is not None:
            run.wait()

    def _new_run(self) -> "_Run":
        with self._lock:
            if self._run is not None and not self._run.stop.is_set():
                raise UsageError("the outbox is running")
            self._run = _Run(self._background.run, self._turn)
            if self._is_closed:
                self._run.stop.set()
            return self._run

    def _request_stop(self) -> "_Run | None":
        run = self._run
        if run is not None:
            run.stop.set()
            self._background.wake()
        return run

    def wake(self) -> None:
        """Check at once whether there is something to send, after a sign-in for example."""
        self._background.wake()

    def online(self) -> None:
        """Note that the network is up: end every user's back-off and check the queue at once.

        New connections are used from then on: those to another network are dead. Entries that wait
        for a retry keep their delay, which the server may have set.
        """
        if isinstance(self._transport, HttpTransport):
            self._transport.reset()
        self._background.online()

    def offline(self) -> None:
        """Note that the network is down: nothing is sent until ``online``."""
        self._background.offline()

    # ------------------------------------------------------------------ events

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event; returns a function that unsubscribes it."""
        return self.queue.subscribe(listener)

    def events(self) -> EventStream:
        """Return the events from now on, as an iterator that waits for the next one."""
        return self._open_stream(self.queue)

    def _open_stream(self, publisher: Publisher) -> EventStream:
        stream = EventStream(publisher)
        self._streams = [kept for kept in self._streams if not kept.is_closed] + [stream]
        return stream


class AsyncOutbox(AsyncCalls):
    """The same for asyncio: waits for disk or network happen on threads."""

    def __init__(self, outbox: Outbox) -> None:
        """Wrap an outbox. The caller still closes it."""
        super().__init__(outbox, outbox.queue)
        # The outbox that was given.
        self.outbox = outbox

    async def drain(
        self, user_id: str, *, max_seconds: float | None = None, wait: bool | None = None
    ) -> DrainReport:
        """Send now. If the task is cancelled, the entry that is being sent is finished first."""
        send = partial(self.outbox.drain, user_id, max_seconds=max_seconds, wait=wait)
        return await drain_on_thread(send)

    async def run_forever(self) -> None:
        """Send in a loop until the task is cancelled or ``Outbox.stop`` is called."""
        # Made here, because a cancellation may come before the thread starts.
        run, stop = self.outbox._new_run(), self.outbox._request_stop  # noqa: SLF001 - same module
        await finished(asyncio.ensure_future(asyncio.to_thread(run)), stop)

    def for_user(self, user_id: str) -> AsyncUserOutbox:
        """Return the outbox as one user may see it."""
        return AsyncUserOutbox(self.outbox.for_user(user_id))
