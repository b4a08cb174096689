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
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from threading import Condition, Lock, RLock, Thread
from threading import Event as Flag
from typing import Any, Final, Self, TypedDict, TypeVar, Unpack

from msgspec import UNSET

from holdfast.clock import SystemClock
from holdfast.core.outbox_entry import Entry, NewEntry, Resolution, ResolutionName
from holdfast.core.retry import DEVICE, RetryPolicy
from holdfast.errors import UsageError
from holdfast.outbox.background import IDLE_SECONDS, BackgroundDrain
from holdfast.outbox.conflicts import Merge, resolve_conflict
from holdfast.outbox.drain import Drain
from holdfast.outbox.drain_state import DrainReport, Ended
from holdfast.outbox.events import Event, Listener
from holdfast.outbox.maintenance import PayloadMigration
from holdfast.outbox.outage import Outages
from holdfast.outbox.profile import Profile
from holdfast.outbox.queue import OutboxQueue
from holdfast.outbox.round_trips import RoundTrips
from holdfast.outbox.sender import AtSend, Retry, Token
from holdfast.outbox.settings import QueueSettings
from holdfast.outbox.transport import HttpTransport, Transport

__all__ = ["AsyncOutbox", "EventStream", "Outbox", "OutboxOptions"]

_MAX_EVENTS: Final = 10_000
"""Events kept for a slow reader; beyond that the oldest are dropped."""

_Result = TypeVar("_Result")


class EventStream:
    """Events as an iterator that waits; it ends when the stream or the outbox is closed."""

    def __init__(self, queue: OutboxQueue) -> None:
        self._waiting: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._changed = Condition()
        # True after ``close``; events that have arrived can still be read.
        self.is_closed = False
        self._unsubscribe = queue.subscribe(self._on_event)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_closed)
            if not self._waiting:
                raise StopIteration
            return self._waiting.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; events that have arrived can still be read."""
        self._unsubscribe()
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def _on_event(self, event: Event) -> None:
        with self._changed:
            self._waiting.append(event)
            self._changed.notify()


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
        **options: Unpack[OutboxOptions],
    ) -> Self:
        """Open or create the file, for one server.

        ``token`` is a text, or a function that returns the current token of a user, None if they
        are not signed in. ``users`` are added to the queue.
        ``passphrase``, ``allow_weak_passphrase``, ``settings``, ``payloads`` and ``profiles`` are
        those of ``OutboxQueue.open``, ``tls`` is that of ``HttpTransport``, and ``options`` are
        those of the class itself.
        """
        transport = HttpTransport(server, tls=tls)
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
        stream = EventStream(self.queue)
        self._streams = [kept for kept in self._streams if not kept.is_closed] + [stream]
        return stream


class AsyncOutbox:
    """The same for asyncio: waits for disk or network happen on threads."""

    def __init__(self, outbox: Outbox) -> None:
        """Wrap an outbox. The caller still closes it."""
        # The outbox that was given.
        self.outbox = outbox

    async def enqueue(self, new: NewEntry, *, coalesce: bool = False) -> Entry:
        """Queue one mutation durably."""
        return await asyncio.to_thread(self.outbox.enqueue, new, coalesce=coalesce)

    async def enqueue_many(
        self, news: Iterable[NewEntry], *, coalesce: bool = False
    ) -> list[Entry]:
        """Queue several mutations in one commit."""
        return await asyncio.to_thread(self.outbox.enqueue_many, list(news), coalesce=coalesce)

    async def resolve(
        self, entry_id: str, how: Resolution | ResolutionName, *, payload: Any = UNSET
    ) -> Entry:
        """End a conflict as a person has decided."""
        return await asyncio.to_thread(self.outbox.resolve, entry_id, how, payload=payload)

    async def drain(
        self, user_id: str, *, max_seconds: float | None = None, wait: bool | None = None
    ) -> DrainReport:
        """Send now. If the task is cancelled, the entry that is being sent is finished first."""
        stop = Flag()
        work = asyncio.ensure_future(
            asyncio.to_thread(
                self.outbox.drain, user_id, max_seconds=max_seconds, wait=wait, stop=stop
            )
        )
        return await _finished(work, stop.set)

    async def run_forever(self) -> None:
        """Send in a loop until the task is cancelled or ``Outbox.stop`` is called."""
        # Made here, because a cancellation may come before the thread starts.
        run, stop = self.outbox._new_run(), self.outbox._request_stop  # noqa: SLF001 - same module
        await _finished(asyncio.ensure_future(asyncio.to_thread(run)), stop)

    @asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the events from now on: ``async with outbox.events() as events: async for …``."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def on_event(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        async def stream() -> AsyncIterator[Event]:
            while True:
                yield await events.get()

        unsubscribe = self.outbox.subscribe(on_event)
        try:
            yield stream()
        finally:
            unsubscribe()


async def _finished(work: "asyncio.Future[_Result]", stop: Callable[[], object]) -> _Result:
    """Wait for work on a thread; a cancellation stops it and waits until it has ended."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop()
        await work
        raise
