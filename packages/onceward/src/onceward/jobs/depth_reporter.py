"""Reports the depths of the queues to the metrics, at regular intervals."""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from onceward.errors import StoreError
from onceward.jobs.admin import JobAdmin, QueueDepth
from onceward.jobs.registry import JobRegistry
from onceward.ports import JobMetrics, Store
from onceward.stores.parts import JOBS

MAX_COUNTED: Final = 10_000
"""Gauges stop here: counting more would read a long queue again and again."""

_TIMEOUT_SECONDS: Final = 10.0
# Of a database that is slow, at most this share of the time is used.
_MAX_SHARE: Final = 0.01

_log = logging.getLogger("onceward.jobs")


class DepthReporter:
    """Sets the gauges ``onceward_jobs`` and ``onceward_job_oldest_seconds`` from the job tables.

    Scrapes read the gauges, not the tables: however often an app is scraped, the tables are read
    once per interval.
    """

    def __init__(
        self,
        store: Store,
        registry: JobRegistry,
        metrics: JobMetrics,
        *,
        every_seconds: float = 15.0,
    ) -> None:
        self._store = store
        self._admin = JobAdmin(store)
        self._registry = registry
        self._metrics = metrics
        self._every_seconds = every_seconds
        self._task: asyncio.Task[None] | None = None
        self._has_failed = False
        self._reported_at = -float("inf")

    def start(self) -> None:
        """Report now and then every ``every_seconds``; the store must be open."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="onceward-jobs-depths")

    async def stop(self) -> None:
        """Stop reporting. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def report(self, *, max_age_seconds: float = 0.0) -> float:
        """Set the gauges, unless that was done within ``max_age_seconds``; return the seconds used.

        A store that fails or takes too long is logged once; the gauges keep their values.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        if started - self._reported_at < max_age_seconds or not self._store.schema.has(JOBS):
            return 0.0
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                depths, _ = await self._admin.capped_depths(most=MAX_COUNTED)
        except Exception as error:  # noqa: BLE001 - metrics must not end an app
            if not self._has_failed:
                is_outage = isinstance(error, StoreError | TimeoutError)
                _log.warning(
                    "queue depths cannot be read, trying again: %s",
                    str(error) or type(error).__name__,
                    exc_info=None if is_outage else error,
                )
            self._has_failed = True
        else:
            self._has_failed = False
            self._reported_at = clock()
            # Queues without jobs are reported too: an alert needs a series before the first job.
            known = dict.fromkeys(self._registry.queues, QueueDepth())
            self._metrics.job_depths(
                {
                    queue: (depth.waiting, depth.running, depth.dead, depth.oldest_seconds)
                    for queue, depth in (known | depths).items()
                }
            )
        return clock() - started

    async def _run(self) -> None:
        while True:
            used_seconds = await self.report()
            await asyncio.sleep(max(self._every_seconds, used_seconds / _MAX_SHARE))
