"""Who runs which key in this process, so that duplicates wait for a future, not for a database."""

import asyncio

from holdfast.core.idempotency_record import Record, RecordId

__all__ = ["InFlight"]


class InFlight:
    """One leader per key; everyone else waits, holding no connection."""

    def __init__(self) -> None:
        """Start with nothing running."""
        self._running: dict[RecordId, asyncio.Future[Record | None] | None] = {}

    def __len__(self) -> int:
        """Return how many keys are running."""
        return len(self._running)

    def lead(self, record_id: RecordId) -> bool:
        """Become the leader of this key, unless there is one."""
        if record_id in self._running:
            return False
        # The future is made only when someone waits: most keys never see a duplicate.
        self._running[record_id] = None
        return True

    async def wait(self, record_id: RecordId, seconds: float) -> Record | None:
        """Wait for the leader to end and return its record; None if it left without one.

        Raises ``TimeoutError`` when the leader takes longer.
        """
        future = self._running.get(record_id)
        if future is None:
            if record_id not in self._running:
                return None
            future = asyncio.get_running_loop().create_future()
            self._running[record_id] = future
        async with asyncio.timeout(seconds):
            # Shielded: one waiter's time-out must not end the wait of the others.
            return await asyncio.shield(future)

    def leave(self, record_id: RecordId, record: Record | None) -> None:
        """End the lead and hand the record, if there is one, to all who wait."""
        future = self._running.pop(record_id, None)
        if future is not None and not future.done():
            future.set_result(record)
