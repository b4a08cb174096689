"""A broker that is silent or away: workers take jobs from the table, and go back afterwards."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from onceward import open_store
from onceward.jobs.context import JobContext
from onceward.jobs.worker import EngineMaker
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import Delivery, Store
from onceward_nats.silence import SilenceTimer
from onceward_testing.engine_contract import EngineContract
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    eventually,
    write_effect,
)

ON_SQLITE = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
ON_POSTGRES = pytest.mark.parametrize("database", ["postgresql", *ON_CITUS], indirect=True)

# The default is 5 seconds.
SOON = 0.6
# Longer than any test: what is done before was not delivered again by the broker or the relay.
NEVER_AGAIN = {"again_after_seconds": 600.0, "table_after_seconds": SOON}
LONG_LEASE = 600.0


class BrokerCounts(PrometheusMetrics):
    """Reads what was counted."""

    def value(self, name: str) -> float:
        return self.registry.get_sample_value(name) or 0.0

    @property
    def is_silent(self) -> bool:
        return self.value("onceward_broker_silent") == 1

    @property
    def silences(self) -> float:
        return self.value("onceward_broker_silences_total")

    @property
    def bypassed(self) -> float:
        return self.value("onceward_jobs_bypassed_broker_total")

    async def until_silent(self, *, is_silent: bool = True) -> None:
        async def check() -> bool:
            return self.is_silent == is_silent

        await eventually(check)


@pytest.fixture
def counts() -> BrokerCounts:
    return BrokerCounts()


async def delivered(nats: NatsLab, store: Store) -> int:
    """Return how many messages the broker has delivered."""
    sequence = (await nats.consumer_info(store)).delivered
    assert sequence is not None
    return int(sequence.consumer_seq)


async def until_delivered(nats: NatsLab, store: Store) -> None:
    """Wait until the broker has delivered every message.

    One that was lost with its connection is not acknowledged before the lease ends.
    """

    async def check() -> bool:
        return (await nats.consumer_info(store)).num_pending == 0

    await eventually(check)


async def until_effects(lab: JobsLab, count: int) -> None:
    async def check() -> bool:
        return len(await lab.effects()) >= count

    await eventually(check)


async def until_broker_is_used(
    lab: JobsLab, nats: NatsLab, counts: BrokerCounts, prefix: str
) -> list[str]:
    """Enqueue jobs until one comes by a message and not from the table; return their names.

    On a busy machine the broker may be found silent again in between.
    """
    names: list[str] = []

    async def comes_by_message() -> bool:
        await counts.until_silent(is_silent=False)
        await nats.until_consumer(lab.store)
        await until_delivered(nats, lab.store)
        messages, bypassed = await delivered(nats, lab.store), counts.bypassed
        names.append(f"{prefix} {len(names)}")
        await lab.until(await lab.enqueued(resource_id=names[-1]), "done")
        return await delivered(nats, lab.store) == messages + 1 and counts.bypassed == bypassed

    await eventually(comes_by_message)
    return names


async def test_jobs_are_done_while_the_broker_is_frozen_and_it_is_used_again(
    effect_lab, own_nats, counts, caplog
):
    nats = NatsLab(own_nats.url())
    await effect_lab.start_worker(
        engine=nats.engine(**NEVER_AGAIN), metrics=counts, lease_seconds=LONG_LEASE
    )
    before = await until_broker_is_used(effect_lab, nats, counts, "before")
    with own_nats.frozen():
        bypassed = counts.bypassed
        for name in ("first", "second"):
            await effect_lab.until(await effect_lab.enqueued(resource_id=name), "done")
        assert counts.is_silent
        assert counts.bypassed == bypassed + 2
    after = await until_broker_is_used(effect_lab, nats, counts, "after")
    assert await effect_lab.effects() == [*before, "first", "second", *after]
    await effect_lab.stop_workers()
    logged = [record.message for record in caplog.records if record.name == "onceward.jobs"]
    switched = "NATS has not responded for 0.6 seconds: jobs are taken from the database"
    assert logged.count(switched) == counts.silences >= 1
    assert "NATS responds again: jobs are taken from it" in logged


@ON_SQLITE
async def test_job_is_done_within_the_default_limit_of_a_frozen_broker(effect_lab, own_nats):
    await effect_lab.start_worker(engine=NatsLab(own_nats.url()).engine(), lease_seconds=LONG_LEASE)
    await effect_lab.until(await effect_lab.enqueued(resource_id="before"), "done")
    with own_nats.frozen():
        job_id = await effect_lab.enqueued(resource_id="frozen")
        began = await effect_lab.job_store.now()
        await effect_lab.until(job_id, "done")
        took = await effect_lab.job_store.now() - began
    assert took.total_seconds() < 20  # without a limit, not before it thaws


@ON_POSTGRES
async def test_enqueueing_does_not_wait_for_a_frozen_broker(effect_lab, own_nats, counts):
    """Not even before its silence is noticed, and not if the relay waits for it."""
    nats = NatsLab(own_nats.url())
    await effect_lab.start_worker(
        engine=nats.engine(table_after_seconds=600.0), metrics=counts, lease_seconds=LONG_LEASE
    )
    await effect_lab.until(await effect_lab.enqueued(resource_id="before"), "done")
    with own_nats.frozen():
        for number in range(50):
            await effect_lab.enqueue(resource_id=str(number))
        assert await effect_lab.count("onceward_jobs") == 50
        assert not counts.is_silent
    await effect_lab.until_idle()
    assert Counter(await effect_lab.effects()) == Counter(["before", *map(str, range(50))])


async def test_message_about_a_job_that_runs_from_the_table_has_no_effect(
    lab, own_nats, counts, another_store
):
    """The broker thaws while the job runs, and delivers its message to another worker."""
    nats = NatsLab(own_nats.url())
    begun, released = asyncio.Event(), asyncio.Event()
    runs: Counter[str] = Counter()

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        runs[job.id] += 1
        begun.set()
        await released.wait()
        await write_effect(job)

    other = nats.engine_of(await _job_store(another_store), "default", worker="other", relay=False)
    await other.open()
    await nats.until_consumer(lab.store)
    job_id = await lab.enqueued(resource_id="one")
    await nats.send_job(lab.store, job_id, times=2)
    try:
        with own_nats.frozen():
            await lab.start_worker(
                engine=nats.engine(**NEVER_AGAIN, relay=False),
                metrics=counts,
                lease_seconds=LONG_LEASE,
            )
            await begun.wait()
            assert counts.bypassed == 1

        async def both_came() -> bool:
            assert list(await other.take(10, 0.2)) == []
            return await delivered(nats, lab.store) >= 2

        await eventually(both_came)
        released.set()
        await lab.until(job_id, "done")
        await nats.send_job(lab.store, job_id)

        async def third_is_acknowledged() -> bool:
            assert list(await other.take(10, 0.2)) == []
            return (await nats.consumer_info(lab.store)).num_pending == 0

        await eventually(third_is_acknowledged)
    finally:
        await other.close()
    assert runs == Counter({job_id: 1})
    assert await lab.effects() == ["one"]


async def _job_store(another_store):
    return JobsLab(await another_store()).job_store


@pytest.mark.parametrize("loses_files", [False, True])
@ON_POSTGRES
async def test_broker_killed_while_jobs_run_from_the_table(lab, own_nats, counts, loses_files):
    """It is frozen, then killed, then started again, with or without its files."""
    nats = NatsLab(own_nats.url())
    begun, released = asyncio.Semaphore(0), asyncio.Event()

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        begun.release()
        await released.wait()
        await write_effect(job)

    released.set()
    await lab.start_worker(
        engine=nats.engine(**NEVER_AGAIN), metrics=counts, lease_seconds=LONG_LEASE
    )
    await lab.until(await lab.enqueued(resource_id="before"), "done")
    await begun.acquire()
    await nats.until_empty()  # an acknowledgement that is lost is repeated after the lease
    released.clear()
    with own_nats.frozen():
        for number in range(5):
            await lab.enqueue(resource_id=f"frozen {number}")
        for _ in range(5):
            await begun.acquire()
        own_nats.kill()
    if loses_files:
        own_nats.lose_files()
    for number in range(3):
        await lab.enqueue(resource_id=f"killed {number}")
    released.set()
    await until_effects(lab, 9)
    await asyncio.to_thread(own_nats.start)
    after = await until_broker_is_used(lab, nats, counts, "after")
    assert Counter(await lab.effects()) == Counter(
        [
            "before",
            *(f"frozen {number}" for number in range(5)),
            *(f"killed {number}" for number in range(3)),
            *after,
        ]
    )


@ON_POSTGRES
async def test_ordered_jobs_keep_their_order_over_the_switch(lab, own_nats, counts, another_store):
    nats = NatsLab(own_nats.url())

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await asyncio.sleep(0.01)
        await write_effect(job)

    for _ in range(3):
        await lab.start_worker(
            await another_store(),
            engine=nats.engine(**NEVER_AGAIN),
            metrics=counts,
            lease_seconds=LONG_LEASE,
        )
    names = [str(number) for number in range(60)]

    async def enqueue(some: list[str]) -> None:
        for name in some:
            await lab.enqueue(resource_id=name, order="one at a time")

    await enqueue(names[:20])
    with own_nats.frozen():
        await enqueue(names[20:40])
        await until_effects(lab, 40)
    await enqueue(names[40:])
    await until_effects(lab, 60)
    assert await lab.effects() == names


@ON_POSTGRES
async def test_coalesced_job_is_merged_while_it_waits_and_not_after_it_has_started(
    lab, own_nats, counts
):
    nats = NatsLab(own_nats.url())
    begun, released = asyncio.Event(), asyncio.Event()
    seen: list[int] = []

    @lab.jobs.handler("total")
    async def total(job: JobContext) -> None:
        seen.append(job.payload)
        begun.set()
        await released.wait()
        await write_effect(job, str(job.payload))

    await lab.start_worker(
        engine=nats.engine(**NEVER_AGAIN), metrics=counts, lease_seconds=LONG_LEASE
    )
    await nats.until_consumer(lab.store)
    with own_nats.frozen():
        await counts.until_silent()
        async with lab.transaction() as tx:
            for number in (1, 2, 3):
                await lab.enqueue_in(tx, "total", number, coalesce="day", order="day")
        lab.notify()
        await begun.wait()
        assert seen == [3]
        await lab.enqueue("total", 4, coalesce="day", order="day")
        await lab.enqueue("total", 5, coalesce="day", order="day")
    await counts.until_silent(is_silent=False)
    released.set()
    await lab.until_idle()
    assert await lab.effects() == ["3", "5"]


@ON_POSTGRES
async def test_flapping_broker_and_many_workers_lose_and_repeat_no_job(
    lab, own_nats, counts, another_store
):
    nats = NatsLab(own_nats.url())

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await asyncio.sleep(0.005)
        await write_effect(job)

    for _ in range(6):
        await lab.start_worker(
            await another_store(),
            engine=nats.engine(table_after_seconds=SOON, again_after_seconds=1.0),
            metrics=counts,
            lease_seconds=3,
            concurrency=4,
        )
    await nats.until_consumer(lab.store)

    async def all_are_silent() -> bool:
        return all(worker.engine._broker.is_silent for worker in lab.workers)

    async def none_is_silent() -> bool:
        return not any(worker.engine._broker.is_silent for worker in lab.workers)

    async def flap() -> None:
        for _ in range(2):
            with own_nats.frozen():
                await eventually(all_are_silent)
            await eventually(none_is_silent)

    flapping = asyncio.create_task(flap())
    number = 0
    while not flapping.done():
        await lab.enqueue(resource_id=str(number))
        number += 1
        await asyncio.sleep(0.01)
    await flapping
    await lab.until_idle()
    assert Counter(await lab.effects()) == Counter(str(each) for each in range(number))


@ON_POSTGRES
async def test_overdue_job_is_taken_from_the_table_while_the_broker_responds(
    effect_lab, nats, counts, caplog
):
    """Its message was delivered to a connection that broke: the broker waits for its lease."""
    caplog.set_level(logging.INFO, "onceward.jobs")
    await effect_lab.start_worker(
        engine=nats.engine(**NEVER_AGAIN, relay=False), metrics=counts, lease_seconds=LONG_LEASE
    )
    await nats.until_consumer(effect_lab.store)
    names: list[str] = []

    async def is_overdue() -> bool:  # not taken because a busy machine made the broker silent
        names.append(str(len(names)))
        await effect_lab.until(await effect_lab.enqueued(resource_id=names[-1]), "done")
        return "1 overdue jobs are taken from the database" in caplog.text

    await eventually(is_overdue)
    assert counts.bypassed == len(names)
    assert await effect_lab.effects() == names


@ON_POSTGRES
async def test_overdue_jobs_of_all_queues_are_found_oldest_first(lab):
    for queue in ("first", "second", "third"):
        for number in range(2):
            await lab.enqueue("any", queue=queue, resource_id=f"{queue} {number}")
    for seconds, name in ((-30, "first 0"), (-50, "second 1"), (-40, "third 0"), (-9, "first 1")):
        await lab.show_in(seconds, f"resource_id = '{name}'")
    found = await lab.published_jobs.overdue(("first", "second", "third"), seconds=10, limit=2)
    names = {row["id"]: row["resource_id"] for row in await lab.rows("SELECT * FROM onceward_jobs")}
    assert [{str(key): name for key, name in names.items()}[job] for _, job in found] == [
        "second 1",
        "third 0",
    ]
    assert (
        len(await lab.published_jobs.overdue(("first", "second", "third"), seconds=10, limit=9))
        == 3
    )


@pytest.mark.xdist_group("nats-cluster")
@ON_POSTGRES
async def test_frozen_and_killed_leaders_of_three_nodes_lose_and_repeat_no_job(
    effect_lab, counts, another_store, nats_cluster
):
    """A node that is frozen responds to nothing, and the others elect another leader."""
    nats = NatsLab(nats_cluster.url())
    for _ in range(2):
        await effect_lab.start_worker(
            await another_store(),
            engine=nats.engine(table_after_seconds=1.0),
            metrics=counts,
            lease_seconds=3,
        )
    await nats.until_consumer(effect_lab.store)
    leader = await asyncio.to_thread(nats_cluster.leader, nats.stream)
    with leader.frozen():
        for number in range(20):
            await effect_lab.enqueue(resource_id=f"frozen {number}")
        await until_effects(effect_lab, 20)
    leader = await asyncio.to_thread(nats_cluster.leader, nats.stream)
    leader.kill()
    for number in range(20):
        await effect_lab.enqueue(resource_id=f"killed {number}")
    await until_effects(effect_lab, 40)
    await asyncio.to_thread(leader.start)
    await asyncio.to_thread(nats_cluster.leader, nats.stream)
    await counts.until_silent(is_silent=False)
    await effect_lab.until_idle()
    await effect_lab.stop_workers()
    assert Counter(await effect_lab.effects()) == Counter(
        f"{what} {number}" for what in ("frozen", "killed") for number in range(20)
    )


# -- counting -------------------------------------------------------------------------------------


def test_silence_begins_at_the_limit_and_ends_with_a_response():
    changes: list[bool] = []
    timer = SilenceTimer(5.0, on_change=changes.append)
    for _ in range(9):
        timer.tick()
    assert changes == []
    timer.tick()
    timer.tick()
    assert (timer.is_over, changes) == (True, [True])
    timer.heard()
    timer.heard()
    assert (timer.is_over, changes) == (False, [True, False])


def test_new_connection_gets_the_whole_time_but_does_not_end_the_silence():
    timer = SilenceTimer(5.0, on_change=lambda _: None)
    for _ in range(10):
        timer.tick()
    timer.connected()
    timer.tick()
    assert timer.is_over
    assert timer.connection_seconds == 0.5
    assert timer.seconds == 5.5


# -- the tests of all engines, without a broker ----------------------------------------------------


class TestJetStreamEngineWithoutBroker(EngineContract):
    """No server listens at the URL: all jobs come from the table."""

    @pytest.fixture
    async def store(self, clean_jobs_url: str) -> AsyncIterator[Store]:
        store = open_store(clean_jobs_url)
        await store.open()
        yield store
        await store.close()

    @pytest.fixture
    def new_engine(self) -> EngineMaker:
        return NatsLab("nats://127.0.0.1:1").engine(table_after_seconds=0.1)


async def test_deliveries_from_the_table_have_no_receipt(lab):
    await lab.enqueue("any")
    engine = NatsLab("nats://127.0.0.1:1").engine_of(
        lab.job_store, "default", table_after_seconds=0.1
    )
    await engine.open()

    async def take() -> list[Delivery]:
        return list(await engine.take(10, 0.2))

    try:
        (delivery,) = await eventually(take)
        assert delivery.receipt is None
        lease = delivery.job.lease
        assert await engine.renew([delivery]) == {(lease.tenant, lease.job_id)}
    finally:
        await engine.close()
