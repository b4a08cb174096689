"""The page about periodic work: what runs when, the last run and the next one."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from onceward.app import Onceward
from onceward.jobs.admin import JobAdmin, JobView, PausedQueues
from onceward.jobs.periodic import slot_job_id
from onceward.jobs.registry import Periodic
from onceward.tenants import SYSTEM_TENANT
from onceward_operator.console.page import Page, PageRequest, Shown

__all__ = ["periodic_page"]

# How many of the newest slots are looked up until one is found that ran, or waits to.
_SLOTS: Final = 3
_MOMENT: Final = timedelta(microseconds=1)
# A worker may take that long to enqueue the job of a slot that has begun.
_LATE: Final = timedelta(minutes=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scheduled:
    type: str
    queue: str
    when: str
    # The job of the newest slot that has one.
    last: JobView | None
    # The newest slot, if there is no job for it.
    missed_at: datetime | None
    next_at: datetime


def periodic_page(onceward: Onceward[Any]) -> Page:
    """Return the page. It lists the schedules that this process knows."""

    async def show(request: PageRequest) -> Shown:
        schedules = [await _scheduled(request, each) for each in onceward.jobs.periodic]
        paused = await PausedQueues(request.store, lambda: None).all()
        return Shown(
            "periodic.html",
            {
                "schedules": schedules,
                "system_tenant": SYSTEM_TENANT,
                "paused": {each.queue for each in paused},
            },
        )

    return Page("periodic", show, title="Periodic work", needs_all_tenants=True)


async def _scheduled(request: PageRequest, periodic: Periodic) -> _Scheduled:
    """Look up the last run: the id of a job follows from its slot, so each look-up is of a key."""
    admin, schedule = JobAdmin(request.store), periodic.schedule
    newest = slot = schedule.slot(request.now)
    last = await admin.find_view(slot_job_id(periodic, slot), tenant=SYSTEM_TENANT)
    is_missed = last is None and request.now - newest > _LATE
    for _ in range(_SLOTS - 1):
        if last is not None:
            break
        slot = schedule.slot(slot - _MOMENT)
        last = await admin.find_view(slot_job_id(periodic, slot), tenant=SYSTEM_TENANT)
    return _Scheduled(
        type=periodic.type,
        queue=periodic.queue,
        when=schedule.describe(),
        last=last,
        missed_at=newest if is_missed else None,
        next_at=schedule.next_slot(request.now),
    )
