"""The broker and the tables disagree, or the broker is away: no job is lost, none runs twice."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import StreamConfig

from onceward import open_store
from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.jobs.context import JobContext
from onceward.jobs.job_store import JobStore
from onceward.ports import Delivery, Finished, Retry
from onceward_nats.jetstream import JetStreamEngine
from packages.nats.tests.nats_harness import NatsLab, taken
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    eventually,
    make_effects,
    write_effect,
)

# For what has to do with the broker alone, or with one database more than with the other.
ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
ON_POSTGRES = pytest.mark.parametrize("database", ["postgresql", *ON_CITUS], indirect=True)


# -- the database and the broker disagree ---------------------------------------------------------


async def test_message_for_a_job_that_is_not_due_is_redelivered(lab, nats):
    job_id = await lab.enqueued("any", delay_seconds=0.8)
    began = time.monotonic()
    engine = nats.engine_of(lab.job_store, "default", relay=False)
    await engine.open()
    try:
        await nats.until_consumer(lab.store)
        await nats.send_job(lab.store, job_id)
        assert (await taken(engine)).job.attempt == 1
        assert time.monotonic() - began > 0.7
    finally:
        await engine.close()


async def test_message_about_a_job_waiting_for_its_order_key_is_acknowledged(effect_lab, nats):
    """The relay publishes it when the job before it has ended."""
    ids = [
        await effect_lab.enqueued(resource_id=name, order="ada's day") for name in ("first", "next")
    ]
    engine = nats.engine_of(effect_lab.job_store, "default", relay=False)
    await engine.open()
    try:
        await nats.until_consumer(effect_lab.store)
        await nats.send_job(effect_lab.store, ids[1])

        async def is_gone() -> bool:
            assert list(await engine.take(10, 0.1)) == []
            return bool(await nats.messages() == 0)

        await eventually(is_gone)
    finally:
        await engine.close()
    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.until_idle(seconds=8)
    assert await effect_lab.effects() == ["first", "next"]


@ON_POSTGRES
async def test_a_stale_acknowledgement_loses_nothing(effect_lab, nats):
    """It is accepted by the broker, so the row has to bring the job back."""
    lab = effect_lab
    job_id = await lab.enqueued(resource_id="one")
    paused = nats.engine_of(lab.job_store, "default", worker="paused", lease_seconds=0.6)
    await paused.open()
    stale = await taken(paused)
    second = nats.engine_of(
        lab.job_store, "default", worker="second", lease_seconds=0.6, relay=False
    )
    await second.open()
    theirs = await taken(second)  # after the first lease has run out
    assert theirs.job.lease.number == 2
    await paused.settle(stale, Finished())
    await nats.until_empty()
    await second.close()  # it dies with its lease, and no message is left to be delivered again
    await paused.close()
    assert await lab.state(job_id) == "running"
    await lab.start_worker(engine=nats.engine(again_after_seconds=0.3), lease_seconds=0.6)
    done = await lab.until(job_id, "done")
    assert done.view.attempts == 3
    assert await lab.effects() == ["one"]


@ON_SQLITE
async def test_message_is_redelivered_after_a_failed_claim(effect_lab, nats, monkeypatch):
    worker = await effect_lab.start_worker(engine=nats.engine())
    real = worker.job_store.claim_these
    errors = [StoreUnavailableError("gone")]

    async def fails_once(*args: Any, **values: Any) -> Any:
        if errors:
            raise errors.pop()
        return await real(*args, **values)

    monkeypatch.setattr(worker.job_store, "claim_these", fails_once)
    job_id = await effect_lab.enqueued(resource_id="one")
    await effect_lab.until(job_id, "done", seconds=4)  # long before ack_wait, which is 5
    assert errors == []
    assert await effect_lab.effects() == ["one"]


@ON_SQLITE
async def test_messages_above_capacity_go_to_another_worker(lab, nats):
    """Two queues deliver one message each to a worker with one free slot."""
    for queue in ("first", "second"):
        await lab.enqueue("any", queue=queue)
    full = nats.engine_of(lab.job_store, "first", "second", worker="full")
    free = nats.engine_of(lab.job_store, "first", "second", worker="free", relay=False)
    await full.open()
    await free.open()
    try:

        async def one() -> list[Delivery]:
            return list(await full.take(1, 0.2))

        (kept,) = await eventually(one, pause=0)
        other = await taken(free, seconds=5)  # not after the ack_wait of 30 seconds
        assert {kept.job.queue, other.job.queue} == {"first", "second"}
    finally:
        await full.close()
        await free.close()


@ON_SQLITE
async def test_closing_engine_returns_unprocessed_messages(lab, nats):
    job_id = await lab.enqueued("any")
    closing = nats.engine_of(lab.job_store, "default", worker="closing", relay=False)
    await closing.open()
    await nats.until_consumer(lab.store)

    async def has_asked() -> bool:
        assert list(await closing.take(10, 0.1)) == []
        return bool((await nats.consumer_info(lab.store)).num_waiting)

    await eventually(has_asked)
    await nats.send_job(lab.store, job_id)

    async def is_delivered() -> bool:
        return bool((await nats.consumer_info(lab.store)).num_ack_pending)

    await eventually(is_delivered)
    await closing.close()
    other = nats.engine_of(lab.job_store, "default", worker="other", relay=False)
    await other.open()
    try:
        delivery = await taken(other, seconds=5)  # not after the ack_wait of 30 seconds
        assert delivery.job.attempt == 1
    finally:
        await other.close()


async def test_stopping_worker_releases_its_jobs(lab, nats, another_store):
    begun = asyncio.Event()

    @lab.jobs.handler("slow")
    async def slow(job: JobContext) -> None:
        if not begun.is_set():
            begun.set()
            await asyncio.sleep(60)
        await write_effect(job)

    stopping = await lab.start_worker(engine=nats.engine(), shutdown_seconds=0.1, lease_seconds=30)
    job_id = await lab.enqueued("slow")
    await begun.wait()
    await lab.start_worker(await another_store(), engine=nats.engine(), lease_seconds=30)
    await stopping.stop()
    await lab.until(job_id, "done", seconds=5)
    assert lab.outcomes.all == ["given_back", "done"]


@ON_SQLITE
async def test_retried_job_is_not_delivered_before_its_delay(effect_lab, nats):
    await effect_lab.enqueue()
    engine = nats.engine_of(effect_lab.job_store, "default")
    await engine.open()
    try:
        delivery = await taken(engine)
        assert await effect_lab.job_store.retry(
            delivery.job, worker="test-worker", reason="error", error="no", delay_seconds=0.7
        )
        await engine.settle(delivery, Retry(0.7))
        began = time.monotonic()
        again = await taken(engine)
        assert time.monotonic() - began > 0.6
        assert again.job.attempt == 2
    finally:
        await engine.close()


async def test_two_databases_on_one_stream_do_not_get_each_others_jobs(nats, tmp_path: Path):
    labs = []
    for name in ("left", "right"):
        store = open_store(f"sqlite:///{tmp_path}/{name}.db")
        await store.open()
        await make_effects(store)
        lab = JobsLab(store)

        @lab.jobs.handler("effect")
        async def effect(job: JobContext, name: str = name) -> None:
            await write_effect(job, f"{name} {job.resource_id}")

        await lab.start_worker(engine=nats.engine())
        labs.append(lab)
    try:
        for number in range(10):
            for lab in labs:
                await lab.enqueue(resource_id=str(number))
        for lab, name in zip(labs, ("left", "right"), strict=True):
            await lab.until_idle(seconds=5)  # before anything is published again
            wanted = [f"{name} {number}" for number in range(10)]
            assert sorted(await lab.effects()) == wanted
    finally:
        for lab in labs:
            await lab.stop_workers()
            await lab.store.close()


# -- the broker is away ---------------------------------------------------------------------------


@ON_SQLITE
async def test_worker_starts_without_a_broker_and_logs_it_once(effect_lab, own_nats, caplog):
    caplog.set_level(logging.DEBUG, "onceward.jobs")
    nats = NatsLab(own_nats.url())
    own_nats.stop()
    await effect_lab.start_worker(engine=nats.engine(table_after_seconds=600.0))
    job_id = await effect_lab.enqueued(resource_id="one")

    def logged(text: str) -> int:
        return sum(text in record.message for record in caplog.records)

    async def has_tried_often() -> bool:
        return logged("NATS: ") >= 6

    await eventually(has_tried_often)
    assert await effect_lab.state(job_id) == "waiting"
    own_nats.start()
    await effect_lab.until(job_id, "done")
    assert logged("NATS is unavailable") == 1
    assert logged("NATS is available again") == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_waiting_jobs_are_published_again_after_the_broker_lost_its_files(
    lab, own_nats, caplog
):
    nats = NatsLab(own_nats.url())
    begun, released = asyncio.Event(), asyncio.Event()

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        begun.set()
        await released.wait()
        await write_effect(job)

    await lab.start_worker(engine=nats.engine(), concurrency=1)
    for number in range(3):
        await lab.enqueue(resource_id=str(number))
    await begun.wait()

    async def all_published() -> bool:
        return await nats.messages() == 3

    await eventually(all_published)
    own_nats.restart(keep_files=False)
    released.set()
    await lab.until_idle(seconds=10)  # without a reset it would take half a minute
    assert sorted(await lab.effects()) == ["0", "1", "2"]
    assert any("NATS has lost its stream" in record.message for record in caplog.records)


@ON_SQLITE
async def test_deleted_stream_and_consumer_are_created_again(effect_lab, nats):
    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.until(await effect_lab.enqueued(resource_id="0"), "done")
    names = await nats.names(effect_lab.store)
    async with nats.broker() as broker:
        await broker.delete_consumer(nats.stream, names.consumer_of("default"))
        await effect_lab.until(await effect_lab.enqueued(resource_id="1"), "done", seconds=8)
        await broker.delete_stream(nats.stream)
        await effect_lab.until(await effect_lab.enqueued(resource_id="2"), "done", seconds=8)
    assert await effect_lab.effects() == ["0", "1", "2"]


@ON_SQLITE
async def test_take_only_waits_until_a_missing_broker_is_bypassed(lab, own_nats):
    engine = NatsLab(own_nats.url()).engine_of(lab.job_store, "default")
    own_nats.stop()
    await engine.open()
    try:
        began = time.monotonic()
        assert list(await engine.take(10, 0.5)) == []
        assert time.monotonic() - began > 0.4
        asyncio.get_running_loop().call_later(0.1, engine.wake)
        async with asyncio.timeout(5):
            assert list(await engine.take(10, 60)) == []  # a worker that stops does not wait
    finally:
        await engine.close()


@ON_SQLITE
async def test_stream_that_is_not_a_work_queue_is_refused_in_the_log(effect_lab, nats, caplog):
    async with nats.broker() as broker:
        await broker.add_stream(StreamConfig(name=nats.stream, subjects=[f"{nats.subject}.>"]))
    await effect_lab.start_worker(engine=nats.engine(table_after_seconds=600.0))
    job_id = await effect_lab.enqueued()

    async def is_logged() -> bool:
        return any("is not a work queue" in record.message for record in caplog.records)

    await eventually(is_logged)
    assert await effect_lab.state(job_id) == "waiting"


@ON_SQLITE
async def test_full_stream_is_logged_once_and_retried(effect_lab, nats, caplog):
    caplog.set_level(logging.WARNING)
    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.until(await effect_lab.enqueued(resource_id="0"), "done")
    async with nats.broker() as broker:
        config = (await broker.stream_info(nats.stream)).config
        await broker.update_stream(config, max_msg_size=1)
        job_id = await effect_lab.enqueued(resource_id="1")

        async def is_logged() -> bool:
            return any("does not accept jobs" in record.message for record in caplog.records)

        await eventually(is_logged)
        await broker.update_stream(config, max_msg_size=-1)
    await effect_lab.until(job_id, "done")
    assert sum("does not accept jobs" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": " , "},
        {"stream": "two words"},
        {"stream": "a.b"},
        {"subject": "jobs.>"},
        {"subject": ""},
        {"again_after_seconds": 0},
        {"table_after_seconds": 0},
    ],
)
def test_invalid_settings_are_refused_at_once(wrong, tmp_path: Path):
    table = JobStore(open_store(f"sqlite:///{tmp_path}/x.db"))
    settings = {"url": "nats://127.0.0.1:4222", **wrong}
    with pytest.raises(ConfigurationError):
        JetStreamEngine(table, ["default"], worker="w", lease_seconds=30, **settings)
