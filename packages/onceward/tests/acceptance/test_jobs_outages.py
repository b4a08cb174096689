"""Database outages during jobs, and wrong clocks: no job is lost or repeated."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward import open_store
from onceward.jobs.context import JobContext
from onceward.stores.parts import JOBS
from onceward_protocol.clock import SystemClock
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    WorkerProcess,
    eventually,
    make_effects,
    write_effect,
)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
async def lab(database: str) -> AsyncIterator[JobsLab]:
    store = open_store(database)
    store.schema.want(JOBS)
    await store.open()
    await make_effects(store)
    lab = JobsLab(store)
    yield lab
    await lab.stop_workers()
    await store.close()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("way", ["immediate", "kill"])
async def test_postgres_restarted_in_mid_job_leaves_one_effect_of_every_job(
    lab: JobsLab, postgres: RealPostgres, way: str
) -> None:
    """Jobs in every stage: thinking, with their writes done, writing nothing, not yet taken."""
    gate = asyncio.Event()
    at_the_gate: Counter[str] = Counter()

    @lab.jobs.handler("thinks")
    async def thinks(job: JobContext) -> None:
        at_the_gate["thinks"] += 1
        await gate.wait()
        await write_effect(job, f"thinks {job.payload}")

    @lab.jobs.handler("writes")
    async def writes(job: JobContext) -> None:
        await write_effect(job, f"writes {job.payload}")
        at_the_gate["writes"] += 1
        await gate.wait()

    @lab.jobs.handler("quiet")
    async def quiet(job: JobContext) -> None:
        at_the_gate["quiet"] += 1
        await gate.wait()

    wanted = []
    for n in range(4):
        for kind in ("thinks", "writes", "quiet"):
            await lab.enqueue(kind, n)
        wanted += [f"thinks {n}", f"writes {n}"]
    await lab.start_worker(lease_seconds=2, concurrency=9)

    async def are_there() -> bool:
        return at_the_gate.total() == 9

    await eventually(are_there)
    if way == "immediate":
        await asyncio.to_thread(postgres.stop, "immediate")
    else:
        await asyncio.to_thread(postgres.kill)
    gate.set()
    await asyncio.to_thread(postgres.start)
    await lab.until_idle(seconds=30)
    assert sorted(await lab.effects()) == sorted(wanted)
    assert await lab.count("onceward_job_completions") == 12
    assert await lab.count("onceward_dead_letters") == 0
    assert "unknown" in lab.outcomes.all, "no job was running, so this proves nothing"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_every_job_ends_once_while_postgres_restarts_under_load(
    lab: JobsLab, postgres: RealPostgres, database: str
) -> None:
    """Two workers, and commits with an unknown outcome."""

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await write_effect(job, f"{job.payload}")
        await asyncio.sleep(0.005)

    other = open_store(database)
    await other.open()
    jobs = 100
    for n in range(jobs):
        await lab.enqueue("effect", n, max_attempts=50, order=f"{n % 5}" if n % 3 == 0 else None)
    await lab.start_worker(lease_seconds=1, concurrency=4)
    await lab.start_worker(other, lease_seconds=1, concurrency=4)
    for _ in range(2):

        async def has_moved(before: int = await lab.count("onceward_job_completions")) -> bool:
            return await lab.count("onceward_job_completions") > before + 10

        await eventually(has_moved)
        await asyncio.to_thread(postgres.stop, "immediate")
        await asyncio.to_thread(postgres.start)

        async def is_back() -> bool:
            try:
                return await lab.count("effects") > 0
            except Exception:  # noqa: BLE001 - connections that died with the server
                return False

        await eventually(is_back)
    await lab.until_idle(seconds=30)
    assert Counter(await lab.effects()) == Counter(str(n) for n in range(jobs))
    assert await lab.count("onceward_job_completions") == jobs
    await lab.stop_workers()
    await other.close()


# -- clocks -------------------------------------------------------------------------------------


class WrongClock(SystemClock):
    """A clock that is an hour off."""

    def __init__(self, hours: float) -> None:
        self._off = timedelta(hours=hours)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._off

    def monotonic(self) -> float:
        return time.monotonic() + self._off.total_seconds()


@pytest.fixture
def wrong(database: str, lab: JobsLab) -> Iterator[Any]:
    """Return a function that starts workers in processes whose clocks are wrong."""
    started: list[WorkerProcess] = []

    def start(hours: int, **environment: str) -> WorkerProcess:
        settings = {"JOBS_CLOCK_OFF_SECONDS": str(hours * 3600), **environment}
        started.append(WorkerProcess(database, **settings))
        return started[-1]

    yield start
    for process in started:
        process.end()


async def test_leases_of_workers_whose_clocks_are_an_hour_off_last_as_long_as_any_other(
    lab: JobsLab, wrong: Any
) -> None:
    """While they run, no other worker takes their jobs; after their end one does, after the lease.

    One is ahead and one behind; and so are the two that come to the rescue.
    """

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await write_effect(job, worker="rescuer")

    ids = [await lab.enqueued("effect", n) for n in range(2)]
    settings = {"JOBS_THINK_SECONDS": "60", "JOBS_CONCURRENCY": "1"}
    processes = await asyncio.gather(
        *(asyncio.to_thread(wrong, hours, **settings) for hours in (1, -1))
    )
    for process, hours in zip(processes, (1, -1), strict=True):
        printed = await asyncio.to_thread(process.wait_for, "started")
        assert abs(float(printed.split()[2]) - time.time() - hours * 3600) < 60, (
            "its clock is right"
        )
    for hours in (1, -1):
        await lab.start_worker(lease_seconds=1, clock=WrongClock(hours))
    await asyncio.sleep(1.3)
    for job_id in ids:
        view = (await lab.job(job_id)).view
        assert (view.state, view.attempts) == ("running", 1), "its worker was alive"
    for process in processes:
        process.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    for job_id in ids:
        view = (await lab.until(job_id, "done")).view
        assert view.attempts == 2
        assert view.ended_at is not None
        assert abs(view.ended_at.timestamp() - time.time()) < 60, "by the database's clock"
    assert time.monotonic() - killed_at < 60, "an hour is what the wrong clocks are off"


async def test_a_worker_and_an_enqueuer_whose_clocks_are_off_keep_to_the_databases_time(
    lab: JobsLab, wrong: Any
) -> None:
    """A job with a delay is neither an hour early nor an hour late."""
    behind = wrong(-1, JOBS_WORK="no")
    ahead = wrong(1)
    behind.write_line('enqueue {"type": "effect", "payload": 1, "delay_seconds": 0.5}')
    ahead.write_line('enqueue {"type": "effect", "payload": 2, "delay_seconds": 0.5}')
    for process in (behind, ahead):
        await asyncio.to_thread(process.wait_for, "committed")
    due = [row["due_at"] for row in await lab.job_store.read("list_jobs", _EVERY)]
    now = (await lab.job_store.now()).timestamp()
    assert all(-5 < at - now <= 0.5 for at in due), due
    for _ in range(2):
        await asyncio.to_thread(ahead.wait_for, "ended done", seconds=10)
    assert await lab.count("effects") == 2
    (marker, other) = await lab.admin.jobs(tenant="ada", state="done")
    for view in (marker, other):
        assert view.ended_at is not None
        assert (view.ended_at - view.enqueued_at).total_seconds() >= 0.499


_EVERY = {"tenant": "", "state": "", "queue": "", "type": "", "limit": 10}
