"""The calls of an outbox for asyncio: waits for disk or network happen on threads."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from threading import Event as Flag
from typing import Any, Protocol, TypeVar

from msgspec import UNSET

from onceward_outbox.drain_state import DrainReport
from onceward_outbox.entry import Entry, NewEntry, Resolution, ResolutionName
from onceward_outbox.event_stream import Publisher
from onceward_outbox.events import Event, Listener
from onceward_outbox.outcome_wait import wait_for_outcome_async
from onceward_outbox.user_outbox import UserOutbox

__all__ = ["AsyncCalls", "AsyncUserOutbox", "drain_on_thread", "finished"]

_Result = TypeVar("_Result")


class _Outbox(Protocol):
    """An outbox, or that of one user."""

    def enqueue(self, new: NewEntry, *, coalesce: bool = False) -> Entry: ...

    def enqueue_many(self, news: Iterable[NewEntry], *, coalesce: bool = False) -> list[Entry]: ...

    def resolve(
        self, entry_id: str, how: Resolution | ResolutionName, *, payload: Any = UNSET
    ) -> Entry: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]: ...


class _Entries(Protocol):
    def get(self, entry_id: str) -> Entry: ...

    def subscribe(self, listener: Listener) -> Callable[[], None]: ...


class AsyncCalls:
    """The calls that the outbox of all users and that of one user have in common."""

    def __init__(self, outbox: _Outbox, entries: _Entries) -> None:
        """Wrap an outbox, and its entries."""
        self._outbox = outbox
        self._entries = entries

    async def enqueue(self, new: NewEntry, *, coalesce: bool = False) -> Entry:
        """Queue one mutation durably."""
        return await asyncio.to_thread(self._outbox.enqueue, new, coalesce=coalesce)

    async def enqueue_many(
        self, news: Iterable[NewEntry], *, coalesce: bool = False
    ) -> list[Entry]:
        """Queue several mutations in one commit."""
        return await asyncio.to_thread(self._outbox.enqueue_many, list(news), coalesce=coalesce)

    async def resolve(
        self, entry_id: str, how: Resolution | ResolutionName, *, payload: Any = UNSET
    ) -> Entry:
        """End a conflict as a person has decided."""
        return await asyncio.to_thread(self._outbox.resolve, entry_id, how, payload=payload)

    async def wait(self, entry_id: str, timeout: float | None = None) -> Entry:  # noqa: ASYNC109
        """Wait until an entry has an outcome, without a thread. See ``OutboxQueue.wait``."""
        return await wait_for_outcome_async(self._entries, entry_id, timeout)

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Yield the events from now on: ``async with outbox.events() as events: async for …``."""
        return _events_of(self._outbox)


class AsyncUserOutbox(AsyncCalls):
    """``UserOutbox`` for asyncio: waits for disk or network happen on threads."""

    def __init__(self, outbox: UserOutbox) -> None:
        """Wrap the outbox of a user."""
        super().__init__(outbox, outbox)
        # The outbox that was given, for calls that are not here.
        self.outbox = outbox

    async def drain(
        self, *, max_seconds: float | None = None, wait: bool | None = None
    ) -> DrainReport:
        """Send now. If the task is cancelled, the entry that is being sent is finished first."""
        return await drain_on_thread(partial(self.outbox.drain, max_seconds=max_seconds, wait=wait))


async def drain_on_thread(drain: Callable[..., DrainReport]) -> DrainReport:
    """Run a drain on a thread; a cancellation sets its ``stop`` and waits until it has ended."""
    stop = Flag()
    work = asyncio.ensure_future(asyncio.to_thread(drain, stop=stop))
    return await finished(work, stop.set)


@asynccontextmanager
async def _events_of(publisher: Publisher) -> AsyncIterator[AsyncIterator[Event]]:
    loop = asyncio.get_running_loop()
    events: asyncio.Queue[Event] = asyncio.Queue()

    def on_event(event: Event) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    async def stream() -> AsyncIterator[Event]:
        while True:
            yield await events.get()

    unsubscribe = publisher.subscribe(on_event)
    try:
        yield stream()
    finally:
        unsubscribe()


async def finished(work: "asyncio.Future[_Result]", stop: Callable[[], object]) -> _Result:
    """Wait for work on a thread; a cancellation stops it and waits until it has ended."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stop()
        await work
        raise
