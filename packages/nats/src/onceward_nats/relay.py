"""The relay publishes due jobs to the broker. The rows of the job table are its outbox.

A row stays until its job is done, whatever the broker does. A job is published first and marked as
published second. A relay that dies in between publishes it again with the same message id: the
broker drops duplicates for two minutes, and after that the lease prevents a second execution.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from onceward.errors import StoreError
from onceward.jobs.job_store import JobStore
from onceward.jobs.published_jobs import PublishedJobs
from onceward.ports import FaultPoints, Notifier
from onceward_nats.connection import Broker

__all__ = ["FAULT_POINTS", "Relay"]

# Where tests kill a relay, delay it or raise.
FAULT_POINTS: Final = ("relay_before_publish", "relay_before_mark")

# How many due jobs of one queue are published at most, and how many in one batch.
_FRONT: Final = 4000
_MAX_BATCH: Final = 500
# Between publishing and marking: workers lease the rows first, without waiting for the mark; and
# jobs that are committed meanwhile join the next batch.
_PAUSE_SECONDS: Final = 0.01
_LOOK_SECONDS: Final = 1.0
# A relay that hangs loses the lock after this time, which is longer than any response takes.
_LOCK_SECONDS: Final = 30.0

_log = logging.getLogger("onceward.jobs")


class Relay:
    """Publishes due jobs: after a notification, at the next due time, and every second."""

    def __init__(
        self,
        job_store: JobStore,
        queues: Sequence[str],
        broker: Broker,
        *,
        notifier: Notifier,
        name: str,
        again_after_seconds: float,
        faults: FaultPoints | None = None,
    ) -> None:
        """Relays with the same ``name`` and queues publish one at a time."""
        self._jobs = PublishedJobs(job_store)
        self._queues = tuple(queues)
        self._broker = broker
        self._notifier = notifier
        self._name = f"{name} {' '.join(sorted(queues))}"
        self._again_after_seconds = again_after_seconds
        self._faults = faults

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await self._broker.up.wait()
            try:
                seconds = await self._publish_batch()
            except StoreError as error:
                _log.warning("jobs cannot be published, trying again: %s", error)
                seconds = _LOOK_SECONDS
            except Exception:  # noqa: BLE001 - the loop must go on
                _log.exception("jobs cannot be published, trying again")
                seconds = _LOOK_SECONDS
            await self._notifier.wait(seconds)

    async def _publish_batch(self) -> float:
        """Publish one batch; return the seconds until the next."""
        found, published = await self.publish_due()
        if published < found:
            await asyncio.sleep(_LOOK_SECONDS)
            return 0.0
        if found:
            return 0.0
        due_in = await self._jobs.publish_due_in(self._queues)
        return _LOOK_SECONDS if due_in is None else min(_LOOK_SECONDS, due_in + 0.001)

    async def publish_due(self) -> tuple[int, int]:
        """Publish and mark one batch; return how many were due and how many were published."""
        async with self._jobs.relay_lock(self._name, idle_seconds=_LOCK_SECONDS) as is_locked:
            if not is_locked:  # the relay that holds the lock was notified, too
                return 0, 0
            jobs = await self._jobs.to_publish(
                self._queues,
                front=_FRONT,
                limit=_MAX_BATCH,
                again_after_seconds=self._again_after_seconds,
            )
            if not jobs:
                return 0, 0
            await self._reach("relay_before_publish")
            published = await self._broker.publish(jobs)
            if len(jobs) < _MAX_BATCH:
                await asyncio.sleep(_PAUSE_SECONDS)
            await self._reach("relay_before_mark")
            if published:
                await self._jobs.mark_published(published)
            return len(jobs), len(published)

    async def _reach(self, point: str) -> None:
        if self._faults is not None:
            await self._faults.reach(point)
