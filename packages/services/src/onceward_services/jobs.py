"""Register the jobs of all services and the maintenance jobs, and create the worker."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from onceward import Onceward
from onceward.jobs.cleaner import clean_up
from onceward.jobs.context import JobContext
from onceward.jobs.engines import broker_engine
from onceward.jobs.worker import Worker
from onceward.ports import JobMetrics
from onceward_services.registry import SERVICES
from onceward_services.settings import Settings

__all__ = ["make_worker", "register_jobs"]

_MAINTENANCE_QUEUE: Final = "housekeeping"


def register_jobs(onceward: Onceward, settings: Settings) -> None:
    """Register the job handlers and the schedules of all services."""
    for service in SERVICES:
        if find_spec(f"{service.package}.jobs") is not None:
            register: Any = import_module(f"{service.package}.jobs").register
            register(onceward, settings)
    jobs = onceward.jobs

    @jobs.handler("records.sweep", queue=_MAINTENANCE_QUEUE, time_limit_seconds=3600)
    async def sweep(_job: JobContext) -> dict[str, int]:
        return {"deleted": await onceward.runtime.sweeper.sweep()}

    @jobs.handler("jobs.cleanup", queue=_MAINTENANCE_QUEUE, time_limit_seconds=3600)
    async def clean(_job: JobContext) -> dict[str, int]:
        cleaned = await clean_up(
            onceward.runtime.job_store,
            keep_done_days=settings.jobs_keep_done_days,
            keep_dead_days=settings.jobs_keep_dead_days,
        )
        return cleaned | {
            f"old_{name}": n
            for name, n in (await onceward.runtime.sweeper.delete_old_rows()).items()
        }

    jobs.every(settings.sweep_every_seconds, "records.sweep", queue=_MAINTENANCE_QUEUE)
    jobs.daily(settings.cleanup_at, "jobs.cleanup", queue=_MAINTENANCE_QUEUE)


def make_worker(
    onceward: Onceward,
    settings: Settings,
    metrics: JobMetrics,
    *,
    queues: list[str] | None = None,
    **options: Any,
) -> Worker:
    """Create a worker that gets jobs from NATS if ``nats_url`` is set, else from the database."""
    if settings.nats_url is not None:
        options["engine"] = broker_engine("nats", settings.nats_url)
    return onceward.worker(
        queues=queues or None,
        concurrency=settings.jobs_concurrency,
        lease_seconds=settings.jobs_lease_seconds,
        shutdown_seconds=settings.shutdown_seconds,
        metrics=metrics,
        **options,
    )
