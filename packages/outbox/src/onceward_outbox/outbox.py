"""The outbox as an app uses it: one file, one server, and the drain between them.

::

    outbox = Outbox.open("outbox.db", server="https://api.example", token=current_token)
    outbox.enqueue("ada", "create", "note", "/notes", {"title": "Visit"})
    outbox.start()          # sends in the background from now on
    …
    outbox.close()
"""

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine, Iterable
from copy import copy
from functools import partial, wraps
from threading import Event as Flag
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar, Unpack

from msgspec import UNSET

from onceward_outbox.backoff import Outages, Retry, RoundTrips
from onceward_outbox.batch_offer import Batches
from onceward_outbox.conflicts import Merge, resolve_conflict
from onceward_outbox.drain import IDLE_SECONDS, BackgroundDrain, Drain
from onceward_outbox.drain_state import DrainReport, Ended
from onceward_outbox.entries import Entries, wait_for_outcome_async
from onceward_outbox.entry import Entry, Resolution, ResolutionName
from onceward_outbox.errors import UsageError
from onceward_outbox.events import AsyncEventStream, Listener
from onceward_outbox.queue import OutboxQueue, QueueOptions
from onceward_outbox.responses import AtSend, Token
from onceward_outbox.transport import HttpTransport, Transport
from onceward_protocol.clock import SystemClock
from onceward_protocol.retry import DEVICE, RetryPolicy

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class OutboxOptions(TypedDict, total=False):
    """Options of ``Outbox``."""

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


class OpenOptions(OutboxOptions, QueueOptions, total=False):
    """Options of ``Outbox.open``: those of the outbox and of its queue."""


class Outbox(Entries):
    """A queue, the server it is for, and the drain that sends from one to the other.

    It is for all users of the device, or bound to one by ``for_user``.
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
        idle_seconds: float = IDLE_SECONDS,
        back_off: RetryPolicy = DEVICE,
    ) -> None:
        """Use ``open`` unless you need your own queue or transport."""
        super().__init__(queue._file)  # noqa: SLF001 - an outbox is its queue, and a server
        self._queue = queue
        self._transport = transport
        self._new_drain = partial(
            Drain,
            queue,
            transport,
            token,
            merge=merge,
            at_send=at_send,
            retry=retry,
            outages=Outages(SystemClock().monotonic),
            round_trips=RoundTrips.of(queue.settings),
            batches=Batches(queue.settings, SystemClock().monotonic),
        )
        self._background = BackgroundDrain(
            queue, self._new_drain(), token, idle_seconds=idle_seconds, back_off=back_off
        )

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        server: str,
        token: Token = None,
        users: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
        allow_http: bool = False,
        **options: Unpack[OpenOptions],
    ) -> Self:
        """Open or create the file, for one server.

        ``token`` is a text, or a function that returns the current token of a user, None if they
        are not signed in. ``users`` are added to the queue. ``tls`` and ``allow_http`` are those of
        ``HttpTransport``, and ``options`` are those of the class itself and of its queue.
        """
        of_queue: dict[str, Any] = dict(options)
        names = OutboxOptions.__annotations__.keys() & of_queue.keys()
        own = {name: of_queue.pop(name) for name in names}
        transport = HttpTransport(server, tls=tls, allow_http=allow_http)
        try:
            queue = OutboxQueue.open(path, **of_queue)
        except BaseException:
            transport.close()
            raise
        outbox = cls(queue, transport, token, **own)
        try:
            for user_id in users:
                queue.add_user(user_id)
        except BaseException:
            outbox.close()
            raise
        return outbox

    def for_user(self, user_id: str) -> Self:
        """Return the outbox bound to a user: for the session of a signed-in person.

        None of its operations on entries sees or changes one of another user. It has the same file
        and the same background: ``start``, ``stop`` and ``close`` are about all users.
        """
        bound = copy(self)
        bound.user_id = self._user(user_id)
        return bound

    @property
    def queue(self) -> OutboxQueue:
        """The file, with every operation on it. Not of an outbox that is bound to a user."""
        if self.user_id is not None:
            raise UsageError("the queue is that of all users: use the outbox that is not bound")
        return self._queue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop sending after the current entry, and close the file. Idempotent."""
        self._background.close()
        self._queue.close()
        if isinstance(self._transport, HttpTransport):
            self._transport.close()

    def mappings(
        self, local_ids: Iterable[str], user_id: str | None = None
    ) -> dict[str, str | int]:
        """Return the server ids of those local ids that have one."""
        return self._queue.mappings(self._user(user_id), local_ids)

    def resolve(
        self, entry_id: str, how: Resolution | ResolutionName, *, payload: Any = UNSET
    ) -> Entry:
        """End a conflict as a person has decided. See ``OutboxQueue.resolve``."""
        return resolve_conflict(self._queue, self.get(entry_id), how, payload=payload)

    # ------------------------------------------------------------------ sending

    def drain(
        self,
        user_id: str | None = None,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
        stop: Flag | None = None,
    ) -> DrainReport:
        """Send now, on this thread. See ``Drain.run``. Prunes a batch if there is time left."""
        run = self._new_drain().run
        report = run(self._user(user_id), max_seconds=max_seconds, wait=wait, stop=stop)
        if report.ended not in (Ended.STOPPED, Ended.TIME_UP):
            self._queue.prune_if_due()
        return report

    def run_forever(self) -> None:
        """Send in a loop, on this thread, until ``stop`` is called from another.

        May be called again after that. When the outbox is closed it returns at once.
        """
        self._background.new_run()()

    def start(self) -> None:
        """Send in the background, on a new thread."""
        self._background.start()

    def stop(self) -> None:
        """Stop after the entry that is being sent; returns when that has happened."""
        self._background.stop()

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


def _on_thread(
    method: Callable[Concatenate[Outbox, _P], _Result],
) -> Callable[Concatenate["AsyncOutbox", _P], Coroutine[Any, Any, _Result]]:
    """Return a method of ``Outbox`` for asyncio."""

    @wraps(method)
    async def call(self: "AsyncOutbox", /, *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        return await asyncio.to_thread(method, self.outbox, *args, **kwargs)

    return call


class AsyncOutbox:
    """``Outbox`` for asyncio, with the same methods: waits for disk or network happen on threads.

    ``async with`` closes the outbox at the end.
    """

    def __init__(self, outbox: Outbox) -> None:
        # The outbox that was given.
        self.outbox = outbox

    def for_user(self, user_id: str) -> Self:
        """Return the outbox bound to a user. See ``Outbox.for_user``."""
        return type(self)(self.outbox.for_user(user_id))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    enqueue = _on_thread(Outbox.enqueue)
    enqueue_many = _on_thread(Outbox.enqueue_many)
    get = _on_thread(Outbox.get)
    by_key = _on_thread(Outbox.by_key)
    by_local_id = _on_thread(Outbox.by_local_id)
    entries = _on_thread(Outbox.entries)
    next_eligible = _on_thread(Outbox.next_eligible)
    next_due_seconds = _on_thread(Outbox.next_due_seconds)
    blocked_by = _on_thread(Outbox.blocked_by)
    dependents = _on_thread(Outbox.dependents)
    attempts = _on_thread(Outbox.attempts)
    mappings = _on_thread(Outbox.mappings)
    unsent = _on_thread(Outbox.unsent)
    unsettled = _on_thread(Outbox.unsettled)
    in_flight = _on_thread(Outbox.in_flight)
    stats = _on_thread(Outbox.stats)
    retry = _on_thread(Outbox.retry)
    retry_all = _on_thread(Outbox.retry_all)
    edit_payload = _on_thread(Outbox.edit_payload)
    resolve = _on_thread(Outbox.resolve)
    cancel = _on_thread(Outbox.cancel)
    discard = _on_thread(Outbox.discard)
    discard_all = _on_thread(Outbox.discard_all)
    purge_user = _on_thread(Outbox.purge_user)
    start = _on_thread(Outbox.start)
    stop = _on_thread(Outbox.stop)
    wake = _on_thread(Outbox.wake)
    online = _on_thread(Outbox.online)
    offline = _on_thread(Outbox.offline)
    close = _on_thread(Outbox.close)

    async def wait(self, entry_id: str, timeout: float | None = None) -> Entry:  # noqa: ASYNC109
        """Wait until an entry has an outcome, without a thread. See ``Outbox.wait``."""
        return await wait_for_outcome_async(self.outbox, entry_id, timeout)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event, on its thread. See ``Outbox.subscribe``."""
        return self.outbox.subscribe(listener)

    def events(self) -> AsyncEventStream:
        """Return the events from now on: ``async for event in outbox.events()``."""
        return AsyncEventStream(self.outbox)

    async def drain(
        self,
        user_id: str | None = None,
        *,
        max_seconds: float | None = None,
        wait: bool | None = None,
    ) -> DrainReport:
        """Send now. If the task is cancelled, the entry that is being sent is finished first."""
        stop = Flag()
        drain = partial(self.outbox.drain, user_id, max_seconds=max_seconds, wait=wait, stop=stop)
        return await _finished(drain, stop.set)

    async def run_forever(self) -> None:
        """Send in a loop until the task is cancelled or ``Outbox.stop`` is called."""
        background = self.outbox._background  # noqa: SLF001 - same module
        # Made here, because a cancellation may come before the thread starts.
        await _finished(background.new_run(), background.request_stop)


async def _finished(work: Callable[[], _Result], stop: Callable[[], object]) -> _Result:
    """Do work on a thread; a cancellation stops it and waits until it has ended."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stop()
        await running
        raise
