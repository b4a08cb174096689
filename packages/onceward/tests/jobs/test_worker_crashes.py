"""A job that kills its process, beside others, in real processes."""

import asyncio
import signal
from collections.abc import Iterator

import pytest

from onceward.jobs.admin import JobDetail
from onceward.jobs.context import JobContext
from onceward_testing.fork_server import ForkServer
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.jobs.handlers import Gate
from packages.onceward.tests.support import deadly_jobs
from packages.onceward.tests.support.jobs_harness import ROOT, JobsLab, eventually

INNOCENT = 20


@pytest.fixture
def program() -> Iterator[ForkServer]:
    with ForkServer(deadly_jobs.__name__, cwd=ROOT) as server:
        yield server


async def enqueue_all(lab: JobsLab, *, max_attempts: int) -> tuple[str, list[str]]:
    """Enqueue one deadly job in the middle of harmless ones; return their ids."""
    harmless = [await lab.enqueued("harmless", resource_id=f"{n}") for n in range(4)]
    deadly = await lab.enqueued("deadly", max_attempts=max_attempts)
    more = [await lab.enqueued("harmless", resource_id=f"{n}") for n in range(4, INNOCENT)]
    return deadly, [*harmless, *more]


async def check_all(lab: JobsLab, deadly: str, harmless: list[str], *, attempts: int) -> JobDetail:
    dead = await lab.job(deadly)
    assert (dead.view.state, dead.view.reason) == ("dead", "worker_lost")
    assert dead.view.attempts == attempts
    done = [await lab.job(job_id) for job_id in harmless]
    assert [(job.view.state, job.view.attempts) for job in done] == [("done", 1)] * INNOCENT
    assert sorted(await lab.effects(), key=int) == [f"{n}" for n in range(INNOCENT)]
    return dead


async def test_job_that_kills_its_worker_costs_the_jobs_beside_it_no_attempt(
    lab: JobsLab, database: str, program: ForkServer
) -> None:
    deadly, harmless = await enqueue_all(lab, max_attempts=5)
    kills = 0
    call = ("work", {"database": database, "lease_seconds": 30})
    while (await asyncio.to_thread(program.run, call)) == [-signal.SIGKILL]:
        kills += 1
        assert kills < 20, "it is never given up"
        await lab.show_in(-0.001, "state = 'running'")  # the leases expire
    dead = await check_all(lab, deadly, harmless, attempts=5)
    assert kills == 7, "two beside other jobs, which do not count, and five alone"
    assert [f.attempt for f in dead.failures] == [1, 1, 1, 2, 3, 4, 5]
    assert [f.error.endswith("does not count as an attempt") for f in dead.failures] == [
        *[True] * 2,
        *[False] * 5,
    ]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_job_that_kills_its_worker_on_jetstream_costs_the_others_no_attempt(
    lab: JobsLab, database: str, program: ForkServer, nats: NatsLab
) -> None:
    deadly, harmless = await enqueue_all(lab, max_attempts=1)
    options = {"database": database, "lease_seconds": 0.6, "nats": nats.options()}
    while (await asyncio.to_thread(program.run, ("work", options))) == [-signal.SIGKILL]:
        pass
    await check_all(lab, deadly, harmless, attempts=1)


async def alone(lab: JobsLab) -> list[bool]:
    rows = await lab.rows("SELECT alone FROM onceward_jobs ORDER BY resource_id")
    return [bool(row["alone"]) for row in rows]


async def test_job_is_alone_until_another_one_is_started_beside_it(lab: JobsLab) -> None:
    gate = Gate(lab)
    worker = await lab.start_worker()
    await lab.enqueued("gated", resource_id="first")
    await gate.started.wait()
    assert await alone(lab) == [True]
    await lab.enqueued("gated", resource_id="second")

    async def both_run() -> bool:
        return gate.runs == 2

    await eventually(both_run)
    assert await alone(lab) == [False, False], "marked before the second was started"
    gate.opened.set()
    await lab.until_idle()
    assert worker.running == 0


async def test_job_lost_twice_beside_others_is_run_after_them_and_alone(lab: JobsLab) -> None:
    gate = Gate(lab)
    running: list[int] = []
    marked: list[bool] = []

    @lab.jobs.handler("suspect")
    async def suspect(job: JobContext) -> None:
        running.append(lab.workers[0].running)
        marked.extend(await alone(lab))

    first = await lab.enqueued("suspect", resource_id="suspect")
    for name in ("doomed", "lost"):
        (job,) = await lab.job_store.claim(
            ("default",), worker=name, limit=1, lease_seconds=30, alone=False
        )
        assert job.attempt == 1
        await lab.show_in(-0.001)
    await lab.enqueued("gated", resource_id="a job beside it")
    await lab.start_worker()
    await gate.started.wait()
    later = await lab.enqueued("gated", resource_id="later")
    await asyncio.sleep(0.05)
    assert (running, await lab.state(later)) == ([], "waiting"), "it waits, and nothing is fetched"
    gate.opened.set()
    await lab.until_idle()
    assert (running, marked) == ([1], [False, True]), "of later and of the suspect"
    assert (await lab.job(first)).view.attempts == 1
