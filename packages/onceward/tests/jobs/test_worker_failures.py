"""What fails: tried again with delays, dead with a reason, and never half an effect."""

import asyncio
import logging
from typing import Any

import pytest

from onceward.errors import NonRetryableError, RetryLaterError
from onceward.jobs.context import JobContext
from onceward.observability.logs import JsonFormatter
from onceward_protocol.retry import WORKER
from packages.onceward.tests.jobs.handlers import Stubborn, add_effect, done
from packages.onceward.tests.support.jobs_harness import JobsLab, eventually, write_effect


async def test_failing_job_is_tried_five_times_with_the_preset_delays_and_dead_lettered(
    lab: JobsLab,
) -> None:
    last: list[bool] = []

    @lab.jobs.handler("poison")
    async def poison(job: JobContext) -> None:
        last.append(job.is_last_attempt)
        await write_effect(job)
        raise RuntimeError(f"no\nuse {job.attempt}")

    await lab.start_worker()
    job_id = await lab.enqueued("poison", {"n": 1}, resource_id="r")
    for n in range(1, 5):
        detail = await lab.until_failed(job_id, n)
        assert (detail.view.state, detail.view.attempts, detail.view.worker) == ("waiting", n, None)
        assert detail.view.due_at is not None
        delay = (detail.view.due_at - detail.failures[-1].failed_at).total_seconds()
        assert WORKER.delay_seconds(n, random=0) - 0.01 <= delay
        assert delay <= WORKER.delay_seconds(n, random=1) + 0.01
        await lab.hurry()
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.error) == ("error", "RuntimeError: no use 5")
    assert (dead.view.attempts, dead.payload) == (5, {"n": 1})
    assert [(f.attempt, f.error) for f in dead.failures] == [
        (n, f"RuntimeError: no use {n}") for n in range(1, 6)
    ]
    assert last == [False] * 4 + [True]
    assert await lab.effects() == []
    await lab.quiet()
    assert lab.outcomes.all == ["retried"] * 4 + ["dead"]


@pytest.mark.parametrize(
    ("floor", "least", "most"), [(30.0, 30.0, 30.1), (0.1, 1.0, 1.6), (float("inf"), 2e9, 3e9)]
)
async def test_retry_later_is_a_floor_and_counts_as_an_attempt(
    lab: JobsLab, floor: float, least: float, most: float
) -> None:
    @lab.jobs.handler("busy")
    async def busy(job: JobContext) -> None:
        raise RetryLaterError("come back", after_seconds=floor)

    await lab.start_worker()
    job_id = await lab.enqueued("busy")
    detail = await lab.until_failed(job_id, 1)
    assert detail.view.due_at is not None
    delay = (detail.view.due_at - detail.failures[0].failed_at).total_seconds()
    assert least - 0.01 <= delay <= most
    assert (detail.view.attempts, detail.failures[0].reason) == (1, "retry_later")


@pytest.mark.parametrize("error", [NonRetryableError("never"), LookupError("never")])
async def test_non_retryable_error_dead_letters_at_once(lab: JobsLab, error: Exception) -> None:
    @lab.jobs.handler("hopeless", never_retry=(LookupError,))
    async def hopeless(job: JobContext) -> None:
        await write_effect(job)
        raise error

    await lab.start_worker()
    job_id = await lab.enqueued("hopeless")
    dead = await lab.until(job_id, "dead")
    assert (dead.view.attempts, dead.view.reason) == (1, "non_retryable")
    assert dead.error == f"{type(error).__name__}: never"
    assert len(dead.failures) == 1
    assert await lab.effects() == []


@pytest.mark.parametrize(
    "garbage",
    [
        object(),
        float("nan"),
        {"a": float("inf")},
        b"\xff".join,
        "x" * 70_000,
        {1: "a", "1": object},
    ],
    ids=["object", "nan", "inf", "function", "too large", "nested"],
)
async def test_result_that_is_not_json_dead_letters_the_job_without_effect(
    lab: JobsLab, garbage: Any
) -> None:
    @lab.jobs.handler("garbage")
    async def returns(job: JobContext) -> Any:
        await write_effect(job)
        return garbage

    await lab.start_worker()
    job_id = await lab.enqueued("garbage")
    dead = await lab.until(job_id, "dead")
    assert (dead.view.attempts, dead.view.reason) == (1, "non_retryable")
    assert dead.error is not None
    assert "the handler of garbage returned" in dead.error
    assert await lab.effects() == []


async def test_unknown_type_is_dead_lettered_with_the_reason(lab: JobsLab) -> None:
    add_effect(lab)
    await lab.start_worker()
    job_id = await lab.enqueued("unheard.of", queue="default")
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.error) == (
        "unknown_type",
        "no handler for jobs of type unheard.of",
    )


async def test_payload_above_the_workers_limit_is_dead_lettered_with_the_reason(
    lab: JobsLab,
) -> None:
    add_effect(lab)
    await lab.start_worker(max_payload_bytes=100)
    job_id = await lab.enqueued("effect", "x" * 200)
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.error) == (
        "payload_too_large",
        "the payload has more than 100 bytes",
    )
    assert await lab.effects() == []


async def test_job_that_killed_five_workers_is_dead_lettered_with_the_reason(lab: JobsLab) -> None:
    add_effect(lab)
    job_id = await lab.enqueued("effect")
    for n in range(5):
        assert (await lab.claim_one(f"doomed {n}")).attempt == n + 1
        await lab.show_in(-0.001)
    await lab.start_worker()
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.view.attempts) == ("worker_lost", 5)
    assert [(f.attempt, f.reason, f.worker) for f in dead.failures] == [
        (n + 1, "worker_lost", f"doomed {n}") for n in range(5)
    ]
    assert await lab.effects() == []
    assert await lab.admin.requeue(job_id, tenant="ada", actor="grace")
    lab.notify()
    assert (await done(lab, job_id)).view.attempts == 1
    assert await lab.count("effects") == 1


async def test_lost_attempt_is_listed_with_its_worker_before_failed_ones(
    lab: JobsLab,
) -> None:
    @lab.jobs.handler("sick")
    async def sick(job: JobContext) -> None:
        raise RuntimeError("no use")

    job_id = await lab.enqueued("sick")
    await lab.claim_one("doomed")
    await lab.show_in(-0.001)
    before = await lab.job_store.now()
    worker = await lab.start_worker()
    detail = await lab.until_failed(job_id, 2)
    assert [(f.attempt, f.reason, f.worker) for f in detail.failures] == [
        (1, "worker_lost", "doomed"),
        (2, "error", worker.name),
    ]
    assert abs((detail.failures[0].failed_at - before).total_seconds()) < 10


async def test_worker_that_dies_before_dead_lettering_adds_no_attempt(lab: JobsLab) -> None:
    add_effect(lab)
    job_id = await lab.enqueued("effect", max_attempts=1)
    for name in ("doomed", "grave digger", "another"):
        await lab.claim_one(name)
        await lab.show_in(-0.001)
    await lab.start_worker()
    dead = await lab.until(job_id, "dead")
    assert [(f.attempt, f.worker) for f in dead.failures] == [(1, "doomed")]


async def test_released_job_has_no_lost_attempt(lab: JobsLab) -> None:
    job_id = await lab.enqueued("effect")
    await lab.job_store.release(await lab.claim_one("polite"), worker="polite")
    (job,) = await lab.job_store.claim_these([("ada", job_id)], worker="named", lease_seconds=30)
    assert job.attempt == 1
    await lab.show_in(-0.001)
    await lab.job_store.claim_these([("ada", job_id)], worker="next", lease_seconds=30)
    detail = await lab.job(job_id)
    assert [(f.attempt, f.worker) for f in detail.failures] == [(1, "named")]


async def test_error_texts_of_any_content_are_recorded(lab: JobsLab) -> None:
    @lab.jobs.handler("odd")
    async def odd(job: JobContext) -> None:
        raise NonRetryableError(f"a\x00b 🐚 {'x' * 5000}")

    @lab.jobs.handler("silent")
    async def silent(job: JobContext) -> None:
        raise NonRetryableError

    await lab.start_worker()
    ids = [await lab.enqueued("odd"), await lab.enqueued("silent")]
    error = (await lab.until(ids[0], "dead")).error
    assert error is not None
    assert error.startswith("NonRetryableError: a\\x00b 🐚 xxx")
    assert len(error) == 2000
    assert (await lab.until(ids[1], "dead")).error == "NonRetryableError"


async def test_handler_that_swallows_a_statement_error_commits_nothing(
    lab: JobsLab,
) -> None:
    """PostgreSQL aborts the transaction; on SQLite the handler may continue."""

    @lab.jobs.handler("careless")
    async def careless(job: JobContext) -> None:
        await write_effect(job, f"attempt {job.attempt}")
        if job.attempt == 1:
            try:
                await job.transaction.execute("INSERT INTO nowhere (name) VALUES ('x')")
            except Exception:  # noqa: BLE001
                return

    await lab.start_worker(lease_seconds=1)
    job_id = await lab.enqueued("careless")
    await lab.until_idle(hurry=True)
    assert await lab.state(job_id) == "done"
    assert len(await lab.effects()) == 1


@pytest.mark.parametrize("retried_at", ["once", "last"])
async def test_handler_past_its_time_limit_is_cancelled_and_rolled_back(
    lab: JobsLab, retried_at: str
) -> None:
    @lab.jobs.handler("hangs", time_limit_seconds=0.1, max_attempts=1)
    async def hangs(job: JobContext) -> None:
        await write_effect(job)
        await asyncio.sleep(60)

    await lab.start_worker()
    attempts = 5 if retried_at == "once" else 1
    job_id = await lab.enqueued("hangs", max_attempts=attempts)
    detail = await lab.until_failed(job_id, 1)
    assert detail.view.state == ("waiting" if retried_at == "once" else "dead")
    assert detail.failures[0].reason == "time_limit"
    assert detail.failures[0].error == "the handler took longer than 0.1 seconds"
    assert await lab.effects() == []


async def test_handler_that_ignores_cancellation_is_abandoned_and_cannot_write(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = Stubborn(lab, monkeypatch, time_limit_seconds=0.1)
    await lab.start_worker(concurrency=1)
    job_id = await lab.enqueued("stubborn")
    detail = await lab.until_failed(job_id, 1)
    assert detail.failures[0].reason == "time_limit"
    await lab.hurry()
    await done(lab, job_id)
    await lab.quiet()
    assert await lab.effects() == ["second"]
    stubborn.may_end.set()

    async def refused() -> bool:
        return stubborn.after == ["refused"] * 3

    await eventually(refused)
    assert await lab.effects() == ["second"]


async def test_handler_that_ignores_a_lost_lease_keeps_no_slot(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = Stubborn(lab, monkeypatch)
    if lab.store.name == "sqlite":
        pytest.skip("it has written, so no other worker can take its lease before it ends")
    await lab.start_worker(concurrency=1, lease_seconds=1)
    job_id = await lab.enqueued("stubborn")
    await stubborn.started.wait()
    await lab.steal()
    await lab.show_in(0.5)
    await done(lab, job_id)
    await lab.quiet()
    assert lab.outcomes.all == ["lease_lost", "done"]
    assert await lab.effects() == ["second"]
    stubborn.may_end.set()


async def test_handler_that_cancels_itself_fails_like_any_other(lab: JobsLab) -> None:
    @lab.jobs.handler("confused")
    async def confused(job: JobContext) -> None:
        raise asyncio.CancelledError

    await lab.start_worker()
    job_id = await lab.enqueued("confused")
    detail = await lab.until_failed(job_id, 1)
    assert detail.failures[0].error == "the handler was cancelled"
    await lab.quiet()


async def test_failed_attempt_is_logged_as_error_with_its_job_and_traceback(
    effect_lab: JobsLab, caplog: pytest.LogCaptureFixture
) -> None:
    lab = effect_lab

    @lab.jobs.handler("sick", time_limit_seconds=0.05)
    async def sick(job: JobContext) -> None:
        if job.attempt == 1:
            raise ValueError("no such parcel")
        if job.attempt == 2:
            await asyncio.sleep(30)
        raise NonRetryableError("never again")

    caplog.set_level(logging.INFO, "onceward.jobs")
    await lab.start_worker()
    job_id = await lab.enqueued("sick", max_attempts=3)
    await lab.until_idle(hurry=True)
    logged = [record for record in caplog.records if hasattr(record, "job_id")]
    assert [record.levelname for record in logged] == ["ERROR"] * 3
    lines = [record.getMessage().partition(f": sick {job_id}, ") for record in logged]
    assert [(event, rest) for event, _, rest in lines] == [
        ("job failed, to be retried", "attempt 1 of 3, tenant ada: ValueError: no such parcel"),
        (
            "job failed, to be retried",
            "attempt 2 of 3, tenant ada: the handler took longer than 0.05 seconds",
        ),
        ("job given up", "attempt 3 of 3, tenant ada: NonRetryableError: never again"),
    ]
    fields = [vars(record) for record in logged]
    assert [(f["job_id"], f["job_type"], f["tenant"], f["attempt"]) for f in fields] == [
        (job_id, "sick", "ada", attempt) for attempt in (1, 2, 3)
    ]
    assert [f["reason"] for f in fields] == ["error", "time_limit", "non_retryable"]
    tracebacks = [JsonFormatter().format(record) for record in logged]
    for line, text in zip(
        tracebacks,
        ("raise ValueError", "await asyncio.sleep(30)", "raise NonRetryableError"),
        strict=True,
    ):
        assert text in line, "the traceback ends in the handler"


async def test_attempt_that_asks_for_a_later_one_is_logged_as_warning(
    lab: JobsLab, caplog: pytest.LogCaptureFixture
) -> None:
    @lab.jobs.handler("busy")
    async def busy(job: JobContext) -> None:
        raise RetryLaterError("full", after_seconds=60)

    await lab.start_worker()
    await lab.until_failed(await lab.enqueued("busy"), 1)
    await lab.quiet()
    assert [r.levelname for r in caplog.records if r.name == "onceward.jobs"] == ["WARNING"]
