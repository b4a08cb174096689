"""Order keys: one job at a time, in the order of the commits, and none stays blocked."""

import asyncio
import random
from collections import Counter, defaultdict

import pytest

from onceward.errors import NonRetryableError
from onceward.jobs.context import JobContext
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect


class Line:
    """A handler that notes in which order it ran, and how many of one key ran at once."""

    def __init__(self, lab: JobsLab) -> None:
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.fails: dict[str, list[Exception]] = {}

        @lab.jobs.handler("line")
        async def line(job: JobContext) -> None:
            key, name = job.payload["key"], job.payload["name"]
            self.running[key] += 1
            self.most[key] = max(self.most[key], self.running[key])
            try:
                await asyncio.sleep(random.random() * 0.003)
                await write_effect(job, f"{key} {name}")
                if errors := self.fails.get(f"{key} {name}"):
                    raise errors.pop(0)
            finally:
                self.running[key] -= 1


async def put(lab: JobsLab, key: str, name: object, **options: object) -> str:
    return await lab.enqueued("line", {"key": key, "name": name}, order=key, **options)


async def by_key(lab: JobsLab) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for effect in await lab.effects():
        key, _, name = effect.partition(" ")
        found[key].append(name)
    return found


async def test_jobs_of_one_key_run_one_at_a_time_and_in_order_over_two_workers(
    lab: JobsLab, another_store: OpenStore
) -> None:
    line = Line(lab)
    count = 15
    for n in range(count):
        for key in ("a", "b", "c"):
            await put(lab, key, n)
    for _ in range(2):
        await lab.start_worker(await another_store(), concurrency=8)
    await lab.until_idle()
    assert line.most == {"a": 1, "b": 1, "c": 1}
    in_order = [str(n) for n in range(count)]
    assert await by_key(lab) == {"a": in_order, "b": in_order, "c": in_order}


async def test_retry_delays_only_jobs_of_its_order_key(lab: JobsLab) -> None:
    line = Line(lab)
    line.fails["a 1"] = [RuntimeError("once"), RuntimeError("twice")]
    for n in range(3):
        await put(lab, "a", n)
    last = await put(lab, "b", 0)
    free = await lab.enqueued("line", {"key": "free", "name": 0})
    await lab.start_worker()
    await lab.until(last, "done")
    await lab.until(free, "done")

    async def has_failed() -> bool:
        return await lab.count("onceward_job_failures") == 1

    await eventually(has_failed)
    assert (await by_key(lab))["a"] == ["0"]
    await lab.until_idle(hurry=True)
    assert (await by_key(lab))["a"] == ["0", "1", "2"]
    assert line.most["a"] == 1


async def test_dead_letter_releases_the_next_job_of_its_order_key(lab: JobsLab) -> None:
    line = Line(lab)
    line.fails["a 1"] = [NonRetryableError("hopeless")]
    line.fails["a 3"] = [RuntimeError("no")] * 2
    ids = [await put(lab, "a", n, max_attempts=2) for n in range(5)]
    await lab.enqueue("unknown.type", queue="default", order="a")
    await put(lab, "a", 5)
    await lab.start_worker()
    await lab.until_idle(hurry=True)
    assert (await by_key(lab))["a"] == ["0", "2", "4", "5"]
    assert [await lab.state(job_id) for job_id in ids] == ["done", "dead", "done", "dead", "done"]

    assert await lab.admin.requeue(ids[1], tenant="ada", actor="grace")
    lab.notify()
    await lab.until_idle()
    assert (await by_key(lab))["a"][-1] == "1"


async def test_requeued_job_waits_behind_those_of_its_order_key(lab: JobsLab) -> None:
    line = Line(lab)
    line.fails["a 0"] = [NonRetryableError("hopeless")]
    first = await put(lab, "a", 0)
    worker = await lab.start_worker()
    await lab.until(first, "dead")
    await worker.stop()
    for n in (1, 2):
        await put(lab, "a", n)
    assert await lab.admin.requeue(first, tenant="ada", actor="grace")
    assert (await lab.job(first)).view.due_at is None
    await put(lab, "a", 3)
    await worker.start()
    await lab.until_idle()
    assert (await by_key(lab))["a"] == ["1", "2", "0", "3"]


async def test_lost_lease_keeps_the_order(lab: JobsLab) -> None:
    Line(lab)
    for n in range(3):
        await put(lab, "a", n)
    (head,) = await lab.claim("ended")
    assert head.decoded()["name"] == 0
    await lab.start_worker()
    await asyncio.sleep(0.1)
    assert await lab.effects() == []
    await lab.show_in(-0.001, "state = 'running'")
    lab.notify()
    await lab.until_idle()
    assert (await by_key(lab))["a"] == ["0", "1", "2"]


async def test_order_keys_of_two_tenants_are_independent(lab: JobsLab) -> None:
    Line(lab)
    await put(lab, "a", 0, tenant="ada", delay_seconds=60)
    await put(lab, "a", 1, tenant="ada")
    eve = await put(lab, "a", 0, tenant="eve")
    await lab.start_worker()

    async def done() -> bool:
        return await lab.admin.state(eve, tenant="eve") == "done"

    await eventually(done)
    assert await lab.count("onceward_jobs") == 2, "behind one that is not due yet, one waits"


async def test_jobs_run_in_the_order_in_which_their_transactions_committed(
    lab: JobsLab, another_store: OpenStore
) -> None:
    """Enqueuers begin, think and commit across each other, on two stores."""
    line = Line(lab)
    labs = [lab, JobsLab(await another_store())]
    await lab.start_worker(concurrency=8)

    async def enqueuer(lane: int) -> None:
        own = labs[lane % 2]
        for n in range(12):
            unit = await own.store.begin()
            try:
                await asyncio.sleep(random.random() * 0.004)
                name = f"{lane}.{n}"
                await own.enqueue_in(unit.statements, "line", {"key": "a", "name": name}, order="a")
                # From here to the commit no other transaction of this key can run.
                await unit.statements.execute(
                    "INSERT INTO effects (name) VALUES (:name)", {"name": f"commits {name}"}
                )
                await asyncio.sleep(random.random() * 0.004)
            except BaseException:
                await unit.rollback()
                raise
            if n % 4 == 3:
                await unit.rollback()
            else:
                await unit.commit(None, None)
                lab.notify()

    await asyncio.gather(*(enqueuer(lane) for lane in range(6)))
    await lab.until_idle()
    found = await by_key(lab)
    assert len(found["a"]) == 6 * 9
    assert found["a"] == found["commits"]
    assert line.most["a"] == 1


@pytest.mark.parametrize("ends", ["done", "dead"])
async def test_no_job_stays_blocked_when_an_enqueue_races_with_a_completion(
    lab: JobsLab, another_store: OpenStore, ends: str
) -> None:
    """Hundreds of rounds: each is enqueued at about the instant in which the last one ends."""
    rounds = 80

    @lab.jobs.handler("line")
    async def line(job: JobContext) -> None:
        await write_effect(job, f"{job.payload['key']} {job.payload['name']}")
        if ends == "dead":
            raise NonRetryableError("as always")

    enqueuing = JobsLab(await another_store())
    for _ in range(2):
        await lab.start_worker(await another_store(), concurrency=8)
    enqueuing.workers = lab.workers

    async def enqueuer(key: str) -> None:
        for n in range(rounds):
            async with enqueuing.transaction() as tx:
                payload = {"key": key, "name": n}
                await enqueuing.enqueue_in(tx, "line", payload, order=key)
                await asyncio.sleep(random.random() * 0.003)
            enqueuing.notify()
            await asyncio.sleep(random.random() * 0.004)

    await asyncio.gather(*(enqueuer(key) for key in ("a", "b")))
    enqueuing.workers = []
    await lab.until_idle(seconds=10)
    table = "onceward_job_completions" if ends == "done" else "onceward_dead_letters"
    assert await lab.count(table) == 2 * rounds
    if ends == "done":
        in_order = [str(n) for n in range(rounds)]
        assert await by_key(lab) == {"a": in_order, "b": in_order}
