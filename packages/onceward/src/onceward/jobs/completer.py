"""Batches the completions of jobs that wrote nothing: one statement and one fsync for many."""

import asyncio
from typing import Final

from onceward.errors import LeaseLostError
from onceward.jobs.job import Lease
from onceward.jobs.job_store import JobStore

_MAX_BATCH: Final = 500


class Completer:
    """Collects completed jobs while a commit is under way, then commits them together."""

    def __init__(self, job_store: JobStore, *, worker: str) -> None:
        self._job_store = job_store
        self._worker = worker
        self._waiting: list[tuple[Lease, str | None, asyncio.Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, lease: Lease, result: str | None) -> None:
        """Return when the completion is committed. Raises ``LeaseLostError``, ``StoreError``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, result, future))
        if self._task is None:
            self._task = asyncio.create_task(self._commit())
        await future

    async def _commit(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(0)  # jobs that finish in the same iteration join the batch
                batch, self._waiting = self._waiting[:_MAX_BATCH], self._waiting[_MAX_BATCH:]
                try:
                    held = await self._job_store.complete_alone(
                        ((lease, result) for lease, result, _ in batch), worker=self._worker
                    )
                except Exception as error:  # noqa: BLE001 - raised in every caller
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
