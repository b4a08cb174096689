"""Enqueues periodic jobs, once per slot of their schedule.

There is no leader, lock or table of schedules: every worker enqueues the slot's job, and the job's
key, which contains the slot, admits only the first. If no worker ran during the newest slot,
its job is enqueued late; older slots are skipped.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from onceward.errors import StoreError
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import job_id, job_key
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry, Periodic
from onceward.tenants import SYSTEM_TENANT
from onceward_protocol.ids import new_request_id

# The database's clock may be set; a shorter sleep notices that sooner.
_MAX_SLEEP_SECONDS: Final = 60.0
_ERROR_SECONDS: Final = 5.0

_log = logging.getLogger("onceward.jobs")


def slot_job_id(periodic: Periodic, slot: datetime) -> str:
    """Return the id of the job that runs a slot."""
    return job_id(job_key(SYSTEM_TENANT, periodic.queue, periodic.type, slot.isoformat()))


class PeriodicEnqueuer:
    """Enqueues a job for each slot that begins."""

    def __init__(
        self,
        job_store: JobStore,
        registry: JobRegistry,
        *,
        notify: Callable[[], None],
        queues: Sequence[str] | None = None,
    ) -> None:
        """Use the registry's schedules of these queues; None means all queues."""
        self._job_store = job_store
        self._registry = registry
        self._schedules = [
            each for each in registry.periodic if queues is None or each.queue in queues
        ]
        self._notify = notify
        self._seen: dict[Periodic, datetime] = {}

    async def run(self) -> None:
        if not self._schedules:
            return
        while True:
            try:
                seconds = await self.enqueue_due()
            except StoreError as error:
                _log.warning("periodic jobs cannot be enqueued, trying again: %s", error)
                seconds = _ERROR_SECONDS
            except Exception:  # noqa: BLE001 - the loop must go on with the next slot
                _log.exception("periodic jobs cannot be enqueued, trying again")
                seconds = _ERROR_SECONDS
            await asyncio.sleep(min(seconds, _MAX_SLEEP_SECONDS))

    async def enqueue_due(self) -> float:
        """Enqueue every slot that has begun; return the seconds until the next one begins."""
        now = await self._job_store.now()
        for periodic in self._schedules:
            slot = periodic.schedule.slot(now)
            if self._seen.get(periodic) != slot:
                await self._enqueue(periodic, slot)
                self._seen[periodic] = slot
        slots = [periodic.schedule.next_slot(now) for periodic in self._schedules]
        return max(0.05, (min(slots, default=now) - now).total_seconds())

    async def _enqueue(self, periodic: Periodic, slot: datetime) -> None:
        request_id = new_request_id()
        job = new_job(
            periodic.type,
            periodic.payload,
            defaults=self._registry.defaults_for(periodic.type),
            queue=periodic.queue,
            resource_id=slot.isoformat(),
            cause=Cause(SYSTEM_TENANT, "clock", request_id, request_id),
        )
        # A slot whose job was dead-lettered has run, too; an operator may requeue it.
        if await self._job_store.read("find_job", {"tenant": job.tenant, "job_id": job.id}):
            return
        async with self._job_store.transaction() as tx:
            await self._job_store.enqueue(tx, job)
        self._notify()
