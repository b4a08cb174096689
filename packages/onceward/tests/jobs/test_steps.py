"""Steps: what happens outside the database is remembered, and not done again by a retry."""

import asyncio
import uuid
from typing import Any

import pytest

from onceward.errors import LeaseLostError, NonRetryableError, RetryLaterError
from onceward.jobs.context import JobContext
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect


class Outside:
    """Another service, which records the keys of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def call(self, name: str, result: Any = None) -> Any:
        async def action(key: str) -> Any:
            self.calls.append((name, key))
            return result

        return action


async def test_retry_continues_after_the_last_finished_step_with_its_result(
    lab: JobsLab,
) -> None:
    outside = Outside()
    given: list[Any] = []

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        charge = await job.step("charge", outside.call("charge", {"id": f"c{job.attempt}"}))
        if job.attempt == 1:
            raise RetryLaterError("the mail is down")
        mail = await job.step("mail", outside.call("mail"))
        given.append((charge, mail))
        await write_effect(job, charge["id"])
        if job.attempt == 2:
            raise RuntimeError("so near")

    await lab.start_worker()
    job_id = await lab.enqueued("order")
    await lab.until_failed(job_id, 1)
    await lab.hurry()
    await lab.until_failed(job_id, 2)
    await lab.hurry()
    detail = await lab.until(job_id, "done")
    assert [name for name, _ in outside.calls] == ["charge", "mail"]
    assert given == [({"id": "c1"}, None)] * 2
    assert await lab.effects() == ["c1"]
    assert detail.steps == {"charge": {"id": "c1"}, "mail": None}


async def test_an_unfinished_step_is_repeated_with_the_same_key(lab: JobsLab) -> None:
    """The other service knows it by that: it may have done it before it, or we, went away."""
    outside = Outside()

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        async def charge(key: str) -> None:
            outside.calls.append((job.id, key))
            assert key == job.step_key("charge")
            if job.attempt < 3:
                raise TimeoutError("no response")

        await job.step("charge", charge)

    await lab.start_worker()
    ids = [await lab.enqueued("order", n) for n in range(2)]
    ids.append(await lab.enqueued("order", 0, tenant="eve"))
    await lab.until_idle(hurry=True)
    keys = {job_id: {key for owner, key in outside.calls if owner == job_id} for job_id in ids}
    assert len(outside.calls) == 9
    assert [len(each) for each in keys.values()] == [1, 1, 1], "the same in every attempt"
    assert len(set.union(*keys.values())) == 3, "and another for every job"


async def test_step_keys_are_distinct_uuid4s(lab: JobsLab) -> None:
    outside = Outside()

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        for name in ("charge", "mail", "Mail", "mail "):
            await job.step(name, outside.call(name))

    await lab.start_worker()
    await lab.enqueue("order")
    await lab.until_idle()
    keys = [key for _, key in outside.calls]
    assert len(set(keys)) == 4
    for key in keys:
        assert uuid.UUID(key).version == 4
        assert str(uuid.UUID(key)) == key


async def test_a_requeued_job_does_not_repeat_its_steps(lab: JobsLab) -> None:
    outside = Outside()

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        await job.step("charge", outside.call("charge"))
        if len(outside.calls) == 1 and await lab.count("onceward_dead_letters") == 0:
            raise NonRetryableError("a bug, to be mended")

    await lab.start_worker()
    job_id = await lab.enqueued("order")
    await lab.until(job_id, "dead")
    assert await lab.admin.requeue(job_id, tenant="ada", actor="grace")
    lab.notify()
    await lab.until(job_id, "done")
    assert len(outside.calls) == 1


@pytest.mark.parametrize("write", ["execute", "fetch_all", "enqueue", "begin"])
async def test_a_step_after_a_write_is_refused_and_not_done(lab: JobsLab, write: str) -> None:
    outside = Outside()

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        match write:
            case "execute":
                await write_effect(job)
            case "fetch_all":
                await job.transaction.fetch_all("SELECT 1")
            case "enqueue":
                await job.enqueue("other")
            case _:
                await job.begin()
        await job.step("charge", outside.call("charge"))

    await lab.start_worker()
    job_id = await lab.enqueued("order")
    dead = await lab.until(job_id, "dead")
    assert dead.view.attempts == 1
    assert dead.error == (
        "UsageError: step 'charge' comes after a write: run all steps before the first write"
    )
    assert outside.calls == []
    assert await lab.effects() == []


async def test_a_step_is_not_recorded_once_the_lease_is_lost(lab: JobsLab) -> None:
    """And the handler ends there, instead of doing the next thing outside."""
    outside = Outside()
    raised: list[Exception] = []

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        async def charge(key: str) -> str:
            outside.calls.append(("charge", key))
            if job.attempt == 1:
                await lab.steal()
            return f"charged in {job.attempt}"

        try:
            await job.step("charge", charge)
        except Exception as error:
            raised.append(error)
            raise
        await job.step("mail", outside.call("mail"))

    await lab.start_worker()
    job_id = await lab.enqueued("order")

    async def was_lost() -> bool:
        return "lease_lost" in lab.outcomes.all

    await eventually(was_lost)
    assert [type(error) for error in raised] == [LeaseLostError]
    assert (await lab.job(job_id)).steps == {}
    await lab.show_in(-0.001)
    lab.notify()
    detail = await lab.until(job_id, "done")
    assert detail.steps == {"charge": "charged in 2", "mail": None}
    assert [name for name, _ in outside.calls] == ["charge", "charge", "mail"]
    assert len({key for name, key in outside.calls if name == "charge"}) == 1


@pytest.mark.parametrize(
    "garbage", [object(), float("nan"), "x" * 70_000], ids=["object", "nan", "too large"]
)
async def test_step_result_that_is_not_json_dead_letters_the_job(
    lab: JobsLab, garbage: Any
) -> None:
    outside = Outside()

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        await job.step("charge", outside.call("charge", garbage))
        await write_effect(job)

    await lab.start_worker()
    job_id = await lab.enqueued("order")
    dead = await lab.until(job_id, "dead")
    assert dead.error is not None
    assert "step 'charge' returned" in dead.error
    assert (dead.steps, dead.view.attempts, len(outside.calls)) == ({}, 1, 1)
    assert await lab.effects() == []


@pytest.mark.parametrize("at_once", [True, False])
async def test_two_steps_with_one_name_are_refused(lab: JobsLab, *, at_once: bool) -> None:
    outside = Outside()

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        if at_once:
            await asyncio.gather(*(job.step("mail", outside.call("mail", n)) for n in range(3)))
        for n in range(3):
            await job.step("mail", outside.call("mail", n))

    await lab.start_worker()
    job_id = await lab.enqueued("order")
    dead = await lab.until(job_id, "dead")
    assert dead.error == "UsageError: there are two steps 'mail': names must be unique within a job"
    assert len(outside.calls) == 1


async def test_different_steps_may_run_concurrently(lab: JobsLab) -> None:
    both = asyncio.Barrier(2)

    @lab.jobs.handler("order")
    async def order(job: JobContext) -> None:
        async def meet(key: str) -> str:
            async with asyncio.timeout(5):
                await both.wait()
            return key

        await asyncio.gather(job.step("one", meet), job.step("other", meet))

    await lab.start_worker()
    job_id = await lab.enqueued("order")
    assert set((await lab.until(job_id, "done")).steps) == {"one", "other"}
