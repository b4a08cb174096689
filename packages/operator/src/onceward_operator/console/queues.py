"""Pages about queues and workers, for operators of all tenants."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from onceward.app import Onceward
from onceward.errors import UsageError
from onceward.jobs.admin import JobAdmin, PausedQueue, PausedQueues, QueueDepth
from onceward.jobs.depth_reporter import MAX_COUNTED
from onceward.jobs.job_store import at
from onceward.ports import Store
from onceward.tenants import ALL_TENANTS
from onceward_operator.console.access import Role
from onceward_operator.console.jobs import job_sql
from onceward_operator.console.page import ConsoleError, Page, PageRequest, Redirected, Shown

__all__ = ["QueueState", "queue_pages", "read_queues"]

# How many jobs a page counts: it is loaded again every few seconds.
_BUDGET: Final = 1_000
# How many running jobs the page about workers reads, and how many lines it shows.
_SCANNED: Final = 1_000
_PAGE_ROWS: Final = 50


def queue_pages(onceward: Onceward[Any]) -> list[Page]:
    """Return the pages about queues and workers."""
    pages = _QueuePages(onceward)
    return [
        Page("queues", pages.all, title="Queues", needs_all_tenants=True, live=True),
        Page(
            "queues/pause", pages.pause, method="POST", role=Role.OPERATOR, needs_all_tenants=True
        ),
        Page(
            "queues/resume", pages.resume, method="POST", role=Role.OPERATOR, needs_all_tenants=True
        ),
        Page("workers", pages.workers, title="Workers", needs_all_tenants=True, live=True),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """How many jobs a queue has, and whether it is paused."""

    name: str
    depth: QueueDepth
    paused: PausedQueue | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """Jobs of one queue that a worker runs."""

    name: str
    queue: str
    jobs: int
    first_started_at: datetime
    first_lease_ends_at: datetime


class _QueuePages:
    def __init__(self, onceward: Onceward[Any]) -> None:
        self._registry = onceward.jobs
        self._notify = onceward.runtime.notifier.notify

    async def all(self, request: PageRequest) -> Shown:
        """List the queues that have jobs, a handler in this process, or are paused."""
        queues, most = await read_queues(request.store, self._registry.queues)
        return Shown("queues.html", {"queues": queues, "most": most})

    async def pause(self, request: PageRequest) -> Redirected:
        """Pause a queue."""
        queue = request.form.get("queue", "")
        try:
            is_paused = await self._paused(request).pause(
                queue, actor=request.actor, reason=request.reason()
            )
        except UsageError as error:
            raise ConsoleError(str(error)) from None
        notice = f"Queue {queue} is paused." if is_paused else f"Queue {queue} was paused already."
        return Redirected("queues", notice)

    async def resume(self, request: PageRequest) -> Redirected:
        """Resume a queue, and wake the workers."""
        queue = request.form.get("queue", "")
        is_resumed = await self._paused(request).resume(
            queue, actor=request.actor, reason=request.reason()
        )
        notice = f"Queue {queue} is resumed." if is_resumed else f"Queue {queue} was not paused."
        return Redirected("queues", notice)

    async def workers(self, request: PageRequest) -> Shown:
        """List the workers that hold leases, those with the longest running job first."""
        sql = job_sql(request.store, "leased_jobs", ALL_TENANTS)
        rows = await request.store.read(sql, {"scanned": _SCANNED, "most": _PAGE_ROWS})
        workers = [
            _Worker(
                name=row["worker"],
                queue=row["queue"],
                jobs=row["jobs"],
                first_started_at=at(row["first_started_at"]),
                first_lease_ends_at=at(row["first_lease_ends_at"]),
            )
            for row in rows
        ]
        return Shown("workers.html", {"workers": workers, "is_capped": len(rows) == _PAGE_ROWS})

    def _paused(self, request: PageRequest) -> PausedQueues:
        return PausedQueues(request.store, self._notify)


async def read_queues(store: Store, names: Iterable[str] = ()) -> tuple[list[QueueState], int]:
    """Return the queues by name, and up to which number jobs of a queue were counted.

    Those are the queues that have jobs, are paused, or are in ``names``.
    """
    depths, most = await JobAdmin(store).capped_depths(most=MAX_COUNTED, budget=_BUDGET)
    paused = {each.queue: each for each in await PausedQueues(store, lambda: None).all()}
    queues = [
        QueueState(name=name, depth=depths.get(name, QueueDepth()), paused=paused.get(name))
        for name in sorted({*depths, *paused, *names})
    ]
    return queues, most
