"""One leader per key in this process; duplicates wait on a future, not on the database."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from onceward.errors import InProgressError
from onceward.guard.request import GuardedRequest
from onceward.guard.request_log import Reports
from onceward.guard.request_thread import is_in_request_thread, run_in_request_thread, sleep
from onceward.ports import Clock, Store
from onceward.records import Record, RecordId
from onceward.stores.sessions.gate import current_visit
from onceward_protocol.error_codes import CODES

T = TypeVar("T")

# Pauses between two attempts to claim a key that another process holds.
_POLL_FIRST_SECONDS: Final = 0.005
_POLL_MAX_SECONDS: Final = 0.25


class SingleFlight:
    """The keys whose handlers run in this process, each with one leader."""

    def __init__(self, waiting_per_tenant: int | None = None) -> None:
        """At most ``waiting_per_tenant`` duplicates of one tenant wait at a time."""
        # The value is None until the first duplicate waits.
        self._running: dict[RecordId, Any] = {}
        self._waiting_per_tenant = waiting_per_tenant
        self._waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return sum(self._waiting.values())

    def lead(self, record_id: RecordId) -> bool:
        """Return True and lead this key, or False if it has a leader."""
        if record_id in self._running:
            return False
        # The future is created when the first duplicate waits: most keys never have one.
        self._running[record_id] = None
        return True

    @contextmanager
    def waiting(self, tenant: str) -> Iterator[None]:
        """Count a duplicate that waits. Raises ``TimeoutError`` when too many of a tenant do."""
        count = self._waiting.get(tenant, 0)
        if self._waiting_per_tenant is not None and count >= self._waiting_per_tenant:
            raise TimeoutError(f"{count} duplicates of the tenant wait already")
        self._waiting[tenant] = count + 1
        try:
            yield
        finally:
            left = self._waiting[tenant] - 1
            if left:
                self._waiting[tenant] = left
            else:
                del self._waiting[tenant]

    async def wait(self, record_id: RecordId, seconds: float) -> Record | None:
        """Wait for the leader to end and return its record, or None if it committed none.

        Raises ``TimeoutError`` when the leader takes longer.
        """
        future = self._running.get(record_id)
        if future is None:
            if record_id not in self._running:
                return None
            future = (
                Future() if is_in_request_thread() else asyncio.get_running_loop().create_future()
            )
            self._running[record_id] = future
        if isinstance(future, Future):
            return await run_in_request_thread(lambda: future.result(seconds))
        async with asyncio.timeout(seconds):
            # Shielded: the time-out of one waiter must not cancel the others.
            record: Record | None = await asyncio.shield(future)
            return record

    def leave(self, record_id: RecordId, record: Record | None) -> None:
        """End the lead and pass its record, or None, to the duplicates that wait."""
        future = self._running.pop(record_id, None)
        if future is not None and not future.done():
            future.set_result(record)


class Duplicates:
    """How requests wait for another one with their key, or for their turn."""

    def __init__(
        self, store: Store, clock: Clock, in_flight: SingleFlight, reports: Reports
    ) -> None:
        self._store = store
        self._clock = clock
        self._in_flight = in_flight
        self.reports = reports

    def deadline_of(self, request: GuardedRequest) -> float:
        return self._clock.monotonic() + request.policy.wait.total_seconds()

    def in_progress(self, request: GuardedRequest) -> InProgressError:
        """Count a duplicate that has waited too long, and return its error."""
        code = CODES[InProgressError.kind]
        self.reports.outcome(request.endpoint, "in_progress")
        name = code.name(request.policy.error_format)
        self.reports.note(request, "in_progress", code.status, None, name)
        return InProgressError(
            "the first request with this key is still running"
            if request.sequence is None
            else "this request, or an earlier one of this client, is still running",
            retry_after_seconds=1,
        )

    async def wait_for_leader(
        self, request: GuardedRequest, record_id: RecordId, deadline: float
    ) -> Record | None:
        """Return the record that the leader has committed, or None."""
        seconds = max(0.0, deadline - self._clock.monotonic())
        return await self.wait(request, lambda: self._in_flight.wait(record_id, seconds))

    async def wait(self, request: GuardedRequest, work: Callable[[], Awaitable[T]]) -> T:
        """Wait for what ends with another request, without a connection.

        Raises ``InProgressError`` when it takes too long, or when too many of its tenant wait.
        """
        started = self._clock.monotonic()
        try:
            await self.release_connection()
            with self._in_flight.waiting(request.principal.tenant):
                return await work()
        except TimeoutError:
            raise self.in_progress(request) from None
        finally:
            waited = self._clock.monotonic() - started
            self.reports.metrics.waited(request.endpoint, waited)

    async def poll(self, request: GuardedRequest, pause: float, deadline: float) -> float:
        """Wait as a duplicate, unless the time is up or too many of its tenant wait.

        ``pause`` is what it returned before, 0 at first.
        """
        pause = min(pause * 2 or _POLL_FIRST_SECONDS, _POLL_MAX_SECONDS)
        seconds = min(pause, deadline - self._clock.monotonic())
        if seconds <= 0:
            raise self.in_progress(request)
        try:
            with self._in_flight.waiting(request.principal.tenant):
                await sleep(seconds)
        except TimeoutError:
            raise self.in_progress(request) from None
        return pause

    async def release_connection(self) -> None:
        """Return the connection that the sign-in of a sync app has read with, before a wait.

        If duplicates kept theirs, the first request could find none in the pool. Nor must they
        count as requests that are about to take one.
        """
        if self._store.has_thread_sessions:
            await self._store.release_connection()
        if self._store.is_gated:
            visit = current_visit()
            if visit is not None:
                visit.leave_without_connection()
