"""What follows from a write, later and once: counters, notifications, words to search.

A write changes one aggregate. All that concerns others is a job enqueued in its transaction.
"""

import unicodedata
from typing import Any, Final, Literal

from holdfast import Holdfast
from holdfast.jobs.context import JobContext
from holdfast.ports import Row
from holdfast_services.planning.repository import find, sql
from holdfast_services.settings import Settings

__all__ = [
    "COUNT",
    "INDEX",
    "NOTIFY",
    "QUEUE",
    "notify_assignee",
    "recount_projects",
    "register",
    "reindex_mission",
    "searchable",
]

QUEUE: Final = "planning"
COUNT: Final = "dashboard.count"
NOTIFY: Final = "assignment.tell"
INDEX: Final = "mission.index"


async def recount_projects(holdfast: Holdfast, *project_ids: str) -> None:
    """Have the counters of these projects made anew. One that waits is not made to wait twice.

    In the order of their ids: two writes that wait for each other's job would wait for ever.
    """
    for project_id in sorted(set(project_ids)):
        await holdfast.enqueue(COUNT, {"project_id": project_id}, queue=QUEUE, coalesce=project_id)


async def reindex_mission(holdfast: Holdfast, mission_id: str) -> None:
    """Have a mission's words made anew."""
    await holdfast.enqueue(INDEX, {"mission_id": mission_id}, queue=QUEUE, coalesce=mission_id)


async def notify_assignee(
    holdfast: Holdfast, kind: Literal["assigned", "moved"], assignment: Row
) -> None:
    """Have the assignee told, once for this version of the assignment."""
    payload: dict[str, Any] = {
        "assignment_id": assignment["id"],
        "version": assignment["version"],
        "kind": kind,
        "mission_id": assignment["mission_id"],
        "recipient": assignment["assignee"],
    }
    about = f"{assignment['id']}:{assignment['version']}"
    await holdfast.enqueue(NOTIFY, payload, queue=QUEUE, resource_id=about)


def searchable(text: str) -> str:
    """Return a text as it is searched: without case, and in one spelling of its characters."""
    return unicodedata.normalize("NFKC", text).casefold()


def register(holdfast: Holdfast, _settings: Settings) -> None:
    """Register the handlers."""

    @holdfast.jobs.handler(COUNT, queue=QUEUE, time_limit_seconds=120)
    async def count(job: JobContext) -> None:
        tx = job.transaction
        about = {"tenant": job.tenant, "project_id": job.payload["project_id"]}
        await tx.execute(sql("take_dashboard"), about | {"now": holdfast.clock.now()})
        # The time first: what was committed before it is in the counters, and perhaps more.
        as_of = holdfast.clock.now()
        counted = await tx.fetch_one(sql("count_project"), about)
        assert counted is not None  # noqa: S101 - counting nothing is a row of zeros
        await tx.execute(sql("save_dashboard"), about | dict(counted) | {"as_of": as_of})

    @holdfast.jobs.handler(NOTIFY, queue=QUEUE, time_limit_seconds=60)
    async def tell(job: JobContext) -> None:
        now = holdfast.clock.now()
        values = job.payload | {"tenant": job.tenant, "now": now}
        await job.transaction.execute(sql("tell"), values)

    @holdfast.jobs.handler(INDEX, queue=QUEUE, time_limit_seconds=60)
    async def index(job: JobContext) -> None:
        tx = job.transaction
        mission_id = str(job.payload["mission_id"])
        about = {"tenant": job.tenant, "mission_id": mission_id}
        mission = await find(tx, "mission", job.tenant, mission_id)
        if mission is None:
            await tx.execute(sql("forget_words"), about)
            return
        words = searchable("\n".join((mission["title"], mission["description"] or "")))
        values = about | {"words": words, "version": mission["version"]}
        await tx.execute(sql("save_words"), values)
