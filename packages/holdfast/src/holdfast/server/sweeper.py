"""The sweep: expired records go in small batches, so that live traffic does not notice."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from holdfast.errors import StoreError
from holdfast.ports import Clock, Metrics, Store

__all__ = ["Sweeper"]

_BATCH: Final = 500
# Between batches the sweep sleeps as long as the batch took: at most half of one connection's time.
_LEAST_PAUSE_SECONDS: Final = 0.005

_log = logging.getLogger("holdfast.sweep")


class Sweeper:
    """Deletes expired records every so often. Several processes may do so at once."""

    def __init__(
        self, store: Store, clock: Clock, metrics: Metrics, *, every_seconds: float | None
    ) -> None:
        """Take how often; None means only by hand."""
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sweep now and then in the background."""
        if self._every_seconds is not None and self._task is None:
            self._task = asyncio.create_task(self._forever(self._every_seconds))

    async def stop(self) -> None:
        """Stop after the batch that is running."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def sweep(self) -> int:
        """Delete everything expired as of now; returns how many records went."""
        started = self._clock.monotonic()
        cutoff = self._clock.now()
        gone = 0
        while True:
            batch_started = self._clock.monotonic()
            batch = await self._store.sweep(cutoff, _BATCH)
            gone += batch
            if batch < _BATCH:
                break
            took = self._clock.monotonic() - batch_started
            await asyncio.sleep(max(_LEAST_PAUSE_SECONDS, took))
        self._metrics.swept(gone, self._clock.monotonic() - started)
        return gone

    async def _forever(self, every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            try:
                gone = await self.sweep()
            except StoreError as error:
                _log.warning("sweep failed, next try as planned: %s", error)
            else:
                _log.info("sweep", extra={"records": gone})
