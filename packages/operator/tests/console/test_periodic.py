"""Periodic work, as operators see it: schedule, last and next run."""

import re
from datetime import timedelta

import pytest

from onceward import JobContext, NonRetryableError
from onceward.jobs.admin import PausedQueues
from onceward.tenants import SYSTEM_TENANT
from packages.operator.tests.console.lab import ConsoleLab
from packages.operator.tests.console.test_jobs import run_jobs


def cells(page: str, name: str) -> list[str]:
    """Return the texts of a column."""
    found = re.findall(rf'data-label="{name}">(.*?)</td>', page, re.DOTALL)
    return [re.sub(r"<[^>]+>", "", each).strip() for each in found]


@pytest.fixture
async def scheduled(lab: ConsoleLab) -> ConsoleLab:
    """Two schedules: one whose job succeeds, one whose job fails for good."""
    jobs = lab.onceward.jobs

    @jobs.handler("report", queue="office")
    async def report(_job: JobContext) -> None: ...

    @jobs.handler("bill", queue="office")
    async def bill(_job: JobContext) -> None:
        raise NonRetryableError("no paper")

    now = lab.onceward.clock.now()
    jobs.every(7 * 24 * 3600.0, "report", queue="office")
    jobs.daily((now - timedelta(hours=2)).time().replace(microsecond=0), "bill", queue="office")
    return lab


async def test_schedule_of_a_paused_queue_is_marked(scheduled: ConsoleLab) -> None:
    paused = PausedQueues(scheduled.onceward.store, lambda: None)
    async with scheduled.browser("ada", "viewer") as browser:
        assert set(cells((await browser.get("periodic")).text, "Queue")) == {"office"}
        await paused.pause("office", actor="ada", reason="moving")
        assert set(cells((await browser.get("periodic")).text, "Queue")) == {"office paused"}


async def test_schedule_is_shown_in_words_with_its_last_and_next_run(scheduled: ConsoleLab) -> None:
    async with scheduled.browser("ada", "viewer") as browser:
        page = (await browser.get("periodic")).text
        assert cells(page, "Type") == ["report", "bill"]
        assert cells(page, "When")[0] == "every 7 days"
        assert re.fullmatch(r"every day at \d\d:\d\d(:\d\d)? UTC", cells(page, "When")[1])
        assert cells(page, "Next run")[1] == "in 22 h"
        for last in cells(page, "Last run"):  # no worker has run
            assert last.startswith("none is known")
            assert "no worker has enqueued it" in last
        worker = scheduled.onceward.worker()
        await worker._periodic.enqueue_due()
        page = (await browser.get("periodic")).text
        assert [last.split()[0] for last in cells(page, "Last run")] == ["waiting", "waiting"]
        assert "no worker has enqueued it" not in page
        await run_jobs(scheduled)
        page = (await browser.get("periodic")).text
        report, bill = cells(page, "Last run")
        assert re.fullmatch(r"done \d+ s ago", report)
        assert re.fullmatch(r"dead \d+ s ago, a retry cannot help", bill)
        (path,) = re.findall(rf'href="/console/(jobs/[^"]+\?tenant={SYSTEM_TENANT})">\d+ s', page)[
            1:
        ]
        assert "no paper" in (await browser.get(path)).text
