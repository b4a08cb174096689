"""The jetstream engine on a real NATS: whatever the broker does, the tables decide."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.js.api import RetentionPolicy, StreamConfig

from onceward import open_store
from onceward.errors import NonRetryableError, StoreUnavailableError
from onceward.jobs.context import JobContext
from onceward.jobs.worker import EngineMaker
from onceward.ports import Finished, Store
from onceward_nats import relay
from onceward_protocol.retry import Jitter, RetryPolicy
from onceward_testing.engine_contract import EngineContract
from packages.nats.tests.nats_harness import NatsLab, taken
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.jobs_harness import (
    eventually,
    write_effect,
)

# For what has to do with the broker alone, or with one database more than with the other.
ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
ON_POSTGRES = pytest.mark.parametrize("database", ["postgresql", *ON_CITUS], indirect=True)

SOON = RetryPolicy(first_seconds=0.05, ceiling_seconds=0.05, jitter=Jitter.UP_TO, attempts=5)


class TestJetStreamEngine(EngineContract):
    """What every engine must do."""

    @pytest.fixture
    async def store(self, database: str) -> AsyncIterator[Store]:
        store = open_store(database)
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    def new_engine(self, nats: NatsLab) -> EngineMaker:
        return nats.engine()


# -- the way of a job -----------------------------------------------------------------------------


async def test_job_is_published_executed_and_acknowledged(effect_lab, nats):
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued(resource_id="one")
    done = await effect_lab.until(job_id, "done")
    assert done.view.attempts == 1
    assert await effect_lab.effects() == ["one"]
    await nats.until_empty(seconds=3)  # before it is redelivered, after 5
    info = await nats.stream_info()
    assert info.config.retention == RetentionPolicy.WORK_QUEUE
    assert info.config.duplicate_window == 120
    assert info.config.num_replicas == 1  # there is one node
    consumer = await nats.consumer_info(effect_lab.store)
    assert (consumer.config.max_deliver, consumer.config.ack_wait) == (-1, 5)


async def test_many_jobs_over_two_workers_and_queues_all_end_once(lab, nats, another_store):
    for queue in ("mail.out", "mail", "mail-out"):

        @lab.jobs.handler(f"in.{queue}", queue=queue)
        async def effect(job: JobContext) -> None:
            await write_effect(job, f"{job.queue} {job.resource_id}")

    await lab.start_worker(engine=nats.engine(), concurrency=2)
    await lab.start_worker(await another_store(), engine=nats.engine(), concurrency=3)
    for number in range(20):
        for queue in lab.jobs.queues:
            await lab.enqueue(f"in.{queue}", resource_id=str(number))
    await lab.until_idle()
    wanted = [f"{queue} {number}" for number in range(20) for queue in lab.jobs.queues]
    assert sorted(await lab.effects()) == sorted(wanted)
    await nats.until_empty()


async def test_job_committed_in_another_process_starts_at_once(
    effect_lab, nats, another_store, monkeypatch
):
    monkeypatch.setattr(relay, "_LOOK_SECONDS", 60)
    await effect_lab.start_worker(engine=nats.engine())
    first = await effect_lab.enqueued(resource_id="warm")
    await effect_lab.until(first, "done")
    notifier = (await another_store()).notifier()  # like the server of an app that only enqueues
    workers, effect_lab.workers = effect_lab.workers, []
    job_id = await effect_lab.enqueued(resource_id="now")
    effect_lab.workers = workers
    notifier.notify()
    await effect_lab.until(job_id, "done", seconds=20)
    await notifier.close()


@ON_SQLITE
async def test_delayed_job_starts_when_it_is_due(effect_lab, nats):
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued(delay_seconds=0.8)
    began = time.monotonic()
    await effect_lab.until(job_id, "done")
    assert time.monotonic() - began > 0.6


async def test_a_job_that_enqueues_another_is_followed_by_it(effect_lab, nats):
    @effect_lab.jobs.handler("first")
    async def first(job: JobContext) -> None:
        await write_effect(job, "first")
        await job.enqueue("effect", resource_id="second")

    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.enqueue("first")
    await effect_lab.until_idle()
    assert await effect_lab.effects() == ["first", "second"]


async def test_ordered_jobs_stay_in_order(effect_lab, nats, another_store):
    for number in range(15):
        await effect_lab.enqueue(resource_id=f"{number:02}", order="ada's day")
    for _ in range(2):
        await effect_lab.start_worker(await another_store(), engine=nats.engine(), concurrency=4)
    await effect_lab.until_idle()
    assert await effect_lab.effects() == [f"{number:02}" for number in range(15)]


# -- delivered too often --------------------------------------------------------------------------


async def test_a_job_delivered_20_times_to_4_workers_has_one_effect(lab, nats, another_store):
    released = asyncio.Event()

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await released.wait()
        await write_effect(job)

    for _ in range(4):
        await lab.start_worker(await another_store(), engine=nats.engine(), lease_seconds=5)
    job_id = await lab.enqueued(resource_id="one")
    await lab.until(job_id, "running")
    await nats.send_job(lab.store, job_id, times=19)

    async def all_delivered() -> bool:
        return bool((await nats.consumer_info(lab.store)).num_pending == 0)

    await eventually(all_delivered)
    released.set()
    assert (await lab.until(job_id, "done")).view.attempts == 1
    await nats.until_empty()
    assert await lab.effects() == ["one"]
    assert await lab.count("onceward_job_completions") == 1


@ON_POSTGRES
async def test_two_messages_about_one_job_in_one_packet_give_one_lease(effect_lab, nats):
    job_id = await effect_lab.enqueued()
    engine = nats.engine_of(effect_lab.job_store, "default", relay=False, lease_seconds=0.7)
    await engine.open()
    try:
        await nats.until_consumer(effect_lab.store)
        await nats.send_job(effect_lab.store, job_id, times=3)
        delivery = await taken(engine)
        assert delivery.job.lease.number == 1
        assert list(await engine.take(10, 0.2)) == []
        assert await effect_lab.job_store.dead_letter(
            delivery.job, worker="test-worker", reason="error", error="no"
        )
        await engine.settle(delivery, Finished())

        async def nothing_is_left() -> bool:
            assert not await engine.take(10, 0.2)
            return bool(await nats.messages() == 0)

        await eventually(nothing_is_left)  # the others come again, and are done by then
    finally:
        await engine.close()


@ON_POSTGRES
async def test_job_whose_row_was_locked_for_a_moment_is_leased_without_another_delivery(
    effect_lab, nats, monkeypatch
):
    """The relay locks it, to mark it as published; on Citus that often meets the claim."""
    job_id = await effect_lab.enqueued()
    store = effect_lab.job_store
    engine = nats.engine_of(store, "default", relay=False, lease_seconds=30)
    await engine.open()
    locking = await effect_lab.store.begin()
    try:
        await nats.until_consumer(effect_lab.store)
        row = {"tenant": "ada", "id": job_id}
        sql = "SELECT 1 FROM onceward.jobs WHERE tenant = :tenant AND id = :id::uuid FOR UPDATE"
        await locking.statements.fetch_all(sql, row)
        still_to_do = engine._published.still_to_do

        async def unlocked(jobs: Any) -> Any:
            await locking.rollback()
            return await still_to_do(jobs)

        monkeypatch.setattr(engine._published, "still_to_do", unlocked)
        await nats.send_job(effect_lab.store, job_id, times=2)
        delivery = await taken(engine)
        assert delivery.job.lease.number == 1
        consumer = await nats.consumer_info(effect_lab.store)
        assert (consumer.delivered.consumer_seq, consumer.num_redelivered) == (2, 0)
    finally:
        await locking.rollback()
        await engine.close()


@ON_SQLITE
async def test_an_old_message_about_a_finished_job_is_acknowledged_without_running(
    effect_lab, nats
):
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued()
    await effect_lab.until(job_id, "done")
    await nats.send_job(effect_lab.store, job_id, times=3)
    await nats.until_empty()
    assert effect_lab.outcomes.all == ["done"]


@ON_SQLITE
async def test_duplicate_published_after_the_dedup_window_has_one_effect(effect_lab, nats):
    """The relay died before its mark, and the broker has forgotten the number meanwhile."""
    async with nats.broker() as broker:
        await broker.add_stream(
            StreamConfig(
                name=nats.stream,
                subjects=[f"{nats.subject}.>"],
                retention=RetentionPolicy.WORK_QUEUE,
                duplicate_window=0.1,
            )
        )
    died: list[str] = []

    class DiesOnce:
        async def reach(self, point: str) -> None:
            if point == "relay_before_mark" and not died:
                died.append(point)
                raise StoreUnavailableError("killed")
            if died:
                await asyncio.sleep(0.3)  # longer than the broker remembers

    job_id = await effect_lab.enqueued(resource_id="one")
    relay_only = nats.engine_of(effect_lab.job_store, "default", faults=DiesOnce())
    await relay_only.open()

    async def twice() -> bool:
        return bool(await nats.messages() == 2)

    await eventually(twice)
    await relay_only.close()
    assert died == ["relay_before_mark"]
    await effect_lab.start_worker(engine=nats.engine(), lease_seconds=0.6)
    await effect_lab.until(job_id, "done")
    await nats.until_empty()
    assert await effect_lab.effects() == ["one"]
    assert effect_lab.outcomes.all == ["done"]


@ON_POSTGRES
async def test_a_long_job_is_not_delivered_to_another(lab, nats, another_store):
    delivered: list[int] = []

    @lab.jobs.handler("long")
    async def long(job: JobContext) -> None:
        delivered.append((await nats.consumer_info(lab.store)).delivered.consumer_seq)
        await asyncio.sleep(3.6)
        await write_effect(job)

    for _ in range(2):
        await lab.start_worker(await another_store(), engine=nats.engine(), lease_seconds=3)
    job_id = await lab.enqueued("long", resource_id="one")
    done = await lab.until(job_id, "done")
    assert done.view.attempts == 1
    consumer = await nats.consumer_info(lab.store)
    # in_progress kept it from coming again. Before, it may have: a locked row is returned.
    assert [consumer.delivered.consumer_seq] == delivered
    assert lab.outcomes.all == ["done"]


async def test_a_worker_that_dies_between_commit_and_acknowledgement_has_one_effect(
    effect_lab, nats
):
    class Killed(BaseException):
        pass

    class DiesAfterCommit:
        async def reach(self, point: str) -> None:
            if point == "job_after_commit":
                raise Killed

    await effect_lab.start_worker(engine=nats.engine(), faults=DiesAfterCommit(), lease_seconds=1)
    job_id = await effect_lab.enqueued(resource_id="one")
    await effect_lab.until(job_id, "done")
    assert await nats.messages() == 1  # not acknowledged
    await nats.until_empty()
    assert await effect_lab.effects() == ["one"]
    assert effect_lab.outcomes.all == []


# -- failing --------------------------------------------------------------------------------------


@ON_SQLITE
async def test_a_retry_waits_at_the_broker_for_its_delay(lab, nats):
    started: list[float] = []
    published: list[int] = []

    @lab.jobs.handler("flaky")
    async def flaky(job: JobContext) -> None:
        started.append(time.monotonic())
        published.append((await lab.rows("SELECT published FROM onceward_jobs"))[0]["published"])
        if len(started) == 1:
            raise RuntimeError("not yet")
        await write_effect(job)

    await lab.start_worker(engine=nats.engine())
    job_id = await lab.enqueued("flaky")
    done = await lab.until(job_id, "done")
    assert done.view.attempts == 2
    assert 1 <= started[1] - started[0] < 2.5
    assert published[1] == 1  # the same message came again


async def test_job_that_fails_five_times_is_dead_lettered(lab, nats, monkeypatch):
    monkeypatch.setattr("onceward.jobs.executor.WORKER", SOON)

    @lab.jobs.handler("poison")
    async def poison(job: JobContext) -> None:
        await write_effect(job)
        raise RuntimeError(f"attempt {job.attempt}")

    await lab.start_worker(engine=nats.engine())
    job_id = await lab.enqueued("poison")
    dead = await lab.until(job_id, "dead")
    assert [failure.error for failure in dead.failures] == [
        f"RuntimeError: attempt {number}" for number in range(1, 6)
    ]
    await nats.until_empty()
    assert await lab.effects() == []
    assert await lab.count("onceward_dead_letters") == 1


@ON_SQLITE
async def test_unknown_types_and_non_retryable_errors_are_dead_lettered_at_once(lab, nats):
    @lab.jobs.handler("hopeless")
    async def hopeless(job: JobContext) -> None:
        raise NonRetryableError("never")

    await lab.start_worker(engine=nats.engine())
    unknown = await lab.enqueued("unheard.of")
    never = await lab.enqueued("hopeless")
    assert (await lab.until(unknown, "dead")).view.reason == "unknown_type"
    assert (await lab.until(never, "dead")).view.reason == "non_retryable"
    await nats.until_empty()
    assert lab.outcomes.all == ["dead", "dead"]


async def test_requeued_dead_letter_runs_at_once(lab, nats):
    """Its first message had the same job id, which the broker remembers for two minutes."""
    helped = asyncio.Event()

    @lab.jobs.handler("helped")
    async def work(job: JobContext) -> None:
        if not helped.is_set():
            raise NonRetryableError("help")
        await write_effect(job)

    await lab.start_worker(engine=nats.engine())
    job_id = await lab.enqueued("helped", resource_id="one")
    await lab.until(job_id, "dead")
    helped.set()
    assert await lab.admin.requeue(job_id, tenant="ada", actor="operator")
    lab.notify()
    await lab.until(job_id, "done", seconds=5)
    assert await lab.effects() == ["one"]


@ON_POSTGRES
async def test_malformed_message_is_terminated_and_logged(effect_lab, nats, caplog):
    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.until(await effect_lab.enqueued(resource_id="before"), "done")
    for garbage in (
        b"",
        b"\xff",
        b"[]",
        b'{"tenant": "ada"}',
        b'{"tenant": "ada", "job_id": "1; DROP TABLE onceward_jobs"}',
        b'{"tenant": "\\u0000", "job_id": "7f3b1c1e-7a0b-4c57-9f4c-0d5d5f3c1a11"}',
    ):
        await nats.send(effect_lab.store, garbage)
    await nats.until_empty()
    await effect_lab.until(await effect_lab.enqueued(resource_id="after"), "done")
    assert await effect_lab.effects() == ["before", "after"]
    logged = [record for record in caplog.records if "is malformed" in record.message]
    assert len(logged) == 6
