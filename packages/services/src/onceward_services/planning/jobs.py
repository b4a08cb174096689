"""Jobs of planning: dashboard counters, notifications, webhooks, search index.

A write changes one aggregate. Changes to anything else are jobs enqueued in its transaction.
"""

import unicodedata
from datetime import timedelta
from typing import Any, Final

from onceward import Onceward
from onceward.jobs.context import JobContext
from onceward.ports import Row
from onceward_protocol.ids import new_id
from onceward_protocol.retry import PATIENT
from onceward_services.planning.inbox import Inbox, NotificationKind, add_notification
from onceward_services.planning.repository import find, sql
from onceward_services.planning.webhook_delivery import (
    DELIVER,
    DeliveryRules,
    WebhookDeliveries,
    add_deliveries,
)
from onceward_services.planning.webhook_delivery import QUEUE as WEBHOOK_QUEUE
from onceward_services.settings import Settings

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
# More than the longest time-out of a request to a webhook.
_DELIVER_SECONDS: Final = 120


async def recount_projects(onceward: Onceward, *project_ids: str, version: int) -> None:
    """Enqueue a recount of these projects; a recount that waits already is not enqueued again.

    In the order of their ids, so that two writes cannot deadlock on each other's jobs. ``version``
    is that of the aggregate whose change is counted.
    """
    for project_id in sorted(set(project_ids)):
        await onceward.enqueue(
            COUNT, {"project_id": project_id}, queue=QUEUE, coalesce=project_id, version=version
        )


async def reindex_mission(onceward: Onceward, mission_id: str, *, version: int) -> None:
    """Enqueue an update of a mission's search text."""
    await onceward.enqueue(
        INDEX, {"mission_id": mission_id}, queue=QUEUE, coalesce=mission_id, version=version
    )


async def notify_assignee(onceward: Onceward, kind: NotificationKind, assignment: Row) -> None:
    """Enqueue a notification of the assignee, one per version of the assignment and person."""
    payload: dict[str, Any] = {
        "assignment_id": assignment["id"],
        "version": assignment["version"],
        "kind": kind,
        "mission_id": assignment["mission_id"],
        "recipient": assignment["assignee"],
    }
    about = f"{assignment['id']}:{assignment['version']}"
    if kind == "ended":  # of a version that another person may get a notification of
        about += ":ended"
    # Ordered: a person learns of an assignment before learning of its changes.
    await onceward.enqueue(
        NOTIFY,
        payload,
        queue=QUEUE,
        resource_id=about,
        order=assignment["id"],
        version=assignment["version"],
    )


def searchable(text: str) -> str:
    """Normalize a text for search: case-folded, Unicode NFKC."""
    return unicodedata.normalize("NFKC", text).casefold()


def register(onceward: Onceward, settings: Settings) -> None:
    """Register the job handlers."""
    deliveries = WebhookDeliveries(
        onceward.store,
        settings.planning_webhook_sender(),
        onceward.clock,
        DeliveryRules(
            gone=timedelta(hours=settings.planning_webhook_gone_hours),
            failing=timedelta(hours=settings.planning_webhook_failing_hours),
        ),
    )
    onceward.jobs.handler(
        DELIVER, queue=WEBHOOK_QUEUE, time_limit_seconds=_DELIVER_SECONDS, retry=PATIENT
    )(deliveries.run)

    @onceward.jobs.handler(COUNT, queue=QUEUE, time_limit_seconds=120)
    async def count(job: JobContext) -> None:
        tx = job.transaction
        about = {"tenant": job.tenant, "project_id": job.payload["project_id"]}
        await tx.execute(sql("lock_dashboard"), about | {"now": onceward.clock.now()})
        # Read the clock first: the counters include everything committed before as_of.
        as_of = onceward.clock.now()
        counted = await tx.fetch_one(sql("count_project"), about)
        assert counted is not None  # noqa: S101 - aggregates always return a row
        await tx.execute(sql("save_dashboard"), about | dict(counted) | {"as_of": as_of})

    @onceward.jobs.handler(NOTIFY, queue=QUEUE, time_limit_seconds=60)
    async def notify(job: JobContext) -> None:
        now, about = onceward.clock.now(), dict(job.payload)
        notification_id = new_id(now)
        inbox = Inbox(job.tenant, about["recipient"])
        if not await add_notification(
            job.transaction, inbox, about, notification_id=notification_id, now=now
        ):
            return
        data = about | {
            "notification_id": notification_id,
            "organization": job.tenant.removeprefix("org:"),
        }
        event = f"assignment.{data.pop('kind')}"
        await add_deliveries(
            job.transaction,
            job.enqueue,
            job.tenant,
            event,
            data,
            notification_id=notification_id,
            now=now,
        )

    @onceward.jobs.handler(INDEX, queue=QUEUE, time_limit_seconds=60)
    async def index(job: JobContext) -> None:
        tx = job.transaction
        mission_id = str(job.payload["mission_id"])
        about = {"tenant": job.tenant, "mission_id": mission_id}
        mission = await find(tx, "mission", job.tenant, mission_id)
        if mission is None:
            await tx.execute(sql("delete_words"), about)
            return
        words = searchable("\n".join((mission["title"], mission["description"] or "")))
        values = about | {"words": words, "version": mission["version"]}
        await tx.execute(sql("save_words"), values)
