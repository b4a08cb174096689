"""kill -9 and SIGSTOP of real workers: one effect, and nothing stuck past the lease."""

import asyncio
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from onceward import open_store
from onceward.jobs.context import JobContext
from onceward.jobs.executor import FAULT_POINTS
from onceward.stores.parts import JOBS
from packages.onceward.tests.support.jobs_harness import (
    JobsLab,
    WorkerProcess,
    eventually,
    make_effects,
    write_effect,
)

LEASE_SECONDS = 1.0


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def gate() -> asyncio.Event:
    """Return what the rescuer waits for before it writes. It is open, unless a test closes it."""
    gate = asyncio.Event()
    gate.set()
    return gate


@pytest.fixture
async def lab(database: str, gate: asyncio.Event) -> AsyncIterator[JobsLab]:
    """Return the worker that takes over; it is not started."""
    store = open_store(database)
    store.schema.want(JOBS)
    await store.open()
    await make_effects(store)
    lab = JobsLab(store)

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> dict[str, str]:
        await gate.wait()
        await write_effect(job, worker="rescuer")
        return {"by": "rescuer"}

    @lab.jobs.handler("count")
    async def count(job: JobContext) -> None:
        await job.transaction.execute("UPDATE counters SET n = n + 1 WHERE name = 'shared'")

    yield lab
    await lab.stop_workers()
    await store.close()


@pytest.fixture
def processes(database: str) -> Iterator[Any]:
    """Return a function that starts workers in separate processes."""
    started: list[WorkerProcess] = []

    def start(**environment: str) -> WorkerProcess:
        settings = {"JOBS_LEASE_SECONDS": str(LEASE_SECONDS), **environment}
        started.append(WorkerProcess(database, **settings))
        return started[-1]

    yield start
    for process in started:
        process.end()


async def effects_of(lab: JobsLab) -> list[str]:
    return [row["worker"] for row in await lab.rows("SELECT worker FROM effects ORDER BY seq")]


@pytest.mark.parametrize("point", FAULT_POINTS)
async def test_a_worker_killed_at_a_fault_point_leaves_one_effect_and_no_stuck_job(
    lab: JobsLab, processes: Any, point: str
) -> None:
    job_id = await lab.enqueued("effect", resource_id="one")
    doomed = processes(JOBS_KILL_AT=point, JOBS_NAME="doomed")
    assert await asyncio.to_thread(doomed.wait_until_killed) == -signal.SIGKILL
    killed_at = time.monotonic()
    was_committed = point == "job_after_commit"
    assert await effects_of(lab) == (["doomed"] if was_committed else [])

    await lab.start_worker(lease_seconds=LEASE_SECONDS)
    detail = await lab.until(job_id, "done")
    assert time.monotonic() - killed_at < LEASE_SECONDS + 20, "it was stuck past the lease"
    name = "doomed" if was_committed else "rescuer"
    assert await effects_of(lab) == [name]
    assert detail.result == {"by": name}
    assert detail.view.attempts == (1 if was_committed else 2)
    lost = [(one.attempt, one.reason, (one.worker or "")[:7]) for one in detail.failures]
    assert lost == ([] if was_committed else [(1, "worker_lost", "doomed-")])
    assert await lab.count("onceward_jobs") == 0


async def test_job_whose_next_workers_are_killed_too_has_one_effect(
    lab: JobsLab, processes: Any
) -> None:
    """Wherever each of them dies, the next one finds all of it or none of it."""
    points = ("job_after_handler", "job_before_retry", "job_before_commit")
    job_id = await lab.enqueued("effect", resource_id="one")
    for point in points:
        doomed = processes(JOBS_KILL_AT=point)
        assert await asyncio.to_thread(doomed.wait_until_killed) == -signal.SIGKILL
        assert await effects_of(lab) == []
    await lab.start_worker(lease_seconds=LEASE_SECONDS)
    detail = await lab.until(job_id, "done")
    assert (detail.view.attempts, await effects_of(lab)) == (len(points) + 1, ["rescuer"])


async def test_killed_worker_keeps_the_order_of_jobs(lab: JobsLab, processes: Any) -> None:
    """Killed with its marker, and the next one's release, not yet committed."""
    for n in range(3):
        await lab.enqueued("effect", resource_id=f"{n}", order="line")
    doomed = processes(JOBS_KILL_AT="job_before_commit")
    assert await asyncio.to_thread(doomed.wait_until_killed) == -signal.SIGKILL
    await lab.start_worker(lease_seconds=LEASE_SECONDS)
    await lab.until_idle()
    assert await lab.effects() == ["0", "1", "2"]


async def stop_while_it_thinks(process: WorkerProcess, database: str) -> None:
    """Pause it outside of a write: on SQLite, no other process could write meanwhile."""
    while True:
        process.pause()
        if not database.startswith("sqlite"):
            return
        db = sqlite3.connect(
            database.removeprefix("sqlite:///"), timeout=0.3, check_same_thread=False
        )
        try:
            await asyncio.to_thread(db.execute, "BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # it was just renewing its lease
            process.signal(signal.SIGCONT)
        else:
            return
        finally:
            db.close()


@pytest.mark.parametrize("the_other", ["is done", "is still at it"])
async def test_worker_paused_for_longer_than_its_lease_cannot_commit(
    lab: JobsLab, database: str, processes: Any, gate: asyncio.Event, the_other: str
) -> None:
    job_id = await lab.enqueued("effect", resource_id="one")
    sleep_seconds = 1.5
    sleeper = processes(JOBS_THINK_SECONDS=str(sleep_seconds), JOBS_NAME="sleeper")
    printed = await asyncio.to_thread(sleeper.wait_for, "started")
    await stop_while_it_thinks(sleeper, database)
    if the_other == "is still at it":
        gate.clear()
    await lab.start_worker(lease_seconds=LEASE_SECONDS)

    async def has_the_lease() -> bool:
        return gate.is_set() or lab.workers[0].running == 1

    await eventually(has_the_lease)
    if the_other == "is done":
        await lab.until(job_id, "done")
    # Woken when it has thought enough: the first thing it does is to write and to commit.
    await asyncio.sleep(float(printed.split()[2]) + sleep_seconds + 0.1 - time.time())
    sleeper.signal(signal.SIGCONT)
    assert await asyncio.to_thread(sleeper.wait_for, "ended") == "ended lease_lost"
    gate.set()
    detail = await lab.until(job_id, "done")
    # The rescuer itself may lose a lease on a busy machine, and come again.
    assert detail.result == {"by": "rescuer"}
    assert detail.view.attempts >= 2
    assert await effects_of(lab) == ["rescuer"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_transaction_of_a_paused_worker_is_ended_after_its_lease(
    lab: JobsLab, processes: Any
) -> None:
    """On SQLite it holds the one write lock, which only its death can free."""
    await lab.store.write("INSERT INTO counters (name, n) VALUES ('shared', 0)")
    job_id = await lab.enqueued("count")
    sleeper = processes(JOBS_THINK_SECONDS="1.5")
    await asyncio.to_thread(sleeper.wait_for, "written")
    sleeper.pause()
    stopped_at = time.monotonic()
    await lab.start_worker(lease_seconds=LEASE_SECONDS)
    await lab.until(job_id, "done")
    assert time.monotonic() - stopped_at < 2 * LEASE_SECONDS + 20
    sleeper.signal(signal.SIGCONT)
    printed = await asyncio.to_thread(sleeper.wait_for, "ended")
    assert printed in ("ended lease_lost", "ended unknown")
    (row,) = await lab.rows("SELECT n FROM counters")
    assert row["n"] == 1
    await lab.quiet()
    assert lab.outcomes.all == ["done"]
    another = await lab.enqueued("effect", resource_id="another")
    assert (await lab.until(another, "done")).view.attempts == 1
