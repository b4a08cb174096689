"""Periodic jobs: each slot runs once, and only the newest missed slot is made up for."""

import asyncio
import logging
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest

from onceward.errors import NonRetryableError, StoreUnavailableError, UsageError
from onceward.jobs import periodic
from onceward.jobs.context import JobContext
from onceward.jobs.job_store import JobStore
from onceward.jobs.periodic import PeriodicEnqueuer
from onceward.jobs.registry import JobRegistry
from onceward.ports import Store
from onceward.tenants import SYSTEM_TENANT
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect


class HeldTable(JobStore):
    """The tables of a database whose clock is held by the test."""

    def __init__(self, store: Store, instant: datetime) -> None:
        super().__init__(store)
        self.instant = instant

    async def now(self) -> datetime:
        return self.instant


def nothing() -> None:
    return


async def slots(lab: JobsLab) -> list[str]:
    rows = await lab.rows("SELECT tenant, resource_id FROM onceward_jobs ORDER BY resource_id")
    assert {row["tenant"] for row in rows} <= {SYSTEM_TENANT}
    return [row["resource_id"] for row in rows]


async def test_daily_job_is_due_exactly_at_its_time(lab: JobsLab) -> None:
    lab.jobs.daily(time(3), "clean.up", queue="housekeeping")
    table = HeldTable(lab.store, datetime(2026, 3, 1, 2, 59, 59, 900_000, tzinfo=UTC))
    work = PeriodicEnqueuer(table, lab.jobs, notify=nothing)
    assert await work.enqueue_due() == pytest.approx(0.1)
    assert await slots(lab) == ["2026-02-28T03:00:00+00:00"], "yesterday's, which has not run"
    table.instant += timedelta(seconds=0.1)
    assert await work.enqueue_due() == timedelta(days=1).total_seconds()
    both = ["2026-02-28T03:00:00+00:00", "2026-03-01T03:00:00+00:00"]
    assert await slots(lab) == both
    table.instant += timedelta(hours=23, minutes=59)
    await work.enqueue_due()
    assert await slots(lab) == both
    (row,) = await lab.rows(
        "SELECT DISTINCT key, queue, type, actor FROM onceward_jobs WHERE resource_id = :r",
        r=both[1],
    )
    assert row["key"] == f"job:{SYSTEM_TENANT}:housekeeping:clean.up:{both[1]}"
    assert (row["queue"], row["actor"]) == ("housekeeping", "clock")


async def test_only_the_newest_missed_slot_is_enqueued(lab: JobsLab) -> None:
    lab.jobs.daily(time(3), "clean.up")
    table = HeldTable(lab.store, datetime(2026, 3, 1, 4, tzinfo=UTC))
    work = PeriodicEnqueuer(table, lab.jobs, notify=nothing)
    await work.enqueue_due()
    table.instant += timedelta(days=5)
    for _ in range(3):
        await work.enqueue_due()
        await PeriodicEnqueuer(
            table, lab.jobs, notify=nothing
        ).enqueue_due()  # a process that starts now
    assert await slots(lab) == ["2026-03-01T03:00:00+00:00", "2026-03-06T03:00:00+00:00"]


async def test_clock_set_back_enqueues_no_slot_twice(lab: JobsLab) -> None:
    lab.jobs.every(60, "sweep")
    table = HeldTable(lab.store, datetime(2026, 3, 1, 4, 0, 30, tzinfo=UTC))
    work = PeriodicEnqueuer(table, lab.jobs, notify=nothing)
    await work.enqueue_due()
    for job in await lab.claim("one"):
        await lab.job_store.complete_alone([(job.lease, None)], worker="one")
    table.instant += timedelta(minutes=1)
    await work.enqueue_due()
    table.instant -= timedelta(minutes=1)
    await work.enqueue_due()
    assert await slots(lab) == ["2026-03-01T04:01:00+00:00"]


async def test_many_processes_enqueue_a_slot_once(lab: JobsLab, another_store: OpenStore) -> None:
    lab.jobs.every(60, "sweep")
    lab.jobs.daily(time(3), "clean.up")
    stores = [lab.store, await another_store(), await another_store()]
    start = datetime(2026, 3, 1, 2, 58, 30, tzinfo=UTC)
    tables = [HeldTable(store, start) for store in stores for _ in range(2)]
    works = [PeriodicEnqueuer(table, lab.jobs, notify=nothing) for table in tables]
    for _ in range(4):
        await asyncio.gather(*(work.enqueue_due() for work in works))
        for table in tables:
            table.instant += timedelta(minutes=1)
    assert await slots(lab) == [
        "2026-02-28T03:00:00+00:00",
        "2026-03-01T02:58:00+00:00",
        "2026-03-01T02:59:00+00:00",
        "2026-03-01T03:00:00+00:00",
        "2026-03-01T03:00:00+00:00",
        "2026-03-01T03:01:00+00:00",
    ]


async def test_two_workers_run_each_slot_once(lab: JobsLab, another_store: OpenStore) -> None:
    @lab.jobs.handler("tick")
    async def tick(job: JobContext) -> None:
        await write_effect(job, job.resource_id)

    lab.jobs.every(1, "tick")
    for _ in range(2):
        await lab.start_worker(await another_store())

    async def three_runs() -> bool:
        return await lab.count("effects") >= 3

    await eventually(three_runs, seconds=8)
    await lab.stop_workers()
    effects = await lab.effects()
    assert len(effects) == len(set(effects)), "a slot was run twice"
    assert {datetime.fromisoformat(effect).microsecond for effect in effects} == {0}


async def test_worker_enqueues_periodic_jobs_of_its_queues_only(lab: JobsLab) -> None:
    """Jobs without a worker would accumulate."""
    lab.jobs.every(3600, "sweep", queue="housekeeping")
    lab.jobs.every(3600, "report", queue="reports")
    await lab.start_worker(queues=["reports"])

    async def has_ended() -> bool:
        return await lab.count("onceward_dead_letters") == 1

    await eventually(has_ended)
    (letter,) = await lab.rows("SELECT type, reason FROM onceward_dead_letters")
    assert (letter["type"], letter["reason"]) == ("report", "unknown_type")
    assert await lab.count("onceward_jobs") == 0


async def test_slot_with_a_dead_lettered_job_is_not_enqueued_again(lab: JobsLab) -> None:
    runs: list[str] = []

    @lab.jobs.handler("broken", max_attempts=2)
    async def broken(job: JobContext) -> None:
        runs.append(job.id)
        raise NonRetryableError("always")

    lab.jobs.every(3600, "broken")
    await lab.start_worker()

    async def is_dead() -> bool:
        return await lab.count("onceward_dead_letters") == 1

    await eventually(is_dead)
    (row,) = await lab.rows("SELECT max_attempts FROM onceward_dead_letters")
    assert row["max_attempts"] == 2, "the handler's default"
    await PeriodicEnqueuer(lab.job_store, lab.jobs, notify=nothing).enqueue_due()
    assert (await lab.count("onceward_jobs"), len(runs)) == (0, 1)


async def test_errors_do_not_stop_the_periodic_enqueuer(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(periodic, "_ERROR_SECONDS", 0.01)
    errors: list[Exception] = [StoreUnavailableError("away"), RuntimeError("odd")]

    class FailingJobStore(JobStore):
        async def now(self) -> datetime:
            if errors:
                raise errors.pop(0)
            return await super().now()

    lab.jobs.every(3600, "sweep")
    notifications: list[str] = []
    work = PeriodicEnqueuer(
        FailingJobStore(lab.store), lab.jobs, notify=lambda: notifications.append("notified")
    )
    with caplog.at_level(logging.WARNING, "onceward.jobs"):
        running = asyncio.create_task(work.run())

        async def enqueued() -> bool:
            return len(await slots(lab)) == 1

        await eventually(enqueued)
        running.cancel()
    assert len(caplog.records) == 2
    assert notifications == ["notified"]


@pytest.mark.parametrize("arguments", [{"job_type": "a b"}, {"job_type": "ok", "queue": "a b"}])
def test_invalid_name_is_refused_when_it_is_registered(arguments: dict[str, Any]) -> None:
    jobs = JobRegistry()
    with pytest.raises(UsageError):
        jobs.every(60, **arguments)
    with pytest.raises(UsageError):
        jobs.daily(time(3), **arguments)
    assert jobs.periodic == []
    assert jobs.queues == ()


def test_queue_without_a_handler_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    jobs = JobRegistry()

    @jobs.handler("receipt.send", queue="mail")
    async def send(_job: Any) -> None:
        pass

    for queue in ("mail", "mial", "mial"):
        jobs.warn_of_queue("receipt.send", queue)
    jobs.warn_of_queue("of.another.app", "elsewhere")
    (record,) = caplog.records
    assert "the queue mial, which no handler of this app has" in record.getMessage()
    assert "(queues: mail)" in record.getMessage()
