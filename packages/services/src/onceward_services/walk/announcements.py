"""Enqueue the webhook about reviews that were opened, in the transaction that opened them."""

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final

from onceward import Transaction
from onceward.stores.sql_loader import load_queries
from onceward_services.walk.steps.settings import StepSettings

__all__ = ["NOTIFY_REVIEW", "Enqueue", "announce_reviews"]

NOTIFY_REVIEW: Final = "review.notify"

# ``Onceward.enqueue`` in a request, ``JobContext.enqueue`` in a job.
Enqueue = Callable[..., Awaitable[Any]]


async def announce_reviews(
    tx: Transaction, tenant: str, enqueue: Enqueue, *, settings: StepSettings, now: datetime
) -> None:
    """Enqueue a job for each open review without one. The walker is locked."""
    if settings.walk_review_webhook_url is None:
        return
    sql = load_queries("onceward_services.walk", "admin.sql")["announce_reviews"]
    for row in await tx.fetch_all(sql, {"tenant": tenant, "now": now}):
        payload: Mapping[str, str] = {"reviewId": row["id"]}
        await enqueue(NOTIFY_REVIEW, payload, tenant=tenant, resource_id=row["id"])
