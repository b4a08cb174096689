"""Jobs that wrote nothing share the commit of their markers: one statement, one fsync for many."""

import asyncio

from holdfast.core.job import Lease
from holdfast.errors import LeaseLostError
from holdfast.jobs.job_store import JobStore

__all__ = ["Completions"]

_AT_ONCE = 500


class Completions:
    """Collects finished jobs while a commit is under way, and commits them together after it."""

    def __init__(self, table: JobStore, *, worker: str) -> None:
        """Write markers in this worker's name."""
        self._table = table
        self._worker = worker
        self._waiting: list[tuple[Lease, str | None, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, lease: Lease, result: str | None) -> None:
        """Return when the marker is on the disk. Raises ``LeaseLostError`` or the store's error."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, result, future))
        if self._task is None:
            self._task = asyncio.create_task(self._commit())
        await future

    async def _commit(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # let those that finish in this very moment come along
                batch, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
                try:
                    held = await self._table.complete_alone(
                        ((lease, result) for lease, result, _ in batch), worker=self._worker
                    )
                except Exception as error:  # noqa: BLE001 - each one is told
                    for _, _, future in batch:
                        if not future.done():
                            future.set_exception(error)
                    continue
                for lease, _, future in batch:
                    if future.done():
                        continue
                    if (lease.tenant, lease.job_id) in held:
                        future.set_result(None)
                    else:
                        future.set_exception(LeaseLostError("the lease was lost before the commit"))
        finally:
            self._task = None
