"""The decision of an admin about a review, with all that follows from it."""

from datetime import date, datetime

from onceward import Transaction
from onceward.errors import FieldNotAllowedError, ForbiddenError
from onceward.ports import Row
from onceward_services.settings import Settings
from onceward_services.walk.announcements import Enqueue
from onceward_services.walk.jobs import REFUND
from onceward_services.walk.outgoing import announce
from onceward_services.walk.steps import reviews
from onceward_services.walk.steps.ingest import QUEUE
from onceward_services.walk.steps.model import Resolution
from onceward_services.walk.steps.reconcile import settle_day
from onceward_services.walk.steps.repository import readings_of, save_ruling
from onceward_services.walk.suspension import suspend
from onceward_services.walk.walkers import lock_walker

__all__ = ["resolve_review"]


async def resolve_review(
    tx: Transaction,
    enqueue: Enqueue,
    review_id: str,
    resolution: Resolution,
    *,
    admin: str,
    settings: Settings,
    now: datetime,
) -> Row:
    """Resolve a review and return it: the day is settled, the walker suspended and told.

    Raises ``NotFoundError``, ``ForbiddenError`` for a review of the admin's own walks, and
    ``ServiceError`` if it is resolved already.
    """
    walker = str((await reviews.find_review(tx, review_id))["tenant"])
    # The actor in the console is ``boss via console``.
    if admin.partition(" via ")[0] == walker:
        raise ForbiddenError("your own walks are reviewed by another admin: ask one")
    before = (await lock_walker(tx, walker, now)).event_seq
    resolved = await reviews.resolve_review(tx, review_id, resolution, admin=admin, now=now)
    if resolution.decision == "suspend":
        await suspend(tx, walker, now)
    if resolved["kind"] == reviews.QUARANTINED_DAY:
        day = date.fromisoformat(resolved["day"])
        count = await _accepted_count(tx, walker, day, resolution, settings.step_max_per_day)
        accepted = resolution.decision == "accept"
        await save_ruling(tx, walker, day, accepted=accepted, count=count)
        due_at = await settle_day(tx, walker, day, settings=settings, now=now)
        if due_at is not None:
            await enqueue(
                REFUND, queue=QUEUE, tenant=walker, run_at=due_at, coalesce=due_at.isoformat()
            )
    await announce(tx, walker, enqueue, settings=settings, after=before, now=now)
    return resolved


async def _accepted_count(
    tx: Transaction, tenant: str, day: date, resolution: Resolution, most: int
) -> int:
    """Return how many steps an admin accepts: the given number, else the highest reading.

    Not the sum over bundles, which would count steps twice that two bundles have counted.
    """
    if resolution.decision != "accept":
        return 0
    if resolution.accepted_count is None:
        readings, _ = await readings_of(tx, tenant, day)
        return max(reading.count for reading in readings)
    if resolution.accepted_count > most:
        raise FieldNotAllowedError(f"acceptedCount: should be at most {most}")
    return resolution.accepted_count
