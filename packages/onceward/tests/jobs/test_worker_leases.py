"""Leases are renewed in time, and a job that has lost its lease commits nothing."""

import asyncio
from typing import Any

import pytest

from onceward.errors import StoreUnavailableError
from onceward.jobs.context import JobContext
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.jobs.handlers import Gate, done
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect

# Long enough for a busy machine to renew them in time.
LEASE_SECONDS = 3.0


async def test_lease_is_renewed_before_half_of_its_time(lab: JobsLab) -> None:
    lease_seconds = 4.0
    gate = Gate(lab)
    await lab.start_worker(lease_seconds=lease_seconds)
    job_id = await lab.enqueued("gated")
    await gate.started.wait()
    ends: set[float] = set()
    left: list[float] = []
    loop = asyncio.get_running_loop()
    until = loop.time() + 0.7 * lease_seconds
    while loop.time() < until:
        before = await lab.job_store.now()
        due_at = (await lab.job(job_id)).view.due_at
        after = await lab.job_store.now()
        assert due_at is not None
        ends.add(due_at.timestamp())
        # It was renewed before, after or between the two times.
        left.append((due_at - before).total_seconds())
        assert (due_at - after).total_seconds() <= lease_seconds
        await asyncio.sleep(0.02)
    gate.opened.set()
    await done(lab, job_id)
    assert len(ends) >= 3, "renewed twice at least"
    assert min(left) > lease_seconds / 2


@pytest.mark.parametrize("writes_first", [True, False])
async def test_handler_that_outlasts_its_lease_succeeds_at_the_first_attempt(
    lab: JobsLab, another_store: OpenStore, *, writes_first: bool
) -> None:
    """On SQLite, one that has written keeps everyone from writing: it renews its lease itself."""
    gate = Gate(lab, writes_first=writes_first)
    for _ in range(2):
        await lab.start_worker(await another_store(), lease_seconds=LEASE_SECONDS)
    job_id = await lab.enqueued("gated", resource_id="slow")
    await gate.started.wait()
    await asyncio.sleep(LEASE_SECONDS * 1.2)
    gate.opened.set()
    detail = await done(lab, job_id)
    assert (detail.view.attempts, gate.runs) == (1, 1)
    assert await lab.effects() == ["slow"]


async def test_long_write_on_sqlite_loses_no_lease_of_another_job(
    lab: JobsLab,
) -> None:
    """PostgreSQL has no write turn, but the same must hold there."""
    writing = Gate(lab, writes_first=True)
    thinking = asyncio.Event()

    @lab.jobs.handler("thinks")
    async def thinks(job: JobContext) -> None:
        thinking.set()
        await writing.opened.wait()
        await write_effect(job, "thought")

    await lab.start_worker(lease_seconds=LEASE_SECONDS)
    quiet = await lab.enqueued("thinks")
    await thinking.wait()
    slow = await lab.enqueued("gated", resource_id="slow")
    await writing.started.wait()
    await asyncio.sleep(LEASE_SECONDS * 1.2)
    writing.opened.set()
    for job_id in (slow, quiet):
        assert (await done(lab, job_id)).view.attempts == 1
    assert sorted(await lab.effects()) == ["slow", "thought"]


async def test_long_transactions_on_all_connections_keep_their_leases(
    lab: JobsLab,
) -> None:
    """Renewals and endings must not wait for what the handlers hold."""
    if lab.store.name == "sqlite":
        pytest.skip("one writer at a time: there is no second transaction")
    gate = asyncio.Event()
    started = 0

    @lab.jobs.handler("long")
    async def long(job: JobContext) -> None:
        nonlocal started
        await write_effect(job)
        started += 1
        await gate.wait()

    for n in range(16):
        await lab.enqueue("long", n)
    await lab.start_worker(lease_seconds=LEASE_SECONDS, concurrency=16)

    async def all_slots_are_used() -> bool:
        return started >= 8

    await eventually(all_slots_are_used)
    await asyncio.sleep(LEASE_SECONDS * 1.2)
    gate.set()
    await lab.until_idle()
    assert set(lab.outcomes.all) == {"done"}
    assert await lab.count("effects") == 16


async def test_lost_lease_cancels_the_handler_and_rolls_back(lab: JobsLab) -> None:
    """It finds out at the next renewal, long before it would have finished."""
    gate = Gate(lab, writes_first=lab.store.name != "sqlite")
    await lab.start_worker(lease_seconds=1, concurrency=1)
    job_id = await lab.enqueued("gated", max_attempts=9)
    await gate.started.wait()
    gate.started.clear()
    await lab.steal()

    async def lease_loss_is_reported() -> bool:
        return lab.outcomes.all == ["lease_lost"]

    await eventually(lease_loss_is_reported, seconds=5)
    assert gate.cancelled == 1
    assert await lab.effects() == []
    assert await lab.state(job_id) == "running", "its new holder completes it"
    gate.opened.set()
    detail = await done(lab, job_id)
    assert (detail.view.attempts, await lab.count("effects")) == (2, 1)


@pytest.mark.parametrize("loss", ["stolen", "ran out"])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("order", [None, "line"])
async def test_a_handler_that_finishes_after_its_lease_was_lost_cannot_commit(
    lab: JobsLab, loss: str, order: str | None, *, writes: bool
) -> None:
    """Also if no other worker has leased the job: an expired lease is lost."""
    attempts: list[int] = []

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            await (lab.steal() if loss == "stolen" else lab.show_in(-0.001))
        if writes:
            await write_effect(job, f"attempt {job.attempt}")

    await lab.start_worker(concurrency=1)
    job_id = await lab.enqueued("effect", order=order)

    async def was_lost() -> bool:
        return "lease_lost" in lab.outcomes.all

    await eventually(was_lost)
    if loss == "stolen":  # its new holder never completes it
        await lab.show_in(-0.001)
    lab.notify()
    detail = await done(lab, job_id)
    assert attempts == [1, 2]
    assert detail.view.attempts == 2
    assert await lab.effects() == (["attempt 2"] if writes else [])


async def test_lost_lease_in_a_batch_of_completions_affects_no_other(lab: JobsLab) -> None:
    gate = asyncio.Event()
    stolen: list[str] = []

    @lab.jobs.handler("quiet")
    async def quiet(job: JobContext) -> str:
        if job.payload == 3 and not stolen:
            stolen.append(job.id)
        await gate.wait()
        return job.id

    completed: list[int] = []
    worker = await lab.start_worker(concurrency=20)
    complete = worker.job_store.complete_alone

    async def counted(results: Any, *, worker: str) -> set[tuple[str, str]]:
        batch = list(results)
        completed.append(len(batch))
        return await complete(batch, worker=worker)

    worker.job_store.complete_alone = counted  # type: ignore[method-assign]
    ids = [await lab.enqueued("quiet", n) for n in range(20)]

    async def all_run() -> bool:
        return worker.running == 20

    await eventually(all_run)
    await lab.store.write(
        lab.store.table_names.render(
            "UPDATE onceward_jobs SET lease = lease + 1 WHERE payload = '3'"
        )
    )
    gate.set()
    for job_id in ids:
        if job_id != stolen[0]:
            assert (await done(lab, job_id)).result == job_id
    assert await lab.state(stolen[0]) == "running"
    assert max(completed) > 10, "they share the commit of their markers"
    await lab.show_in(-0.001)
    lab.notify()
    await done(lab, stolen[0])
    await lab.quiet()
    assert sorted(lab.outcomes.all) == ["done"] * 20 + ["lease_lost"]


async def test_failed_batch_of_completions_loses_no_job(lab: JobsLab) -> None:
    @lab.jobs.handler("quiet")
    async def quiet(job: JobContext) -> None:
        return

    worker = await lab.start_worker(lease_seconds=1)
    complete = worker.job_store.complete_alone
    failed: list[int] = []

    async def failing(results: Any, *, worker: str) -> set[tuple[str, str]]:
        if not failed:
            failed.append(len(list(results)))
            raise StoreUnavailableError("away")
        return await complete(results, worker=worker)

    worker.job_store.complete_alone = failing  # type: ignore[method-assign]
    for n in range(5):
        await lab.enqueue("quiet", n)
    await lab.until_idle()
    assert lab.outcomes.all.count("unknown") == failed[0]
    assert lab.outcomes.all.count("done") == 5


async def test_job_of_a_lost_worker_is_logged_by_the_one_that_takes_it_over(
    lab: JobsLab, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []

    @lab.jobs.handler("mail")
    async def mail(job: JobContext) -> None:
        runs.append(job.attempt)
        if len(runs) == 1:
            raise ValueError("a failure of the handler is no takeover")

    job_id = await lab.enqueued("mail")
    lost = await lab.claim_one(worker="dead-worker")
    assert lost.lease.job_id == job_id
    await lab.show_in(-0.001)  # its lease has ended
    caplog.set_level("INFO", "onceward.jobs")
    await lab.start_worker()
    await lab.until_failed(job_id, 2)
    await lab.hurry()
    await done(lab, job_id)
    (record,) = [one for one in caplog.records if one.message.startswith("job taken over")]
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"job taken over: mail {job_id}, attempt 2 of 5, tenant ")
    assert (record.job_id, record.job_type, record.attempt) == (job_id, "mail", 2)  # type: ignore[attr-defined]
    assert record.lost_worker == "dead-worker"  # type: ignore[attr-defined]
    assert runs == [2, 3]
