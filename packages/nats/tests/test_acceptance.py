"""NATS that is stopped, killed, lost_files of its files or loses its leader while jobs are worked.

Jobs are enqueued and worked all the time, some fail once, some always. In the end each has exactly
one marker or one dead letter, and one effect or none.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.errors import Error as NatsError
from nats.js.api import RetentionPolicy

from onceward import open_store
from onceward.errors import StoreError
from onceward.jobs.context import JobContext
from onceward_protocol.retry import Jitter, RetryPolicy
from onceward_testing.nats_server import RealNatsCluster
from onceward_testing.servers import RealNats, RealPostgres
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    eventually,
    make_effects,
    write_effect,
)

SOON = RetryPolicy(first_seconds=0.05, ceiling_seconds=0.2, jitter=Jitter.UP_TO, attempts=5)
WORKERS = 2


def is_flaky(number: int) -> bool:
    return number % 10 == 3


def is_poison(number: int) -> bool:
    return number % 50 == 7


class Factory:
    """Running workers, and a task that keeps enqueueing."""

    def __init__(self, lab: JobsLab) -> None:
        self.lab = lab
        self.runs: Counter[str] = Counter()
        self.enqueued: dict[str, int] = {}

        @lab.jobs.handler("work")
        async def work(job: JobContext) -> None:
            number = int(job.payload)
            self.runs[job.id] += 1
            await write_effect(job, str(number))
            if is_poison(number) or (is_flaky(number) and job.attempt == 1):
                raise RuntimeError("not now")

    async def enqueue(self, jobs: int, *, seconds: float) -> None:
        for number in range(jobs):
            await self._enqueue(number)
            await asyncio.sleep(seconds / jobs)

    async def _enqueue(self, number: int) -> None:
        """Try until it is in the table, as a device does; its key makes it one job."""
        while True:
            try:
                outcome = await self.lab.enqueue("work", number, resource_id=str(number))
            except StoreError:
                await asyncio.sleep(0.05)
                continue
            self.enqueued[outcome.job_id] = number
            return

    async def until_done(self, share: float, of: int) -> None:
        """Wait until so many have been done, and others have not."""

        async def check() -> bool:
            return await self.lab.count("onceward_job_completions") >= share * of

        await eventually(check, seconds=40)
        assert len(self.enqueued) < of

    async def assert_each_ended_once(self, jobs: int) -> None:
        await self.lab.until_idle(seconds=45)
        dead = {number for number in range(jobs) if is_poison(number)}
        done = set(range(jobs)) - dead
        markers = await self.lab.rows("SELECT job_id FROM onceward_job_completions")
        letters = await self.lab.rows("SELECT job_id, attempts FROM onceward_dead_letters")
        assert Counter(self.enqueued[str(row["job_id"])] for row in markers) == Counter(done)
        assert Counter(self.enqueued[str(row["job_id"])] for row in letters) == Counter(dead)
        assert {row["attempts"] for row in letters} == {5}
        assert Counter(await self.lab.effects()) == Counter(str(number) for number in done)


@asynccontextmanager
async def factory(database: str, nats: NatsLab) -> AsyncIterator[Factory]:
    stores = [open_store(database) for _ in range(WORKERS)]
    for store in stores:
        await store.open()
    await make_effects(stores[0])
    lab = JobsLab(stores[0])
    made = Factory(lab)
    for store in stores:
        await lab.start_worker(store, engine=nats.engine(), lease_seconds=3, concurrency=8)
    try:
        yield made
    finally:
        await lab.stop_workers()
        for store in stores:
            await store.close()


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.jobs.executor.WORKER", SOON)


async def restarted(server: RealNats) -> None:
    await asyncio.to_thread(server.restart)


async def killed(server: RealNats) -> None:
    server.kill()
    await asyncio.sleep(0.5)  # jobs are committed meanwhile
    await asyncio.to_thread(server.start)


async def lost_files(server: RealNats) -> None:
    server.kill()
    server.lose_files()
    await asyncio.to_thread(server.start)


async def hung(server: RealNats) -> None:
    with server.frozen():
        await asyncio.sleep(1)


@pytest.mark.parametrize("fault", [restarted, killed, lost_files, hung])
async def test_broker_outage_loses_and_repeats_no_job(
    fault: Callable[[RealNats], Awaitable[None]], soon, tmp_path: Path
):
    jobs = 120
    with RealNats() as server:
        async with factory(f"sqlite:///{tmp_path}/jobs.db", NatsLab(server.url())) as works:
            clerk = asyncio.create_task(works.enqueue(jobs, seconds=1.2))
            await works.until_done(0.2, jobs)
            await fault(server)
            await clerk
            await works.assert_each_ended_once(jobs)
    assert sum(works.runs.values()) >= jobs


async def test_killed_database_loses_and_repeats_no_job(
    soon, postgres: RealPostgres, postgres_url, nats_server: RealNats
):
    jobs = 100
    nats_server.start()
    async with factory(postgres_url, NatsLab(nats_server.url())) as works:
        clerk = asyncio.create_task(works.enqueue(jobs, seconds=1.2))
        await works.until_done(0.2, jobs)
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)
        await clerk
        await works.assert_each_ended_once(jobs)
    assert sum(works.runs.values()) >= jobs


async def test_a_worker_stops_although_its_broker_hangs(soon, tmp_path: Path):
    with RealNats() as server:
        async with factory(f"sqlite:///{tmp_path}/jobs.db", NatsLab(server.url())) as works:
            await works.enqueue(5, seconds=0)
            await works.lab.until_idle()
            with server.frozen():
                began = time.monotonic()
                await works.lab.workers.pop().stop()
                took = time.monotonic() - began
            await works.enqueue(10, seconds=0)
            await works.assert_each_ended_once(10)
    assert took < 8


async def assert_a_stream_grows(lab: JobsLab, nats: NatsLab) -> None:
    """One that was made when its cluster had just started, and the nodes had not met."""
    async with nats.broker() as broker:

        async def is_made() -> bool:
            try:
                await broker.add_stream(
                    name=nats.stream,
                    subjects=[f"{nats.subject}.>"],
                    retention=RetentionPolicy.WORK_QUEUE,
                )
            except NatsError:  # nodes without a leader do not respond
                return False
            return True

        await eventually(is_made)
    assert (await nats.stream_info()).config.num_replicas == 1
    engine = nats.engine_of(lab.job_store, "default")
    await engine.open()
    try:

        async def has_three() -> bool:
            return (await nats.stream_info()).config.num_replicas == 3

        await eventually(has_three)
    finally:
        await engine.close()


@pytest.mark.xdist_group("nats-cluster")
async def test_killed_leader_under_load_loses_and_repeats_no_job(
    soon, postgres_url, nats_cluster: RealNatsCluster
):
    jobs = 300
    nats = NatsLab(nats_cluster.url())
    async with factory(postgres_url, nats) as works:
        clerk = asyncio.create_task(works.enqueue(jobs, seconds=6))
        await works.until_done(0.2, jobs)
        info = await nats.stream_info()
        leader = await asyncio.to_thread(nats_cluster.leader, nats.stream)
        leader.kill()
        await clerk
        next_leader = await asyncio.to_thread(nats_cluster.leader, nats.stream)
        await asyncio.to_thread(leader.start)
        await works.assert_each_ended_once(jobs)
        await assert_a_stream_grows(works.lab, NatsLab(nats_cluster.url()))
    assert info.config.num_replicas == 3
    assert next_leader is not leader
