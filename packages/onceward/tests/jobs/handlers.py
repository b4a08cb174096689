"""Handlers for the tests of the worker."""

import asyncio
from typing import Any

import pytest

from onceward.errors import NoTransactionError
from onceward.jobs import executor
from onceward.jobs.context import JobContext
from packages.onceward.tests.support.jobs_harness import JobsLab, write_effect


async def done(lab: JobsLab, job_id: str) -> Any:
    return await lab.until(job_id, "done")


def add_effect(lab: JobsLab, **options: Any) -> None:
    """Register a handler that writes an effect."""

    @lab.jobs.handler("effect", **options)
    async def effect(job: JobContext) -> None:
        await write_effect(job)


class Gate:
    """A handler that waits for ``opened``, before or after its write."""

    def __init__(self, lab: JobsLab, *, writes_first: bool = False, **options: Any) -> None:
        self.started = asyncio.Event()
        self.opened = asyncio.Event()
        self.runs = 0
        self.cancelled = 0

        @lab.jobs.handler("gated", **options)
        async def gated(job: JobContext) -> None:
            self.runs += 1
            if writes_first:
                await write_effect(job)
            self.started.set()
            try:
                await self.opened.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if not writes_first:
                await write_effect(job)


class Stubborn:
    """A handler that ignores its cancellation."""

    def __init__(self, lab: JobsLab, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        monkeypatch.setattr(executor, "_CANCEL_SECONDS", 0.1)
        self.started = asyncio.Event()
        self.may_end = asyncio.Event()
        asyncio.get_running_loop().call_later(10, self.may_end.set)  # so that a failed test ends
        self.after: list[str] = []

        @lab.jobs.handler("stubborn", **options)
        async def stubborn(job: JobContext) -> None:
            if job.attempt > 1 or self.may_end.is_set():
                await write_effect(job, "second")
                return
            tx = await job.begin()
            await write_effect(job, "first")
            self.started.set()
            while not self.may_end.is_set():
                try:
                    await self.may_end.wait()
                except asyncio.CancelledError:
                    continue
            for write in (write_effect(job, "late"), tx.execute("DELETE FROM effects")):
                try:
                    await write
                except NoTransactionError:
                    self.after.append("refused")
            try:
                await job.step("late", lambda _key: asyncio.sleep(0))
            except NoTransactionError:
                self.after.append("refused")
