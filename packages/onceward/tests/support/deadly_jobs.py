"""A worker program with a job that kills its process, for a fork server."""

import asyncio
import os
import signal
from typing import Any

from onceward import open_store
from onceward.jobs.context import JobContext
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import Worker
from onceward_nats.jetstream import jetstream
from packages.onceward.tests.support.jobs_harness import write_effect


def handlers() -> JobRegistry:
    jobs = JobRegistry()

    @jobs.handler("deadly")
    async def deadly(job: JobContext) -> None:
        await asyncio.sleep(0.03)  # the jobs beside it have begun
        os.kill(os.getpid(), signal.SIGKILL)

    @jobs.handler("harmless")
    async def harmless(job: JobContext) -> None:
        await asyncio.sleep(0.05)
        await write_effect(job)

    return jobs


def work(database: str, lease_seconds: float, nats: dict[str, Any] | None = None) -> None:
    """Run jobs, eight at a time, until none is left or this process is killed."""
    asyncio.run(_work(database, lease_seconds, nats))


async def _work(database: str, lease_seconds: float, nats: dict[str, Any] | None) -> None:
    store = open_store(database)
    await store.open()
    engine = None if nats is None else jetstream(**nats)
    worker = Worker(store, handlers(), concurrency=8, lease_seconds=lease_seconds, engine=engine)
    await worker.start()
    while worker.running or await JobStore(store).read("depths", {}):
        await asyncio.sleep(0.01)
    await worker.stop()
    await store.close()
