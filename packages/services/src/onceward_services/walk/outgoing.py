"""Enqueue what leaves the server after a change: webhooks about reviews, pushes to devices."""

from datetime import datetime

from onceward import Transaction
from onceward_services.settings import Settings
from onceward_services.walk.announcements import Enqueue, announce_reviews
from onceward_services.walk.push.delivery import announce_pushes

__all__ = ["announce"]


async def announce(
    tx: Transaction,
    tenant: str,
    enqueue: Enqueue,
    *,
    settings: Settings,
    after: int,
    now: datetime,
) -> None:
    """Enqueue jobs for opened reviews and for events after ``after``. The walker is locked."""
    await announce_reviews(tx, tenant, enqueue, settings=settings, now=now)
    if settings.walk_push != "off":
        await announce_pushes(tx, tenant, enqueue, after=after)
