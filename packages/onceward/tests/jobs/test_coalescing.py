"""Coalescing: merged while one waits, a new job once that one has started. No write is lost."""

import asyncio
import random
from typing import Any

import pytest

from onceward.jobs.context import JobContext
from onceward.jobs.job import Enqueued, EnqueueOutcome, Merged
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect


async def reconcile(lab: JobsLab, payload: Any, **options: Any) -> EnqueueOutcome:
    return await lab.enqueue("reconcile", payload, **{"coalesce": "ada/2026-03-01", **options})


def add_handler(lab: JobsLab) -> None:
    @lab.jobs.handler("reconcile")
    async def handler(job: JobContext) -> None:
        await write_effect(job, str(job.payload))


async def test_waiting_job_is_merged_with_the_newest_payload_and_the_first_due_time(
    lab: JobsLab,
) -> None:
    add_handler(lab)
    first = await reconcile(lab, 1, delay_seconds=60)
    assert isinstance(first, Enqueued)
    due_at = (await lab.job(first.job_id)).view.due_at
    for payload in (2, 3):
        assert await reconcile(lab, payload, delay_seconds=600) == Merged(first.job_id)
    waiting = await lab.job(first.job_id)
    assert (waiting.payload, waiting.merged, waiting.view.due_at) == (3, 2, due_at)
    assert waiting.coalesce_key == "ada/2026-03-01"
    assert await lab.count("onceward_jobs") == 1
    await lab.show_in(-0.001)
    await lab.start_worker()
    await lab.until(first.job_id, "done")
    assert await lab.effects() == ["3"]


async def test_jobs_merge_only_with_the_same_tenant_queue_type_and_key(lab: JobsLab) -> None:
    """Another tenant, queue, type or coalescing key is another job."""
    outcomes = [
        await reconcile(lab, 1),
        await reconcile(lab, 1, tenant="eve"),
        await reconcile(lab, 1, queue="other"),
        await reconcile(lab, 1, coalesce="ada/2026-03-02"),
        await lab.enqueue("other", 1, coalesce="ada/2026-03-01"),
        await lab.enqueue("reconcile", 1, resource_id="ada/2026-03-01"),
    ]
    assert {type(outcome) for outcome in outcomes} == {Enqueued}
    assert len({outcome.job_id for outcome in outcomes}) == 6


async def test_started_job_is_not_merged_into(lab: JobsLab) -> None:
    """While it runs, while it waits for a retry, and after it has finished."""
    started, gate = asyncio.Event(), asyncio.Event()

    @lab.jobs.handler("reconcile")
    async def handler(job: JobContext) -> None:
        if job.payload == "first" and job.attempt == 1:
            started.set()
            await gate.wait()
            raise RuntimeError("once")
        await write_effect(job, str(job.payload))

    await lab.start_worker()
    first = await reconcile(lab, "first")
    await started.wait()
    running = await reconcile(lab, "while it runs", delay_seconds=60)
    assert isinstance(running, Enqueued)
    gate.set()
    await lab.until_failed(first.job_id, 1)
    assert await reconcile(lab, "merged") == Merged(running.job_id)
    await lab.show_in(-0.001, "attempts = 0")
    lab.notify()
    await lab.until(running.job_id, "done")
    retrying = await reconcile(lab, "while one waits for its retry", delay_seconds=60)
    assert isinstance(retrying, Enqueued)
    await lab.hurry()
    await lab.until(first.job_id, "done")
    await lab.show_in(-0.001)
    lab.notify()
    await lab.until(retrying.job_id, "done")
    finished = await reconcile(lab, "after it has finished")
    assert isinstance(finished, Enqueued)
    await lab.until(finished.job_id, "done")
    ids = {first.job_id, running.job_id, retrying.job_id, finished.job_id}
    assert len(ids) == 4
    assert await lab.effects() == [
        "merged",
        "first",
        "while one waits for its retry",
        "after it has finished",
    ]


async def test_no_reconciliation_of_a_day_is_ever_dropped(lab: JobsLab) -> None:
    """A key that is complete for ever would drop every one after the first, in silence."""
    add_handler(lab)
    await lab.start_worker()
    for n in range(4):
        outcome = await reconcile(lab, n)
        assert isinstance(outcome, Enqueued)
        await lab.until(outcome.job_id, "done")
    same = await reconcile(lab, 3)
    assert isinstance(same, Enqueued), "the same payload is another event of the same day"
    await lab.until(same.job_id, "done")
    assert await lab.effects() == ["0", "1", "2", "3", "3"]


async def test_released_job_counts_as_started_for_coalescing(lab: JobsLab) -> None:
    """Its handler may have read the state already, so a later write needs another job."""
    first = await reconcile(lab, 1)
    job = await lab.claim_one("one")
    assert await lab.job_store.release(job, worker="one")
    assert isinstance(await reconcile(lab, 2), Enqueued)
    assert (await lab.job(first.job_id)).payload == 1


@pytest.mark.parametrize("first_ends", ["commits", "rolls back"])
async def test_second_of_two_coalescing_transactions_waits_for_the_first(
    lab: JobsLab, another_store: OpenStore, first_ends: str
) -> None:
    other = JobsLab(await another_store())
    unit = await lab.store.begin()
    first = await lab.enqueue_in(unit.statements, "reconcile", 1, coalesce="day")
    second = asyncio.create_task(other.enqueue("reconcile", 2, coalesce="day"))
    _, still_waiting = await asyncio.wait({second}, timeout=0.2)
    assert still_waiting, "whether it merges is not known yet"
    if first_ends == "commits":
        await unit.commit(None, None)
        assert await second == Merged(first.job_id)
    else:
        await unit.rollback()
        assert isinstance(await second, Enqueued)
    (job,) = await lab.claim()
    assert job.decoded() == 2


async def test_job_being_merged_into_cannot_be_claimed_before_the_commit(
    lab: JobsLab, another_store: OpenStore
) -> None:
    """A worker that took it would read the state from before the write."""
    other = JobsLab(await another_store())
    first = await reconcile(lab, "old")
    unit = await lab.store.begin()
    merged = await lab.enqueue_in(unit.statements, "reconcile", "new", coalesce="ada/2026-03-01")
    assert merged == Merged(first.job_id)
    taking = asyncio.create_task(other.claim("one"))
    done, _ = await asyncio.wait({taking}, timeout=0.2)
    assert not done or taking.result() == []
    await unit.commit(None, None)
    jobs = await taking or await other.claim("one")
    assert [job.decoded() for job in jobs] == ["new"]


async def test_no_write_is_lost_while_coalesced_jobs_are_claimed(
    lab: JobsLab, another_store: OpenStore
) -> None:
    """Hundreds of writes, each of which must be seen by a job that starts after it."""
    writes = 200
    await lab.store.write("INSERT INTO counters (name, n) VALUES ('state', 0), ('seen', 0)")

    @lab.jobs.handler("reconcile")
    async def handler(job: JobContext) -> None:
        row = await job.transaction.fetch_one("SELECT n FROM counters WHERE name = 'state'")
        assert row is not None
        assert row["n"] >= job.payload, "it started before the write that it is for"
        await job.transaction.execute(
            "UPDATE counters SET n = :n WHERE name = 'seen' AND n < :n", {"n": row["n"]}
        )

    for _ in range(2):
        await lab.start_worker(await another_store(), concurrency=4)
    merged = 0
    for n in range(1, writes + 1):
        async with lab.transaction() as tx:
            await tx.execute("UPDATE counters SET n = :n WHERE name = 'state'", {"n": n})
            outcome = await lab.enqueue_in(tx, "reconcile", n, coalesce="day")
            merged += isinstance(outcome, Merged)
            if n % 10 == 0:  # sometimes the worker polls before this is committed
                lab.notify()
                await asyncio.sleep(random.random() * 0.002)
        lab.notify()
        if n % 3 == 0:
            await asyncio.sleep(random.random() * 0.004)
    await lab.until_idle()
    (seen,) = await lab.rows("SELECT n FROM counters WHERE name = 'seen'")
    assert seen["n"] == writes
    assert await lab.count("onceward_dead_letters") == await lab.count("onceward_job_failures") == 0
    print(f"{merged} of {writes} were merged")


async def test_coalescing_and_order_can_be_combined(lab: JobsLab) -> None:
    started, gate = asyncio.Event(), asyncio.Event()

    @lab.jobs.handler("reconcile")
    async def handler(job: JobContext) -> None:
        if job.payload == 0:
            started.set()
            await gate.wait()
        await write_effect(job, str(job.payload))

    await lab.start_worker()
    await reconcile(lab, 0, order="ada")
    await started.wait()
    outcomes = [await reconcile(lab, n, order="ada") for n in (1, 2, 3)]
    assert [type(outcome) for outcome in outcomes] == [Enqueued, Merged, Merged]
    gate.set()

    async def both_ran() -> bool:
        return await lab.effects() == ["0", "3"]

    await eventually(both_ran)
