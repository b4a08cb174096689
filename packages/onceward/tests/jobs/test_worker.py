"""The worker: one effect for one job, whatever is raised, lost, hung or delivered twice."""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import pytest

from onceward.errors import (
    ConfigurationError,
    NonRetryableError,
    NoTransactionError,
    StoreUnavailableError,
)
from onceward.jobs.context import JobContext
from onceward.jobs.engines import SqlEngine
from onceward.jobs.job import LeasedJob
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import Worker
from onceward.ports import Delivery
from packages.onceward.tests.jobs.conftest import OpenStore
from packages.onceward.tests.jobs.handlers import Gate, Stubborn, add_effect, done
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect

# -- handlers and their results -----------------------------------------------------------------


async def test_effect_and_marker_commit_together_with_the_result(lab: JobsLab) -> None:
    seen: list[JobContext] = []

    @lab.jobs.handler("effect", queue="mail")
    async def effect(job: JobContext) -> dict[str, Any]:
        seen.append(job)
        await write_effect(job)
        assert await lab.effects() == [], "invisible to others before the commit"
        assert await lab.state(job.id) == "running"
        return {"ü": [1, None]}

    worker = await lab.start_worker()
    job_id = await lab.enqueued("effect", {"n": 1}, resource_id="order/1")
    detail = await done(lab, job_id)
    assert (detail.result, detail.view.worker, detail.view.attempts) == (
        {"ü": [1, None]},
        worker.name,
        1,
    )
    assert await lab.effects() == ["order/1"]
    (job,) = seen
    assert (job.id, job.tenant, job.queue, job.type) == (job_id, "ada", "mail", "effect")
    assert (job.payload, job.resource_id, job.attempt) == ({"n": 1}, "order/1", 1)
    assert job.key == "job:ada:mail:effect:order/1"
    assert (job.request_id, job.correlation_id) == ("request-1", "correlation-1")
    assert not job.is_last_attempt
    assert abs((job.enqueued_at - await lab.job_store.now()).total_seconds()) < 10
    with pytest.raises(NoTransactionError):
        await job.transaction.execute("INSERT INTO effects (name) VALUES ('late')")


async def test_job_that_writes_is_committed_in_one_message_on_postgresql(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    separate: list[str] = []
    complete_within = JobStore.complete_within

    async def completed(self: Any, unit: Any, job: LeasedJob, *args: Any, **named: Any) -> None:
        separate.append(job.type)
        await complete_within(self, unit, job, *args, **named)

    monkeypatch.setattr(JobStore, "complete_within", completed)

    @lab.jobs.handler("small")
    async def small(job: JobContext) -> str:
        await write_effect(job)
        return "x" * 1000

    @lab.jobs.handler("large")
    async def large(job: JobContext) -> str:
        await write_effect(job)
        return "x" * 5000

    await lab.start_worker()
    for job_type, length in (("small", 1000), ("large", 5000)):
        job_id = await lab.enqueued(job_type, resource_id=job_type)
        assert (await done(lab, job_id)).result == "x" * length
    assert sorted(await lab.effects()) == ["large", "small"]
    # A large result is a parameter, in a separate message. SQLite has no messages.
    assert separate == (["small", "large"] if lab.store.name == "sqlite" else ["large"])


async def test_job_that_writes_nothing_opens_no_transaction_and_is_completed(
    lab: JobsLab,
) -> None:
    @lab.jobs.handler("quiet")
    async def quiet(job: JobContext) -> int:
        return 7

    await lab.start_worker()
    job_id = await lab.enqueued("quiet")
    assert (await done(lab, job_id)).result == 7


async def test_an_effect_is_undone_with_its_failed_attempt(lab: JobsLab) -> None:
    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await write_effect(job, f"attempt {job.attempt}")
        await job.enqueue("follow", job.attempt)
        if job.attempt < 3:
            raise RuntimeError("not yet")

    @lab.jobs.handler("follow")
    async def follow(job: JobContext) -> None:
        await write_effect(job, f"follow {job.payload}")

    await lab.start_worker()
    await lab.enqueue("effect")
    await lab.until_idle(hurry=True)
    assert await lab.effects() == ["attempt 3", "follow 3"]


# -- one effect -------------------------------------------------------------------------------


class Repeating(SqlEngine):
    """A broken broker: delivers every job that a worker takes five times to all workers."""

    anonymous: ClassVar[list["Repeating"]] = []
    copies: ClassVar[int] = 5

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inbox: list[Delivery] = []
        self.given = 0
        self.anonymous.append(self)

    async def take(
        self,
        limit: int,
        wait_seconds: float,
        *,
        alone: bool = True,
        skipped: Collection[str] = (),
    ) -> Sequence[Delivery]:
        if not self.inbox:
            for delivery in await super().take(limit, wait_seconds, alone=alone, skipped=skipped):
                for engine in self.anonymous:
                    engine.inbox += [delivery] * self.copies
                    engine.notify()
        given, self.inbox = self.inbox[:limit], self.inbox[limit:]
        self.given += len(given)
        return given


@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("order", [None, "line"])
async def test_a_job_delivered_twenty_times_to_four_workers_has_one_effect(
    lab: JobsLab, another_store: OpenStore, order: str | None, *, writes: bool
) -> None:
    runs: list[str] = []

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        runs.append(job.id)
        if writes:
            await write_effect(job)
        await asyncio.sleep(0.01)

    Repeating.anonymous.clear()
    for _ in range(4):
        await lab.start_worker(
            await another_store(),
            engine=lambda table, queues, worker, lease_seconds: Repeating(
                table, queues, worker=worker, lease_seconds=lease_seconds
            ),
        )
    job_id = await lab.enqueued("effect", resource_id="one", order=order)
    await done(lab, job_id)

    async def all_over() -> bool:
        return len(lab.outcomes.all) == 20

    await eventually(all_over)
    assert sum(engine.given for engine in Repeating.anonymous) == 20
    assert len(runs) == 20, "every delivery was tried"
    ended_well = lab.outcomes.all.count("done")
    # Copies in one worker that wrote nothing may share the one statement that writes the marker.
    assert ended_well == 1 if writes or order else 1 <= ended_well <= Repeating.copies
    assert lab.outcomes.all.count("lease_lost") == 20 - ended_well
    assert await lab.effects() == (["one"] if writes else [])
    assert await lab.count("onceward_job_completions") == 1


async def test_job_made_visible_repeatedly_while_it_runs_has_one_effect(
    lab: JobsLab, another_store: OpenStore
) -> None:
    starts = 0

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        nonlocal starts
        starts += 1
        while starts <= 5:  # none ends before a job was delivered twice
            await asyncio.sleep(0.005)
        await write_effect(job)

    for _ in range(4):
        await lab.start_worker(await another_store())
    ids = [await lab.enqueued("effect", n, resource_id=f"{n}", max_attempts=1000) for n in range(5)]
    async with asyncio.timeout(30):
        while starts <= len(ids):
            await lab.show_in(-0.001, "state = 'running'")
            lab.notify()
            await asyncio.sleep(0.01)
    for _ in range(20):
        await lab.show_in(-0.001, "state = 'running'")
        lab.notify()
        await asyncio.sleep(0.01)
    await lab.until_idle()
    assert sorted(await lab.effects()) == [f"{n}" for n in range(5)]
    assert {await lab.state(job_id) for job_id in ids} == {"done"}


async def test_completed_key_is_acknowledged_without_running(lab: JobsLab) -> None:
    """The lost race of an enqueue with a completion: the job is there, and so is its marker."""
    if lab.store.name == "sqlite":
        pytest.skip("one writer at a time: a job and its marker never exist together")
    runs: list[str] = []

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        runs.append(job.id)

    await lab.start_worker()
    job_id = await lab.enqueued("effect", resource_id="1")
    await done(lab, job_id)
    row = "tenant, key, queue, type, payload_hash, request_id, correlation_id"
    await lab.store.write(
        lab.store.table_names.render(
            f"INSERT INTO onceward_jobs ({row}, id, payload, visible_at, run_at, max_attempts,"
            f" actor) SELECT {row}, job_id, 'null', now(), now(), 5, 'ada'"
            " FROM onceward_job_completions"
        )
    )
    lab.notify()
    await lab.until_idle()
    assert runs == [job_id]
    assert lab.outcomes.all == ["done", "duplicate"]


# -- jobs that make jobs ------------------------------------------------------------------------


async def test_enqueued_jobs_inherit_ids_and_tenant(lab: JobsLab) -> None:
    seen: list[tuple[str, ...]] = []

    @lab.jobs.handler("first")
    async def first(job: JobContext) -> None:
        await job.enqueue("second", {"n": 2}, resource_id="r", queue=None)

    @lab.jobs.handler("second", queue="mail", max_attempts=2)
    async def second(job: JobContext) -> None:
        seen.append((job.tenant, job.queue, job.key, job.request_id, job.correlation_id))
        assert job.payload == {"n": 2}
        await job.enqueue("third", tenant="eve")
        raise NonRetryableError("enough")

    await lab.start_worker()
    await lab.enqueue("first")

    async def dead() -> bool:
        return await lab.count("onceward_dead_letters") == 1

    await eventually(dead)
    assert seen == [("ada", "mail", "job:ada:mail:second:r", "request-1", "correlation-1")]
    (row,) = await lab.rows("SELECT actor, max_attempts FROM onceward_dead_letters")
    assert (row["actor"], row["max_attempts"]) == ("job first", 2), "the handler's default"
    assert await lab.admin.jobs(tenant="eve") == [], "undone with the one that failed"


async def test_too_large_payload_of_an_enqueued_job_is_not_retried(lab: JobsLab) -> None:
    @lab.jobs.handler("first")
    async def first(job: JobContext) -> None:
        await job.enqueue("second", "x" * 2000)

    await lab.start_worker(max_payload_bytes=1000)
    job_id = await lab.enqueued("first")
    dead = await lab.until(job_id, "dead")
    assert dead.view.attempts == 1
    assert dead.error is not None
    assert dead.error.startswith("JobPayloadTooLargeError")


# -- concurrency and stopping -------------------------------------------------------------------


async def test_no_more_jobs_run_at_once_than_concurrency_allows(lab: JobsLab) -> None:
    now_running = most = 0

    @lab.jobs.handler("busy")
    async def busy(job: JobContext) -> None:
        nonlocal now_running, most
        now_running += 1
        most = max(most, now_running)
        await asyncio.sleep(0.03)
        now_running -= 1

    for n in range(12):
        await lab.enqueue("busy", n)
    await lab.start_worker(concurrency=3)
    await lab.until_idle()
    assert most == 3, "at most three, and three where there is enough to do"


async def test_jobs_of_one_queue_that_hang_do_not_delay_other_queues(lab: JobsLab) -> None:
    ended, began = asyncio.Event(), asyncio.Event()
    hanging = 0

    @lab.jobs.handler("hang", queue="receivers")
    async def hang(_job: JobContext) -> None:
        nonlocal hanging
        hanging += 1
        await ended.wait()

    @lab.jobs.handler("quick")
    async def quick(_job: JobContext) -> None:
        began.set()

    for n in range(20):
        await lab.enqueue("hang", n, queue="receivers")
    await lab.start_worker(concurrency=4)
    async with asyncio.timeout(5):
        while hanging < 3:
            await asyncio.sleep(0.01)
    await lab.enqueue("quick", 1)
    async with asyncio.timeout(3):
        await began.wait()
    assert hanging == 3
    ended.set()
    await lab.until_idle()
    assert hanging == 20


async def test_stop_finishes_running_jobs_and_fetches_no_more(lab: JobsLab) -> None:
    gate = Gate(lab)
    worker = await lab.start_worker(concurrency=2)
    running = await lab.enqueued("gated", 1)
    await gate.started.wait()
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0.05)
    waiting = await lab.enqueued("gated", 2)
    assert not stopping.done()
    gate.opened.set()
    await stopping
    assert await lab.state(running) == "done"
    assert await lab.state(waiting) == "waiting"
    assert lab.outcomes.all == ["done"]
    await worker.stop()


async def test_job_that_outlasts_shutdown_is_released_and_its_attempt_does_not_count(
    lab: JobsLab,
) -> None:
    gate = Gate(lab, writes_first=True)
    worker = await lab.start_worker(shutdown_seconds=0.1)
    job_id = await lab.enqueued("gated", resource_id="once")
    await gate.started.wait()
    await worker.stop()
    # On SQLite it may have been waiting to fetch more, and releases those as well.
    assert (set(lab.outcomes.all), gate.cancelled) == ({"given_back"}, 1)
    detail = await lab.job(job_id)
    assert (detail.view.state, detail.view.attempts) == ("waiting", 0)
    assert await lab.effects() == []
    gate.opened.set()
    await lab.start_worker()
    assert (await done(lab, job_id)).view.attempts == 1
    assert await lab.effects() == ["once"]


@pytest.mark.parametrize("way", ["swallows", "raises"])
async def test_job_is_released_although_its_handler_ignores_or_fails_cancellation(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    stubborn = Stubborn(lab, monkeypatch)
    started = asyncio.Event()

    @lab.jobs.handler("raises")
    async def raises(job: JobContext) -> None:
        await write_effect(job)
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise RuntimeError("how dare you") from None

    worker = await lab.start_worker(shutdown_seconds=0.1)
    job_id = await lab.enqueued("stubborn" if way == "swallows" else "raises")
    await (stubborn.started if way == "swallows" else started).wait()
    async with asyncio.timeout(5):
        await worker.stop()
    assert set(lab.outcomes.all) == {"given_back"}
    detail = await lab.job(job_id)
    assert (detail.view.state, detail.view.attempts, detail.failures) == ("waiting", 0, ())
    assert await lab.effects() == []
    stubborn.may_end.set()


async def test_a_stopped_worker_can_be_started_again(lab: JobsLab) -> None:
    add_effect(lab)
    worker = await lab.start_worker()
    await worker.stop()
    job_id = await lab.enqueued("effect")
    await asyncio.sleep(0.05)
    assert await lab.state(job_id) == "waiting"
    await worker.start()
    await done(lab, job_id)


async def test_errors_while_fetching_do_not_stop_the_worker(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_effect(lab)
    errors: list[Exception] = [StoreUnavailableError("away"), RuntimeError("odd")]
    claim = JobStore.claim

    async def failing(self: JobStore, *args: Any, **options: Any) -> list[LeasedJob]:
        if errors:
            raise errors.pop(0)
        return await claim(self, *args, **options)

    monkeypatch.setattr(JobStore, "claim", failing)
    monkeypatch.setattr("onceward.jobs.worker._ERROR_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, "onceward.jobs"):
        await lab.start_worker()
        await done(lab, await lab.enqueued("effect"))
    assert len([r for r in caplog.records if "cannot be fetched" in r.message]) == 2


async def test_errors_while_renewing_do_not_stop_renewals(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[Exception] = [RuntimeError("odd")]
    renew = JobStore.renew

    async def failing(self: JobStore, *args: Any, **options: Any) -> set[tuple[str, str]]:
        if errors:
            raise errors.pop(0)
        return await renew(self, *args, **options)

    monkeypatch.setattr(JobStore, "renew", failing)
    gate = Gate(lab)
    await lab.start_worker(lease_seconds=3)
    job_id = await lab.enqueued("gated")
    await gate.started.wait()
    await asyncio.sleep(3.6)
    gate.opened.set()
    assert (await done(lab, job_id)).view.attempts == 1
    assert errors == []


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"lease_seconds": 0}, {"poll_seconds": 0.5}, {"lease_seconds": -1}],
)
def test_worker_with_invalid_settings_is_refused(options: dict[str, Any]) -> None:
    class Named:
        name = "sqlite"

        def notifier(self) -> None:
            return

    with pytest.raises(ConfigurationError):
        Worker(Named(), JobRegistry(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"job_type": "a b"},
        {"queue": ""},
        {"time_limit_seconds": 0},
        {"max_attempts": 0},
        {"max_attempts": 1001},
    ],
)
def test_handler_with_invalid_settings_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"should be|must be"):
        JobRegistry().handler(options.pop("job_type", "effect"), **options)


def test_two_handlers_for_one_type_are_refused() -> None:
    jobs = JobRegistry()

    @jobs.handler("effect")
    async def one(job: JobContext) -> None:
        return

    with pytest.raises(ConfigurationError, match="already have a handler"):
        jobs.handler("effect")(one)
    assert [registration.job_type for registration in jobs] == ["effect"]
    assert len(jobs) == 1
