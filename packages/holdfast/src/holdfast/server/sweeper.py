"""Deletes expired records in small batches, so that live traffic is not slowed down."""

import asyncio
import contextvars
import logging
from contextlib import suppress
from typing import Final

from holdfast.errors import StoreError
from holdfast.ports import Clock, Metrics, Store, SweepMetrics

__all__ = ["Sweeper"]

_BATCH: Final = 500
# Between batches the sweep sleeps as long as the batch took: at most half of one connection's time.
_MIN_PAUSE_SECONDS: Final = 0.005

_log = logging.getLogger("holdfast.sweep")


class Sweeper:
    """Deletes expired records periodically. Several processes may sweep at the same time."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics | None = None,
        *,
        every_seconds: float | None = None,
    ) -> None:
        """With ``every_seconds`` None, ``start`` does nothing."""
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweep periodically in a background task."""
        if self._every_seconds is not None and self._task is None:
            if isinstance(self._metrics, SweepMetrics):
                self._metrics.sweep_started()
            # Not in the context of the request that has opened the store: its thread will have
            # ended, and stores with sync connections would wait for it.
            self._task = asyncio.create_task(
                self._forever(self._every_seconds), context=contextvars.Context()
            )

    async def stop(self) -> None:
        """Cancel the background task."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def sweep(self) -> int:
        """Delete all records expired as of now; return how many."""
        started = self._clock.monotonic()
        cutoff = self._clock.now()
        deleted = 0
        while True:
            batch_started = self._clock.monotonic()
            batch = await self._store.sweep(cutoff, _BATCH)
            deleted += batch
            if batch < _BATCH:
                break
            took = self._clock.monotonic() - batch_started
            await asyncio.sleep(max(_MIN_PAUSE_SECONDS, took))
        if self._metrics is not None:
            self._metrics.swept(deleted, self._clock.monotonic() - started)
        return deleted

    async def _forever(self, every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            try:
                deleted = await self.sweep()
            except StoreError as error:
                _log.warning(
                    "the sweep failed and will be repeated at the next interval: %s", error
                )
            else:
                _log.info("sweep", extra={"records": deleted})
