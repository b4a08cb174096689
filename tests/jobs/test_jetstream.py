"""The jetstream engine on a real NATS: whatever the broker does, the tables decide."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import RetentionPolicy, StreamConfig

from holdfast import open_store
from holdfast.core.retry import Jitter, RetryPolicy
from holdfast.errors import ConfigurationError, NonRetryableError, StoreUnavailableError
from holdfast.jobs.engines.jetstream import JetStreamEngine
from holdfast.jobs.run import JobRun
from holdfast.jobs.table import JobTable
from holdfast.jobs.worker import EngineMaker
from holdfast.ports import ComesBack, Delivery, Ended, Store
from holdfast.testing.engine_contract import EngineContract
from holdfast.testing.servers import RealNats
from tests.support.jobs_lab import JobsLab, eventually, make_effects, write_effect
from tests.support.nats_lab import NatsLab

OpenStore = Callable[[], Awaitable[Store]]

# For what has to do with the broker alone, or with one database more than with the other.
ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
ON_POSTGRES = pytest.mark.parametrize("database", ["postgresql"], indirect=True)

SOON = RetryPolicy(first_seconds=0.05, ceiling_seconds=0.05, jitter=Jitter.UP_TO, attempts=5)


@pytest.fixture
def nats(nats_server: RealNats) -> NatsLab:
    nats_server.start()
    return NatsLab(nats_server.url())


@pytest.fixture
async def own_nats() -> AsyncIterator[RealNats]:
    """Return a server that a test may stop and rob."""
    with RealNats() as server:
        yield server


@pytest.fixture
def effect_lab(lab: JobsLab) -> JobsLab:
    """Return a lab whose one handler writes an effect."""

    @lab.jobs.handler("effect")
    async def effect(job: JobRun) -> None:
        await write_effect(job)

    return lab


async def taken(engine: JetStreamEngine, *, seconds: float = 10) -> Delivery:
    """Take exactly one job, however long that takes."""

    async def take() -> list[Delivery]:
        return list(await engine.take(10, 0.2))

    (delivery,) = await eventually(take, seconds=seconds, pause=0)
    return delivery


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


async def test_a_job_is_published_worked_and_acknowledged(effect_lab, nats):
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued(resource_id="one")
    done = await effect_lab.until(job_id, "done")
    assert done.view.attempts == 1
    assert await effect_lab.effects() == ["one"]
    await nats.until_empty(seconds=3)  # not when it comes again, after 5
    info = await nats.stream_info()
    assert info.config.retention == RetentionPolicy.WORK_QUEUE
    assert info.config.duplicate_window == 120
    assert info.config.num_replicas == 1  # there is one node
    consumer = await nats.consumer_info(effect_lab.store)
    assert (consumer.config.max_deliver, consumer.config.ack_wait) == (-1, 5)


async def test_many_jobs_over_two_workers_and_queues_all_end_once(lab, nats, another_store):
    for queue in ("mail.out", "mail", "mail-out"):

        @lab.jobs.handler(f"in.{queue}", queue=queue)
        async def effect(job: JobRun) -> None:
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


async def test_a_job_that_is_committed_elsewhere_starts_at_once(effect_lab, nats, another_store):
    await effect_lab.start_worker(engine=nats.engine())
    first = await effect_lab.enqueued(resource_id="warm")
    await effect_lab.until(first, "done")
    bell = (await another_store()).bell()  # as an intake has that only enqueues
    workers, effect_lab.workers = effect_lab.workers, []
    job_id = await effect_lab.enqueued(resource_id="now")
    effect_lab.workers = workers
    began = time.monotonic()
    bell.ring()
    await effect_lab.until(job_id, "done")
    took = time.monotonic() - began
    await bell.close()
    assert took < 0.5  # to look once a second would be later, more often than not


@ON_SQLITE
async def test_a_job_with_a_time_starts_when_it_has_come(effect_lab, nats):
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued(delay_seconds=0.8)
    began = time.monotonic()
    await effect_lab.until(job_id, "done")
    assert 0.6 < time.monotonic() - began < 2


async def test_a_job_that_enqueues_another_is_followed_by_it(effect_lab, nats):
    @effect_lab.jobs.handler("first")
    async def first(job: JobRun) -> None:
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
    async def effect(job: JobRun) -> None:
        await released.wait()
        await write_effect(job)

    for _ in range(4):
        await lab.start_worker(await another_store(), engine=nats.engine(), lease_seconds=1)
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
    assert await lab.count("job_completions") == 1


@ON_POSTGRES
async def test_two_messages_about_one_job_in_one_packet_give_one_lease(effect_lab, nats):
    job_id = await effect_lab.enqueued()
    engine = nats.engine_of(effect_lab.table, "default", relay=False, lease_seconds=0.7)
    await engine.open()
    try:
        await _consumer_of(nats, effect_lab)
        await nats.send_job(effect_lab.store, job_id, times=3)
        delivery = await taken(engine)
        assert delivery.job.lease.number == 1
        assert list(await engine.take(10, 0.2)) == []
        assert await effect_lab.table.bury(
            delivery.job, worker="by-hand", reason="error", error="no"
        )
        await engine.settle(delivery, Ended())

        async def nothing_is_left() -> bool:
            assert not await engine.take(10, 0.2)
            return bool(await nats.messages() == 0)

        await eventually(nothing_is_left)  # the others come again, and are done by then
    finally:
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
async def test_a_copy_published_after_the_brokers_memory_has_one_effect(effect_lab, nats):
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
    relay_only = nats.engine_of(effect_lab.table, "default", faults=DiesOnce())
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
    @lab.jobs.handler("long")
    async def long(job: JobRun) -> None:
        await asyncio.sleep(1.3)
        await write_effect(job)

    for _ in range(2):
        await lab.start_worker(await another_store(), engine=nats.engine(), lease_seconds=0.6)
    job_id = await lab.enqueued("long", resource_id="one")
    done = await lab.until(job_id, "done")
    assert done.view.attempts == 1
    consumer = await nats.consumer_info(lab.store)
    assert consumer.delivered.consumer_seq == 1  # in_progress kept it from coming again
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
    assert await nats.messages() == 1  # nobody has acknowledged it
    await nats.until_empty()
    assert await effect_lab.effects() == ["one"]
    assert effect_lab.outcomes.all == []


# -- failing --------------------------------------------------------------------------------------


@ON_SQLITE
async def test_a_retry_waits_at_the_broker_for_its_delay(lab, nats):
    started: list[float] = []
    published: list[int] = []

    @lab.jobs.handler("flaky")
    async def flaky(job: JobRun) -> None:
        started.append(time.monotonic())
        published.append((await lab.rows("SELECT published FROM jobs"))[0]["published"])
        if len(started) == 1:
            raise RuntimeError("not yet")
        await write_effect(job)

    await lab.start_worker(engine=nats.engine())
    job_id = await lab.enqueued("flaky")
    done = await lab.until(job_id, "done")
    assert done.view.attempts == 2
    assert 1 <= started[1] - started[0] < 2.5
    assert published[1] == 1  # the same message came again


async def test_a_job_that_fails_five_times_is_a_dead_letter(lab, nats, monkeypatch):
    monkeypatch.setattr("holdfast.jobs.attempt.WORKER", SOON)

    @lab.jobs.handler("poison")
    async def poison(job: JobRun) -> None:
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
    assert await lab.count("dead_letters") == 1


@ON_SQLITE
async def test_unknown_types_and_hopeless_errors_are_dead_letters_at_once(lab, nats):
    @lab.jobs.handler("hopeless")
    async def hopeless(job: JobRun) -> None:
        raise NonRetryableError("never")

    await lab.start_worker(engine=nats.engine())
    unknown = await lab.enqueued("unheard.of")
    never = await lab.enqueued("hopeless")
    assert (await lab.until(unknown, "dead")).view.reason == "unknown_type"
    assert (await lab.until(never, "dead")).view.reason == "non_retryable"
    await nats.until_empty()
    assert lab.outcomes.all == ["dead", "dead"]


async def test_a_requeued_dead_letter_comes_at_once(lab, nats):
    """Its first message had the same job id, which the broker remembers for two minutes."""
    helped = asyncio.Event()

    @lab.jobs.handler("helped")
    async def work(job: JobRun) -> None:
        if not helped.is_set():
            raise NonRetryableError("help")
        await write_effect(job)

    await lab.start_worker(engine=nats.engine())
    job_id = await lab.enqueued("helped", resource_id="one")
    await lab.until(job_id, "dead")
    helped.set()
    assert await lab.table.requeue("ada", job_id, actor="operator")
    lab.ring()
    await lab.until(job_id, "done", seconds=5)
    assert await lab.effects() == ["one"]


@ON_POSTGRES
async def test_garbage_in_the_stream_is_thrown_away_and_told(effect_lab, nats, caplog):
    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.until(await effect_lab.enqueued(resource_id="before"), "done")
    for garbage in (
        b"",
        b"\xff",
        b"[]",
        b'{"tenant": "ada"}',
        b'{"tenant": "ada", "job_id": "1; DROP TABLE jobs"}',
        b'{"tenant": "\\u0000", "job_id": "7f3b1c1e-7a0b-4c57-9f4c-0d5d5f3c1a11"}',
    ):
        await nats.send(effect_lab.store, garbage)
    await nats.until_empty()
    await effect_lab.until(await effect_lab.enqueued(resource_id="after"), "done")
    assert await effect_lab.effects() == ["before", "after"]
    told = [record for record in caplog.records if "names no job" in record.message]
    assert len(told) == 6


# -- the database and the broker disagree ---------------------------------------------------------


async def test_a_message_that_comes_too_early_comes_again_in_time(lab, nats):
    job_id = await lab.enqueued("any", delay_seconds=0.8)
    began = time.monotonic()
    engine = nats.engine_of(lab.table, "default", relay=False)
    await engine.open()
    try:
        await _consumer_of(nats, lab)
        await nats.send_job(lab.store, job_id)
        assert (await taken(engine)).job.attempt == 1
        assert 0.7 < time.monotonic() - began < 3
    finally:
        await engine.close()


async def test_a_message_about_a_job_in_line_is_not_kept(effect_lab, nats):
    """Its turn comes when the one before it has ended, and then the relay names it."""
    ids = [
        await effect_lab.enqueued(resource_id=name, order="ada's day") for name in ("first", "next")
    ]
    engine = nats.engine_of(effect_lab.table, "default", relay=False)
    await engine.open()
    try:
        await _consumer_of(nats, effect_lab)
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
    paused = nats.engine_of(lab.table, "default", worker="paused", lease_seconds=0.6)
    await paused.open()
    stale = await taken(paused)
    second = nats.engine_of(lab.table, "default", worker="second", lease_seconds=0.6, relay=False)
    await second.open()
    theirs = await taken(second)  # after the first lease has run out
    assert theirs.job.lease.number == 2
    await paused.settle(stale, Ended())
    await nats.until_empty()
    await second.close()  # it dies with its lease, and no message is left to be delivered again
    await paused.close()
    assert await lab.state(job_id) == "running"
    await lab.start_worker(engine=nats.engine(again_after_seconds=0.3), lease_seconds=0.6)
    done = await lab.until(job_id, "done")
    assert done.view.attempts == 3
    assert await lab.effects() == ["one"]


@ON_SQLITE
async def test_a_database_that_fails_the_claim_gets_the_message_again(
    effect_lab, nats, monkeypatch
):
    worker = await effect_lab.start_worker(engine=nats.engine())
    real = worker.table.claim_these
    troubles = [StoreUnavailableError("gone")]

    async def fails_once(*args: Any, **values: Any) -> Any:
        if troubles:
            raise troubles.pop()
        return await real(*args, **values)

    monkeypatch.setattr(worker.table, "claim_these", fails_once)
    job_id = await effect_lab.enqueued(resource_id="one")
    await effect_lab.until(job_id, "done", seconds=4)  # long before ack_wait, which is 5
    assert troubles == []
    assert await effect_lab.effects() == ["one"]


@ON_SQLITE
async def test_messages_nobody_has_room_for_go_to_another_worker(lab, nats):
    """Two queues give one message each to a worker that has room for one."""
    for queue in ("first", "second"):
        await lab.enqueue("any", queue=queue)
    full = nats.engine_of(lab.table, "first", "second", worker="full")
    free = nats.engine_of(lab.table, "first", "second", worker="free", relay=False)
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
async def test_an_engine_that_closes_gives_back_what_nobody_has_looked_at(lab, nats):
    job_id = await lab.enqueued("any")
    closing = nats.engine_of(lab.table, "default", worker="closing", relay=False)
    await closing.open()
    await _consumer_of(nats, lab)

    async def has_asked() -> bool:
        assert list(await closing.take(10, 0.1)) == []
        return bool((await nats.consumer_info(lab.store)).num_waiting)

    await eventually(has_asked)
    await nats.send_job(lab.store, job_id)

    async def is_delivered() -> bool:
        return bool((await nats.consumer_info(lab.store)).num_ack_pending)

    await eventually(is_delivered)
    await closing.close()
    other = nats.engine_of(lab.table, "default", worker="other", relay=False)
    await other.open()
    try:
        delivery = await taken(other, seconds=5)  # not after the ack_wait of 30 seconds
        assert delivery.job.attempt == 1
    finally:
        await other.close()


async def test_a_worker_that_stops_gives_back_what_it_has(lab, nats, another_store):
    begun = asyncio.Event()

    @lab.jobs.handler("slow")
    async def slow(job: JobRun) -> None:
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
async def test_a_job_that_comes_back_is_not_there_before_its_time(effect_lab, nats):
    await effect_lab.enqueue()
    engine = nats.engine_of(effect_lab.table, "default")
    await engine.open()
    try:
        delivery = await taken(engine)
        assert await effect_lab.table.retry(
            delivery.job, worker="by-hand", reason="error", error="no", delay_seconds=0.7
        )
        await engine.settle(delivery, ComesBack(0.7))
        began = time.monotonic()
        again = await taken(engine)
        assert 0.6 < time.monotonic() - began < 2
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
        async def effect(job: JobRun, name: str = name) -> None:
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
async def test_a_worker_starts_without_its_broker_and_says_so_once(effect_lab, own_nats, caplog):
    caplog.set_level(logging.DEBUG, "holdfast.jobs")
    nats = NatsLab(own_nats.url())
    own_nats.stop()
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued(resource_id="one")

    def told(text: str) -> int:
        return sum(text in record.message for record in caplog.records)

    async def has_tried_often() -> bool:
        return told("NATS: ") >= 6

    await eventually(has_tried_often)
    assert await effect_lab.state(job_id) == "waiting"
    own_nats.start()
    await effect_lab.until(job_id, "done")
    assert told("NATS is not there") == 1
    assert told("NATS is back") == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_broker_without_its_files_hears_of_waiting_jobs_at_once(lab, own_nats, caplog):
    nats = NatsLab(own_nats.url())
    begun, released = asyncio.Event(), asyncio.Event()

    @lab.jobs.handler("effect")
    async def effect(job: JobRun) -> None:
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
    await lab.until_idle(seconds=10)  # without being told it would take half a minute
    assert sorted(await lab.effects()) == ["0", "1", "2"]
    assert any("NATS has lost its stream" in record.message for record in caplog.records)


@ON_SQLITE
async def test_a_stream_and_a_consumer_that_somebody_deletes_are_made_again(effect_lab, nats):
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
async def test_without_a_broker_taking_jobs_only_waits(lab, own_nats):
    engine = NatsLab(own_nats.url()).engine_of(lab.table, "default")
    own_nats.stop()
    await engine.open()
    try:
        began = time.monotonic()
        assert list(await engine.take(10, 0.5)) == []
        assert 0.4 < time.monotonic() - began < 2
        asyncio.get_running_loop().call_later(0.1, engine.wake)
        async with asyncio.timeout(5):
            assert list(await engine.take(10, 60)) == []  # a worker that stops does not wait
    finally:
        await engine.close()


@ON_SQLITE
async def test_a_stream_that_is_no_work_queue_is_refused_in_the_log(effect_lab, nats, caplog):
    async with nats.broker() as broker:
        await broker.add_stream(StreamConfig(name=nats.stream, subjects=[f"{nats.subject}.>"]))
    await effect_lab.start_worker(engine=nats.engine())
    job_id = await effect_lab.enqueued()

    async def is_told() -> bool:
        return any("it is no work queue" in record.message for record in caplog.records)

    await eventually(is_told)
    assert await effect_lab.state(job_id) == "waiting"


@ON_SQLITE
async def test_a_stream_that_takes_nothing_is_told_once_and_tried_again(effect_lab, nats, caplog):
    caplog.set_level(logging.WARNING)
    await effect_lab.start_worker(engine=nats.engine())
    await effect_lab.until(await effect_lab.enqueued(resource_id="0"), "done")
    async with nats.broker() as broker:
        config = (await broker.stream_info(nats.stream)).config
        await broker.update_stream(config, max_msg_size=1)
        job_id = await effect_lab.enqueued(resource_id="1")

        async def is_told() -> bool:
            return any("does not take jobs" in record.message for record in caplog.records)

        await eventually(is_told)
        await broker.update_stream(config, max_msg_size=-1)
    await effect_lab.until(job_id, "done")
    assert sum("does not take jobs" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"url": " , "},
        {"stream": "two words"},
        {"stream": "a.b"},
        {"subject": "jobs.>"},
        {"subject": ""},
        {"again_after_seconds": 0},
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(wrong, tmp_path: Path):
    table = JobTable(open_store(f"sqlite:///{tmp_path}/x.db"))
    settings = {"url": "nats://127.0.0.1:4222", **wrong}
    with pytest.raises(ConfigurationError):
        JetStreamEngine(table, ["default"], worker="w", lease_seconds=30, **settings)


async def _consumer_of(nats: NatsLab, lab: JobsLab) -> None:
    """Wait until the engine has made its consumer."""

    async def is_there() -> bool:
        try:
            await nats.consumer_info(lab.store)
        except Exception:  # noqa: BLE001 - not there yet
            return False
        return True

    await eventually(is_there)
