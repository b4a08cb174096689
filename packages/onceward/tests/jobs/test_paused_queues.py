"""Paused queues: their jobs are not claimed, not lost, and run once after the queue is resumed."""

import asyncio
import signal
from datetime import UTC, datetime

import pytest

from onceward.errors import UsageError
from onceward.jobs.admin import PausedQueues
from onceward.tenants import ALL_TENANTS
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.jobs.handlers import Gate, add_effect
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    WorkerProcess,
    eventually,
)

ON_POSTGRES = pytest.mark.parametrize("database", ["postgresql"], indirect=True)
WHO = {"actor": "ada", "reason": "the mill burns"}


@pytest.fixture
async def paused(lab: JobsLab) -> PausedQueues:
    return PausedQueues(lab.store, lab.notify)


@pytest.fixture(params=["sql", "jetstream"])
async def engine_lab(request: pytest.FixtureRequest, lab: JobsLab) -> JobsLab:
    """A lab whose workers use one of the engines, with a handler that writes an effect."""
    add_effect(lab)
    if request.param == "jetstream":
        nats: NatsLab = request.getfixturevalue("nats")
        start = lab.start_worker
        lab.start_worker = lambda *store, **more: start(  # type: ignore[method-assign]
            *store, engine=nats.engine(), **more
        )
    return lab


async def delivered(lab: JobsLab, nats: NatsLab) -> int:
    """Return how many messages the broker has delivered, counting repetitions."""
    info = await nats.consumer_info(lab.store)
    assert info.delivered is not None
    return info.delivered.consumer_seq


async def claims(lab: JobsLab) -> int:
    """Return how often jobs were leased."""
    return int((await lab.rows("SELECT coalesce(sum(lease), 0) AS n FROM onceward_jobs"))[0]["n"])


# -- the claim ------------------------------------------------------------------------------------


async def test_claim_skips_only_paused_queues(lab: JobsLab, paused: PausedQueues) -> None:
    for queue in ("mail", "routes"):
        await lab.enqueue("effect", resource_id=queue, queue=queue)
    both = ("mail", "routes")
    assert await paused.pause("mail", **WHO)
    (job,) = await lab.job_store.claim(both, worker="w", limit=10, lease_seconds=30)
    assert job.queue == "routes"
    assert await lab.job_store.claim(both, worker="w", limit=10, lease_seconds=30) == []
    assert await paused.resume("mail", **WHO)
    (job,) = await lab.job_store.claim(both, worker="w", limit=10, lease_seconds=30)
    assert (job.queue, job.attempt) == ("mail", 1)


async def test_named_job_of_paused_queue_is_not_claimed(lab: JobsLab, paused: PausedQueues) -> None:
    job_id = await lab.enqueued("effect")
    await paused.pause("default", **WHO)
    named = [("ada", job_id)]
    assert await lab.job_store.claim_these(named, worker="w", lease_seconds=30) == []
    await paused.resume("default", **WHO)
    assert len(await lab.job_store.claim_these(named, worker="w", lease_seconds=30)) == 1


async def test_idle_workers_and_relays_do_not_wait_for_jobs_of_paused_queues(
    lab: JobsLab, paused: PausedQueues
) -> None:
    await lab.enqueue("effect", resource_id="due")
    await lab.enqueue("effect", resource_id="later", delay_seconds=60)
    queues = ("default",)

    async def looks() -> tuple[object, ...]:
        publish = await lab.published_jobs.to_publish(
            queues, front=10, limit=10, again_after_seconds=30
        )
        return (
            await lab.job_store.due_in(queues),
            await lab.published_jobs.publish_due_in(queues) is None,
            len(await lab.published_jobs.overdue(queues, seconds=-1, limit=10)),
            len(publish),
        )

    assert await looks() == (0, False, 1, 1)
    await paused.pause("default", **WHO)
    assert await looks() == (None, True, 0, 0)
    await paused.resume("default", **WHO)
    assert await looks() == (0, False, 1, 1)


async def test_expired_lease_in_paused_queue_is_not_claimed_and_counts_nothing(
    lab: JobsLab, paused: PausedQueues
) -> None:
    job_id = await lab.enqueued("effect")
    await lab.claim_one("dead-worker")
    await lab.show_in(-1)
    await paused.pause("default", **WHO)
    assert await lab.claim("other") == []
    found = await lab.job(job_id)
    assert (found.view.attempts, found.failures) == (1, ())
    await paused.resume("default", **WHO)
    assert (await lab.claim_one("other")).attempt == 2
    assert [failure.reason for failure in (await lab.job(job_id)).failures] == ["worker_lost"]


# -- pause and resume -----------------------------------------------------------------------------


async def test_pause_and_resume_take_effect_once_and_are_audited(
    lab: JobsLab, paused: PausedQueues
) -> None:
    before = datetime.now(UTC)
    changes = await asyncio.gather(*(paused.pause("mail", **WHO) for _ in range(4)))
    assert sorted(changes) == [False, False, False, True]
    (found,) = await paused.all()
    assert (found.queue, found.actor, found.reason) == ("mail", "ada", "the mill burns")
    assert before <= found.paused_at <= datetime.now(UTC)
    changes = await asyncio.gather(
        *(paused.resume("mail", actor="bob", reason="rebuilt") for _ in range(4))
    )
    assert sorted(changes) == [False, False, False, True]
    assert await paused.all() == []
    events = await lab.rows(
        "SELECT tenant, endpoint, actor, reason, resource, status FROM onceward_audit_events"
        " ORDER BY id"
    )
    assert [tuple(event.values()) for event in events] == [
        ("onceward:operator", "queue.paused mail", "ada", "the mill burns", "queue:mail", 200),
        ("onceward:operator", "queue.resumed mail", "bob", "rebuilt", "queue:mail", 200),
    ]


@pytest.mark.parametrize("name", ["", "two words", "x" * 101, "a\x00b"])
async def test_malformed_name_is_refused(paused: PausedQueues, name: str) -> None:
    with pytest.raises(UsageError):
        await paused.pause(name, **WHO)


# -- workers --------------------------------------------------------------------------------------


async def test_paused_queue_runs_nothing_and_resumed_runs_all_once(
    engine_lab: JobsLab, paused: PausedQueues
) -> None:
    lab = engine_lab
    await lab.start_worker()
    await lab.enqueue(resource_id="warm")
    await lab.until_idle()
    await paused.pause("default", **WHO)
    names = [f"job-{number:02}" for number in range(30)]
    for name in names:
        await lab.enqueue(resource_id=name)
    await asyncio.sleep(0.5)
    assert await lab.effects() == ["warm"]
    assert await claims(lab) == 0
    assert await paused.resume("default", **WHO)
    await lab.until_idle()
    assert sorted(await lab.effects()) == [*names, "warm"]
    assert lab.outcomes.all == ["done"] * 31
    assert await lab.count("onceward_dead_letters") == 0


async def test_running_job_goes_on_in_a_paused_queue(lab: JobsLab, paused: PausedQueues) -> None:
    gate = Gate(lab)
    await lab.start_worker()
    job_id = await lab.enqueued("gated", resource_id="one")
    await gate.started.wait()
    await paused.pause("default", **WHO)
    gate.opened.set()
    await lab.until(job_id, "done")
    assert await lab.effects() == ["one"]


async def test_worker_killed_while_its_queue_is_paused_loses_nothing(
    lab: JobsLab, paused: PausedQueues, database: str
) -> None:
    add_effect(lab)
    names = [f"job-{number}" for number in range(6)]
    for name in names:
        await lab.enqueue("effect", resource_id=name)
    worker = WorkerProcess(database, JOBS_THINK_SECONDS="60", JOBS_CONCURRENCY="3")
    try:
        worker.wait_for("started")

        async def three_run() -> bool:
            return len(await lab.admin.jobs(tenant=ALL_TENANTS, state="running")) == 3

        await eventually(three_run)
        await paused.pause("default", **WHO)
        worker.signal(signal.SIGKILL)
        worker.wait_until_killed()
    finally:
        worker.end()
    leases = await claims(lab)
    await lab.start_worker()
    await asyncio.sleep(1.5)  # the leases of the dead worker end after a second
    assert await lab.effects() == []
    assert (await claims(lab), await lab.count("onceward_jobs")) == (leases, 6)
    await paused.resume("default", **WHO)
    await lab.until_idle(hurry=True)
    assert sorted(await lab.effects()) == names
    assert await lab.count("onceward_dead_letters") == 0


# -- messages that were delivered -----------------------------------------------------------------


async def test_delivered_messages_of_paused_queue_are_taken_back_and_published_after_resume(
    effect_lab: JobsLab, paused: PausedQueues, nats: NatsLab
) -> None:
    lab, names = effect_lab, [f"job-{number}" for number in range(10)]
    for name in names:
        await lab.enqueue("effect", resource_id=name)
    publishing = nats.engine_of(lab.job_store, "default")
    await publishing.open()

    async def all_published() -> bool:
        rows = await lab.rows("SELECT id FROM onceward_jobs WHERE published_at IS NOT NULL")
        return len(rows) == 10 and await nats.messages() == 10

    await eventually(all_published)
    await publishing.close()
    await paused.pause("default", **WHO)
    await lab.start_worker(engine=nats.engine())
    await nats.until_empty()  # taken back, not delivered again and again
    deliveries = await delivered(lab, nats)
    rows = await lab.rows("SELECT id FROM onceward_jobs WHERE published_at IS NULL")
    assert len(rows) == 10
    await asyncio.sleep(1.2)  # the relay looks every second
    assert await nats.messages() == 0
    assert await delivered(lab, nats) == deliveries
    assert (await lab.effects(), await claims(lab)) == ([], 0)
    await paused.resume("default", **WHO)
    await lab.until_idle()
    assert sorted(await lab.effects()) == names
    assert lab.outcomes.all == ["done"] * 10
    await nats.until_empty()


async def test_overdue_jobs_of_paused_queue_are_not_taken_from_the_table(
    effect_lab: JobsLab, paused: PausedQueues, nats: NatsLab
) -> None:
    lab = effect_lab
    await paused.pause("default", **WHO)
    await lab.enqueue("effect", resource_id="one")
    await lab.start_worker(engine=nats.engine(table_after_seconds=0.2))
    await asyncio.sleep(1.0)
    assert (await lab.effects(), await claims(lab)) == ([], 0)
    await paused.resume("default", **WHO)
    await lab.until_idle()
    assert await lab.effects() == ["one"]


@ON_POSTGRES
async def test_message_about_locked_job_of_paused_queue_is_not_acknowledged(
    effect_lab: JobsLab, paused: PausedQueues, nats: NatsLab
) -> None:
    """Its row cannot be marked as unpublished, so the message must come again."""
    lab = effect_lab
    job_id = await lab.enqueued("effect")
    await paused.pause("default", **WHO)
    engine = nats.engine_of(lab.job_store, "default", relay=False)
    await engine.open()
    unit = await lab.store.begin()
    try:
        await nats.until_consumer(lab.store)
        await unit.statements.execute("SELECT id FROM onceward.jobs FOR UPDATE")
        await nats.send_job(lab.store, job_id)

        async def came_again() -> bool:
            assert not await engine.take(10, 0.2)
            return await delivered(lab, nats) >= 3

        await eventually(came_again)
        assert await nats.messages() == 1
        await unit.rollback()

        async def is_taken_back() -> bool:
            assert not await engine.take(10, 0.2)
            return await nats.messages() == 0

        await eventually(is_taken_back)
    finally:
        await unit.rollback()
        await engine.close()
