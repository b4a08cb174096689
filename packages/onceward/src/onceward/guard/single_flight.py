"""One leader per key in this process; duplicates wait on a future, not on the database."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from onceward.core.idempotency_record import Record, RecordId
from onceward.guard.request_thread import is_in_request_thread, run_in_request_thread

__all__ = ["SingleFlight"]


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
        """How many duplicates wait, of all tenants."""
        return sum(self._waiting.values())

    def lead(self, record_id: RecordId) -> bool:
        """Return True and lead this key, or False if it has a leader."""
        if record_id in self._running:
            return False
        # The future is created when the first duplicate waits: most keys never have one.
        self._running[record_id] = None
        return True

    async def wait(self, record_id: RecordId, seconds: float) -> Record | None:
        """Wait for the leader to end and return its record, or None if it committed none.

        Raises ``TimeoutError`` when the leader takes longer, and at once when too many duplicates
        of the tenant wait already.
        """
        with self.waiting(record_id.tenant):
            return await self._wait(record_id, seconds)

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

    async def _wait(self, record_id: RecordId, seconds: float) -> Record | None:
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
