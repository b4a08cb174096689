"""Cancelled jobs: a waiting job becomes a dead letter, or a worker runs it, never both."""

import asyncio
from typing import Any

import pytest

from onceward.tenants import ALL_TENANTS
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.jobs.handlers import Gate
from packages.onceward.tests.support.jobs_harness import TENANT, JobsLab, eventually

WHO: dict[str, Any] = {"tenant": TENANT, "actor": "ada", "reason": "sent by post"}
UNKNOWN = "00000000-0000-4000-8000-000000000000"


async def test_waiting_job_becomes_a_dead_letter_with_the_operators_reason(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect", {"n": 1}, resource_id="one", max_attempts=3)
    assert await lab.admin.cancel(job_id, **WHO)
    found = await lab.job(job_id)
    assert (found.view.state, found.view.reason, found.error) == (
        "dead",
        "cancelled",
        "sent by post",
    )
    assert (found.payload, found.view.attempts, found.view.max_attempts) == ({"n": 1}, 0, 3)
    assert await lab.claim() == []
    (event,) = await lab.rows(
        "SELECT tenant, endpoint, actor, reason, resource, status, request_id"
        " FROM onceward_audit_events WHERE endpoint LIKE 'job.cancelled%'"
    )
    assert tuple(event.values()) == (
        *(TENANT, "job.cancelled default effect", "ada", "sent by post", found.view.key, 200),
        found.view.request_id,
    )


async def test_cancelled_job_can_be_requeued_and_keeps_its_failures(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect")
    job = await lab.claim_one()
    assert await lab.job_store.retry(
        job, worker="test-worker", reason="error", error="no", delay_seconds=60
    )
    assert await lab.admin.cancel(job_id, **WHO)
    assert (await lab.job(job_id)).view.attempts == 1
    assert await lab.admin.requeue(job_id, tenant=TENANT, actor="ada")
    assert (await lab.claim_one()).attempt == 1
    assert [failure.error for failure in (await lab.job(job_id)).failures] == ["no"]


async def test_job_cancelled_twice_counts_two_deaths(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect")
    assert await lab.admin.cancel(job_id, **WHO)
    assert await lab.admin.requeue(job_id, tenant=TENANT, actor="ada")
    assert await lab.admin.cancel(job_id, **(WHO | {"reason": "again"}))
    (dead,) = await lab.rows("SELECT deaths, error, requeued_at FROM onceward_dead_letters")
    assert tuple(dead.values()) == (2, "again", None)


async def test_job_that_does_not_wait_is_not_cancelled(lab: JobsLab) -> None:
    running, ended = [await lab.enqueued("effect", resource_id=n) for n in ("one", "two")]
    for job in await lab.claim():
        if job.lease.job_id == ended:
            await lab.job_store.complete_alone([(job.lease, None)], worker="test-worker")
    for job_id in (running, ended, UNKNOWN, "no id"):
        assert not await lab.admin.cancel(job_id, **WHO)
    assert await lab.state(running) == "running"
    assert await lab.state(ended) == "done"
    await lab.show_in(-1)  # its lease has expired: the next worker claims it
    assert not await lab.admin.cancel(running, **WHO)
    assert await lab.count("onceward_dead_letters") == 0
    assert not await lab.rows(
        "SELECT id FROM onceward_audit_events WHERE endpoint LIKE 'job.cancelled%'"
    )


async def test_job_of_another_tenant_is_not_cancelled(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect", tenant="bob")
    assert not await lab.admin.cancel(job_id, **WHO)
    assert await lab.admin.cancel(job_id, **(WHO | {"tenant": ALL_TENANTS}))


async def test_first_cancelled_job_of_an_order_key_releases_the_next(lab: JobsLab) -> None:
    first, second, third = [
        await lab.enqueued("effect", resource_id=name, order="day") for name in "abc"
    ]
    assert await lab.admin.cancel(second, **WHO)  # in the middle: nobody is released
    assert [job.lease.job_id for job in await lab.claim()] == [first]
    assert await lab.claim() == []
    await lab.store.write(
        lab.store.table_names.render(
            "UPDATE onceward_jobs SET state = 'waiting' WHERE resource_id = 'a'"
        )
    )
    assert await lab.admin.cancel(first, **WHO)
    assert [job.lease.job_id for job in await lab.claim()] == [third]


async def test_job_enqueued_after_a_cancelled_coalesced_one_is_new(lab: JobsLab) -> None:
    first = await lab.enqueued("effect", {"n": 1}, coalesce="day")
    assert await lab.admin.cancel(first, **WHO)
    second = await lab.enqueued("effect", {"n": 2}, coalesce="day")
    assert second != first
    assert (await lab.claim_one()).lease.job_id == second


async def test_two_operators_cancel_a_job_once(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect")
    cancelled = await asyncio.gather(*(lab.admin.cancel(job_id, **WHO) for _ in range(4)))
    assert sorted(cancelled) == [False, False, False, True]
    events = await lab.rows(
        "SELECT id FROM onceward_audit_events WHERE endpoint LIKE 'job.cancelled%'"
    )
    assert len(events) == 1


async def test_cancel_races_workers_and_one_of_them_wins(effect_lab: JobsLab) -> None:
    lab = effect_lab
    await lab.start_worker(concurrency=4)
    names, cancelled = [f"job-{number:03}" for number in range(60)], 0
    head_start = 0.0  # of the worker, in seconds; nears what makes either win, on any machine
    for name in names:
        async with lab.transaction() as tx:
            outcome = await lab.enqueue_in(tx, "effect", resource_id=name)
        if head_start > 0:
            lab.notify()
            await asyncio.sleep(head_start)
        cancelling = asyncio.create_task(lab.admin.cancel(outcome.job_id, **WHO))
        if head_start <= 0:
            await asyncio.sleep(-head_start)
            lab.notify()
        is_cancelled = await cancelling
        cancelled += is_cancelled
        head_start += 0.0005 if is_cancelled else -0.0005
        await lab.until_idle()
        await asyncio.sleep(0.005)  # then the worker waits for the next notification
    await lab.until_idle()
    done = await lab.effects()
    dead = [row["resource_id"] for row in await lab.rows("SELECT * FROM onceward_dead_letters")]
    assert sorted(done + dead) == names
    assert len(dead) == cancelled
    assert 0 < cancelled < len(names), "only one side has won: this test shows nothing"
    assert lab.outcomes.all == ["done"] * len(done)


async def test_claim_and_cancel_at_once_leave_each_job_on_one_side(lab: JobsLab) -> None:
    ids = [await lab.enqueued("effect", resource_id=f"{number}") for number in range(60)]
    claiming = asyncio.create_task(lab.claim())
    cancelled = await asyncio.gather(*(lab.admin.cancel(job_id, **WHO) for job_id in ids))
    leased = await claiming
    more = await lab.claim()  # rows that were locked at the first
    taken = {job.lease.job_id for job in [*leased, *more]}
    given_up = {job_id for job_id, done in zip(ids, cancelled, strict=True) if done}
    assert taken.isdisjoint(given_up)
    assert taken | given_up == set(ids)
    assert await lab.count("onceward_dead_letters") == len(given_up)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_cancel_waits_for_a_claim_that_has_locked_the_row(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect")
    unit = await lab.store.begin()
    try:
        await unit.statements.execute(
            "UPDATE onceward.jobs SET state = 'running', worker = 'w', lease = lease + 1"
        )
        cancelling = asyncio.create_task(lab.admin.cancel(job_id, **WHO))

        async def waits() -> bool:
            rows = await lab.rows("SELECT pid FROM pg_locks WHERE NOT granted")
            return bool(rows)

        await eventually(waits)
        await unit.commit(None, None)
        assert await cancelling is False
    finally:
        await unit.rollback()
    assert await lab.state(job_id) == "running"


async def test_message_about_a_cancelled_job_is_acknowledged(lab: JobsLab, nats: NatsLab) -> None:
    gate = Gate(lab)
    await lab.start_worker(engine=nats.engine(), concurrency=1)
    running = await lab.enqueued("gated", resource_id="one")
    await gate.started.wait()
    waiting = await lab.enqueued("gated", resource_id="two")

    async def is_published() -> bool:
        return await nats.messages() == 2

    await eventually(is_published)
    assert await lab.admin.cancel(waiting, **WHO)
    gate.opened.set()
    await lab.until(running, "done")
    await nats.until_empty()
    assert (await lab.effects(), gate.runs) == (["one"], 1)
    assert await lab.state(waiting) == "dead"
