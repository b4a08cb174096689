"""Periodic work: each slot is enqueued under a key of its own, so only the first one counts.

No leader, no lock, no table of schedules: every process tries, and the key of the slot decides, as
it does for any other job. A slot that everyone slept through is made up for; older ones are not.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Final

from holdfast.errors import StoreError
from holdfast.ids import new_request_id
from holdfast.jobs.enqueue import Cause, new_job
from holdfast.jobs.job_store import JobStore
from holdfast.jobs.registry import JobRegistry, Periodic

__all__ = ["SYSTEM_TENANT", "PeriodicWork"]

SYSTEM_TENANT: Final = "holdfast"
"""Whose jobs periodic ones are: the house's own. No API shows jobs to a tenant of that name."""

# Clocks are set now and then; who sleeps no longer than this notices soon.
_LONGEST_SLEEP_SECONDS: Final = 60.0
_TROUBLE_SECONDS: Final = 5.0

_log = logging.getLogger("holdfast.jobs")


class PeriodicWork:
    """Enqueues what the clock asks for."""

    def __init__(
        self,
        table: JobStore,
        registry: JobRegistry,
        *,
        notify: Callable[[], None],
        queues: Sequence[str] | None = None,
    ) -> None:
        """Read the registry's schedules for these queues: others' work would only pile up."""
        self._table = table
        self._registry = registry
        self._works = [work for work in registry.periodic if queues is None or work.queue in queues]
        self._ring = notify
        self._seen: dict[Periodic, datetime] = {}

    async def run(self) -> None:
        """Go on until cancelled."""
        if not self._works:
            return
        while True:
            try:
                seconds = await self.enqueue_due()
            except StoreError as error:
                _log.warning("periodic work cannot be enqueued, trying again: %s", error)
                seconds = _TROUBLE_SECONDS
            except Exception:  # noqa: BLE001 - whatever it is, the next slot is not to be missed
                _log.exception("periodic work cannot be enqueued, trying again")
                seconds = _TROUBLE_SECONDS
            await asyncio.sleep(min(seconds, _LONGEST_SLEEP_SECONDS))

    async def enqueue_due(self) -> float:
        """Enqueue every slot that has begun; returns in how many seconds the next one does."""
        now = await self._table.now()
        for work in self._works:
            slot = work.schedule.slot(now)
            if self._seen.get(work) != slot:
                await self._enqueue(work, slot)
                self._seen[work] = slot
        next_at = min(work.schedule.next_slot(now) for work in self._works)
        return max(0.05, (next_at - now).total_seconds())

    async def _enqueue(self, work: Periodic, slot: datetime) -> None:
        request_id = new_request_id()
        wishes = self._registry.wishes_of(work.type) | {"queue": work.queue}
        job = new_job(
            work.type,
            work.payload,
            resource_id=slot.isoformat(),
            cause=Cause(SYSTEM_TENANT, "clock", request_id, request_id),
            **wishes,
        )
        # A slot whose job is a dead letter has had its run, too: it is requeued by hand or not.
        if await self._table.look("find_job", {"tenant": job.tenant, "job_id": job.id}):
            return
        unit = await self._table.store.begin()
        try:
            await self._table.enqueue(unit.statements, job)
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)
        self._ring()
