"""Jobs of the walk service: reconcile days, settle what is provisional, delete old data."""

from datetime import date, timedelta
from typing import Final

from onceward import Onceward
from onceward.jobs.context import JobContext
from onceward_services.settings import Settings
from onceward_services.walk.erasure import DELETE_WALKER, erase_walker
from onceward_services.walk.message_jobs import register_message_jobs
from onceward_services.walk.outgoing import announce
from onceward_services.walk.provisional import next_due_at, refund_due, settle_provisional
from onceward_services.walk.steps.ingest import QUEUE, RECONCILE
from onceward_services.walk.steps.reconcile import settle_day
from onceward_services.walk.steps.repository import delete_attestations, open_challenges
from onceward_services.walk.walkers import lock_walker

__all__ = ["CLEAN_UP", "REFUND", "register"]

# Refunds what is due, settles days whose challenge has no response, and confirms what is settled.
# Jobs are merged only with those for the same time: a merged job keeps its due time, and a later
# one could be due earlier.
REFUND: Final = "steps.refund"
CLEAN_UP: Final = "walk.cleanup"
# Small, so that concurrent writers do not wait long.
_BATCH: Final = 500
_HOUR_SECONDS: Final = 3600


def register(onceward: Onceward, settings: Settings) -> None:
    """Register the job handlers and the daily clean-up."""
    jobs = onceward.jobs
    settings.catalogue  # noqa: B018 - a catalogue with errors ends the start, not the first job

    @jobs.handler(RECONCILE, queue=QUEUE)
    async def reconcile(job: JobContext) -> None:
        now, tx = onceward.clock.now(), job.transaction
        walker = await lock_walker(tx, job.tenant, now)
        day = date.fromisoformat(job.payload["day"])
        due_at = await settle_day(tx, job.tenant, day, settings=settings, now=now)
        after = walker.event_seq
        await announce(tx, job.tenant, job.enqueue, settings=settings, after=after, now=now)
        if due_at is not None:
            await job.enqueue(REFUND, queue=QUEUE, run_at=due_at, coalesce=due_at.isoformat())

    @jobs.handler(REFUND, queue=QUEUE)
    async def refund(job: JobContext) -> None:
        now, tx = onceward.clock.now(), job.transaction
        walker = await lock_walker(tx, job.tenant, now)
        await refund_due(tx, job.tenant, settings=settings, now=now)
        for day, challenge_due_at in await open_challenges(tx, job.tenant):
            if challenge_due_at <= now:
                await settle_day(tx, job.tenant, day, settings=settings, now=now)
        await settle_provisional(tx, job.tenant, settings=settings, now=now)
        after = walker.event_seq
        await announce(tx, job.tenant, job.enqueue, settings=settings, after=after, now=now)
        due_at = await next_due_at(tx, job.tenant, settings=settings, now=now)
        if due_at is not None:
            # A delay, not run_at: if the database's clock is ahead, the job would run at once.
            seconds = max(1.0, (due_at - now).total_seconds())
            coalesce = due_at.isoformat()
            await job.enqueue(REFUND, queue=QUEUE, delay_seconds=seconds, coalesce=coalesce)

    @jobs.handler(CLEAN_UP, queue=QUEUE, time_limit_seconds=_HOUR_SECONDS)
    async def clean_up(_job: JobContext) -> dict[str, int]:
        before = onceward.clock.now() - timedelta(days=settings.step_attestation_retention_days)
        deleted = 0
        while batch := await delete_attestations(onceward.store, before=before, limit=_BATCH):
            deleted += batch
        return {"deleted": deleted}

    @jobs.handler(DELETE_WALKER, queue=QUEUE, time_limit_seconds=_HOUR_SECONDS)
    async def delete_walker(job: JobContext) -> dict[str, int]:
        deleted = await erase_walker(onceward.store, job.payload["walker"], queue=QUEUE)
        return {"deleted": deleted}

    register_message_jobs(onceward, settings, queue=QUEUE)
    jobs.daily(settings.cleanup_at, CLEAN_UP, queue=QUEUE)
