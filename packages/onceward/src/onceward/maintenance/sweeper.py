"""Deletes expired records and old rows in small batches, so as not to slow down live traffic."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from onceward.audit.chain import NO_KEYS, AuditKeys
from onceward.errors import ConfigurationError, StoreError
from onceward.maintenance.retention import Retention, delete_old_rows
from onceward.ports import Clock, Metrics, Store, SweepMetrics
from onceward.stores.clock import read_clock

_BATCH: Final = 500
# Between batches the sweep sleeps as long as the batch took: at most half of one connection's time.
_MIN_PAUSE_SECONDS: Final = 0.005
# Rows are kept for days: more often would find little.
_RETENTION_EVERY_SECONDS: Final = 86_400.0

_log = logging.getLogger("onceward.sweep")


class Sweeper:
    """Deletes expired records periodically, and old rows once a day.

    Several processes may sweep at the same time.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics | None = None,
        *,
        every_seconds: float | None = None,
        retention: Sequence[Retention] = (),
        audit_keys: AuditKeys = NO_KEYS,
    ) -> None:
        """With ``every_seconds`` None, ``start`` does nothing."""
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._every_seconds = every_seconds
        self._retention = retention
        self._audit_keys = audit_keys
        self._retention_due = 0.0
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
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def sweep(self, *, on_batch: Callable[[int], None] | None = None) -> int:
        """Delete all records expired as of now; return how many.

        ``on_batch`` gets the number so far.
        """
        await read_clock(self._store, self._clock)
        started = self._clock.monotonic()
        cutoff = self._clock.now()
        deleted = 0
        while True:
            batch_started = self._clock.monotonic()
            batch = await self._store.sweep(cutoff, _BATCH)
            deleted += batch
            if on_batch is not None:
                on_batch(deleted)
            if batch < _BATCH:
                break
            took = self._clock.monotonic() - batch_started
            await asyncio.sleep(max(_MIN_PAUSE_SECONDS, took))
        if self._metrics is not None:
            self._metrics.swept(deleted, self._clock.monotonic() - started)
        return deleted

    async def delete_old_rows(self) -> dict[str, int]:
        """Delete the rows that ``retention`` says are too old; return how many of each table."""
        now = self._clock.now()
        return {
            rule.table: await delete_old_rows(self._store, rule, now, self._audit_keys)
            for rule in self._retention
        }

    async def _forever(self, every_seconds: float) -> None:
        while True:
            await asyncio.sleep(every_seconds)
            try:
                deleted = await self.sweep()
                if self._retention and self._clock.monotonic() >= self._retention_due:
                    old = await self.delete_old_rows()
                    self._retention_due = self._clock.monotonic() + _RETENTION_EVERY_SECONDS
                    _log.info("retention", extra={f"{table}_rows": n for table, n in old.items()})
            except (StoreError, ConfigurationError) as error:
                _log.warning(
                    "the sweep failed and will be repeated at the next interval: %s", error
                )
            else:
                _log.info("sweep", extra={"records": deleted})
