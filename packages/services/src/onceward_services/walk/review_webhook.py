"""The job that sends a signed webhook when a review has been opened."""

from datetime import datetime
from typing import Any

from onceward.errors import NotFoundError
from onceward.jobs.context import JobContext
from onceward.ports import Store
from onceward_services.walk.steps import reviews
from onceward_services.webhooks.delivery import deliver
from onceward_services.webhooks.sender import WebhookSender

__all__ = ["notify_of_review"]


async def notify_of_review(
    job: JobContext, store: Store, sender: WebhookSender, *, url: str, secret: str, now: datetime
) -> dict[str, Any] | None:
    """Send the webhook; returns None if the review was deleted with its walker."""
    try:
        review = reviews.as_view(await reviews.read_review(store, job.payload["reviewId"]))
    except NotFoundError:
        return None
    message = {
        "type": "review.opened",
        "timestamp": now.isoformat(),
        "data": review.model_dump(
            mode="json",
            by_alias=True,
            include={"id", "kind", "walker_id", "day", "reasons", "opened_at"},
        ),
    }

    async def send(key: str) -> dict[str, Any]:
        return deliver(await sender.send(url, [secret], message, message_id=key, now=now))

    return await job.step("deliver", send)
