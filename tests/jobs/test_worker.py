"""The worker: one effect for one job, whatever is raised, lost, hung or delivered twice."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from holdfast.core.job import LeasedJob
from holdfast.core.retry import WORKER
from holdfast.errors import (
    ConfigurationError,
    NonRetryableError,
    NoTransactionError,
    RetryLaterError,
    StoreUnavailableError,
)
from holdfast.jobs import attempt
from holdfast.jobs.engines.sql import SqlEngine
from holdfast.jobs.registry import JobRegistry
from holdfast.jobs.run import JobRun
from holdfast.jobs.table import JobTable
from holdfast.jobs.worker import Worker
from holdfast.ports import Delivery
from tests.jobs.conftest import OpenStore
from tests.support.jobs_lab import JobsLab, eventually, write_effect


async def done(lab: JobsLab, job_id: str) -> Any:
    return await lab.until(job_id, "done")


def add_effect(lab: JobsLab, **options: Any) -> None:
    """Register a handler that has an effect, and no other."""

    @lab.jobs.handler("effect", **options)
    async def effect(job: JobRun) -> None:
        await write_effect(job)


class Gate:
    """A handler that stops at a gate: before its write, or behind it."""

    def __init__(self, lab: JobsLab, *, writes_first: bool = False, **options: Any) -> None:
        self.started = asyncio.Event()
        self.opened = asyncio.Event()
        self.runs = 0
        self.cancelled = 0

        @lab.jobs.handler("gated", **options)
        async def gated(job: JobRun) -> None:
            self.runs += 1
            if writes_first:
                await write_effect(job)
            self.started.set()
            try:
                await self.opened.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if not writes_first:
                await write_effect(job)


# -- what a handler gets and gives --------------------------------------------------------------


async def test_effect_and_marker_commit_together_with_the_result(lab: JobsLab) -> None:
    seen: list[JobRun] = []

    @lab.jobs.handler("effect", queue="mail")
    async def effect(job: JobRun) -> dict[str, Any]:
        seen.append(job)
        await write_effect(job)
        assert await lab.effects() == [], "nobody else sees it before the commit"
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
    assert abs((job.enqueued_at - await lab.table.now()).total_seconds()) < 10
    with pytest.raises(NoTransactionError):
        await job.transaction.execute("INSERT INTO effects (name) VALUES ('late')")


async def test_a_job_that_writes_nothing_holds_no_transaction_and_leaves_its_marker(
    lab: JobsLab,
) -> None:
    @lab.jobs.handler("quiet")
    async def quiet(job: JobRun) -> int:
        return 7

    await lab.start_worker()
    job_id = await lab.enqueued("quiet")
    assert (await done(lab, job_id)).result == 7


async def test_an_effect_is_undone_with_its_failed_attempt(lab: JobsLab) -> None:
    @lab.jobs.handler("effect")
    async def effect(job: JobRun) -> None:
        await write_effect(job, f"attempt {job.attempt}")
        await job.enqueue("follow", job.attempt)
        if job.attempt < 3:
            raise RuntimeError("not yet")

    @lab.jobs.handler("follow")
    async def follow(job: JobRun) -> None:
        await write_effect(job, f"follow {job.payload}")

    await lab.start_worker()
    await lab.enqueue("effect")
    await lab.until_idle(hurry=True)
    assert await lab.effects() == ["attempt 3", "follow 3"]


# -- one effect -------------------------------------------------------------------------------


class Repeating(SqlEngine):
    """A broker at its worst: whatever any worker takes, all of them are given five times."""

    everyone: ClassVar[list["Repeating"]] = []
    copies: ClassVar[int] = 5

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inbox: list[Delivery] = []
        self.given = 0
        self.everyone.append(self)

    async def take(self, limit: int, wait_seconds: float) -> Sequence[Delivery]:
        if not self.inbox:
            for delivery in await super().take(limit, wait_seconds):
                for engine in self.everyone:
                    engine.inbox += [delivery] * self.copies
                    engine.ring()
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
    async def effect(job: JobRun) -> None:
        runs.append(job.id)
        if writes:
            await write_effect(job)
        await asyncio.sleep(0.01)

    Repeating.everyone.clear()
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
    assert sum(engine.given for engine in Repeating.everyone) == 20
    assert len(runs) == 20, "every delivery was tried"
    ended_well = lab.outcomes.all.count("done")
    # Copies in one worker that wrote nothing may share the one statement that writes the marker.
    assert ended_well == 1 if writes or order else 1 <= ended_well <= Repeating.copies
    assert lab.outcomes.all.count("lease_lost") == 20 - ended_well
    assert await lab.effects() == (["one"] if writes else [])
    assert await lab.count("job_completions") == 1


async def test_a_job_shown_again_and_again_while_it_runs_has_one_effect(
    lab: JobsLab, another_store: OpenStore
) -> None:
    starts = 0

    @lab.jobs.handler("effect")
    async def effect(job: JobRun) -> None:
        nonlocal starts
        starts += 1
        while starts <= 5:  # nobody ends before something was delivered twice
            await asyncio.sleep(0.005)
        await write_effect(job)

    for _ in range(4):
        await lab.start_worker(await another_store())
    ids = [await lab.enqueued("effect", n, resource_id=f"{n}", max_attempts=1000) for n in range(5)]
    async with asyncio.timeout(30):
        while starts <= len(ids):
            await lab.show_in(-0.001, "state = 'running'")
            lab.ring()
            await asyncio.sleep(0.01)
    for _ in range(20):
        await lab.show_in(-0.001, "state = 'running'")
        lab.ring()
        await asyncio.sleep(0.01)
    await lab.until_idle()
    assert sorted(await lab.effects()) == [f"{n}" for n in range(5)]
    assert {await lab.state(job_id) for job_id in ids} == {"done"}


async def test_a_key_that_is_done_is_acknowledged_without_running(lab: JobsLab) -> None:
    """The lost race of an enqueue with a completion: the job is there, and so is its marker."""
    if lab.store.name == "sqlite":
        pytest.skip("one writer at a time: a job and its marker never stand side by side")
    runs: list[str] = []

    @lab.jobs.handler("effect")
    async def effect(job: JobRun) -> None:
        runs.append(job.id)

    await lab.start_worker()
    job_id = await lab.enqueued("effect", resource_id="1")
    await done(lab, job_id)
    row = "tenant, key, queue, type, payload_hash, request_id, correlation_id"
    await lab.store.write(
        f"INSERT INTO jobs ({row}, id, payload, visible_at, run_at, max_attempts, actor)"
        f" SELECT {row}, job_id, 'null', now(), now(), 5, 'ada' FROM job_completions"
    )
    lab.ring()
    await lab.until_idle()
    assert runs == [job_id]
    assert lab.outcomes.all == ["done", "duplicate"]


# -- leases -----------------------------------------------------------------------------------


async def test_a_lease_is_renewed_before_half_of_it_is_gone(lab: JobsLab) -> None:
    lease_seconds = 2.0
    gate = Gate(lab)
    await lab.start_worker(lease_seconds=lease_seconds)
    job_id = await lab.enqueued("gated")
    await gate.started.wait()
    ends: set[float] = set()
    left: list[float] = []
    loop = asyncio.get_running_loop()
    until = loop.time() + 1.4
    while loop.time() < until:
        now = await lab.table.now()
        due_at = (await lab.job(job_id)).view.due_at
        assert due_at is not None
        ends.add(due_at.timestamp())
        left.append((due_at - now).total_seconds())
        await asyncio.sleep(0.02)
    gate.opened.set()
    await done(lab, job_id)
    assert len(ends) >= 3, "renewed twice at least"
    assert min(left) > lease_seconds / 2
    assert max(left) <= lease_seconds


@pytest.mark.parametrize("writes_first", [True, False])
async def test_a_handler_that_takes_longer_than_its_lease_succeeds_at_the_first_attempt(
    lab: JobsLab, another_store: OpenStore, *, writes_first: bool
) -> None:
    """On SQLite, one that has written keeps everyone from writing: it renews its lease itself."""
    gate = Gate(lab, writes_first=writes_first)
    for _ in range(2):
        await lab.start_worker(await another_store(), lease_seconds=0.8)
    job_id = await lab.enqueued("gated", resource_id="slow")
    await gate.started.wait()
    await asyncio.sleep(1.2)
    gate.opened.set()
    detail = await done(lab, job_id)
    assert (detail.view.attempts, gate.runs) == (1, 1)
    assert await lab.effects() == ["slow"]


async def test_who_holds_the_write_turn_of_sqlite_for_long_costs_nobody_the_lease(
    lab: JobsLab,
) -> None:
    """On PostgreSQL nobody holds one, and it must work there too."""
    writing = Gate(lab, writes_first=True)
    thinking = asyncio.Event()

    @lab.jobs.handler("thinks")
    async def thinks(job: JobRun) -> None:
        thinking.set()
        await writing.opened.wait()
        await write_effect(job, "thought")

    await lab.start_worker(lease_seconds=0.8)
    quiet = await lab.enqueued("thinks")
    await thinking.wait()
    slow = await lab.enqueued("gated", resource_id="slow")
    await writing.started.wait()
    await asyncio.sleep(1.2)
    writing.opened.set()
    for job_id in (slow, quiet):
        assert (await done(lab, job_id)).view.attempts == 1
    assert sorted(await lab.effects()) == ["slow", "thought"]


async def test_as_many_long_transactions_as_the_store_has_connections_keep_their_leases(
    lab: JobsLab,
) -> None:
    """Renewals and endings must not wait for what the handlers hold."""
    if lab.store.name == "sqlite":
        pytest.skip("one writer at a time: there is no second transaction")
    gate = asyncio.Event()
    started = 0

    @lab.jobs.handler("long")
    async def long(job: JobRun) -> None:
        nonlocal started
        await write_effect(job)
        started += 1
        await gate.wait()

    for n in range(16):
        await lab.enqueue("long", n)
    await lab.start_worker(lease_seconds=0.8, concurrency=16)

    async def as_many_as_there_is_room_for() -> bool:
        return started >= 8

    await eventually(as_many_as_there_is_room_for)
    await asyncio.sleep(1.4)
    gate.set()
    await lab.until_idle()
    assert set(lab.outcomes.all) == {"done"}
    assert await lab.count("effects") == 16


async def test_a_lost_lease_ends_the_handler_and_nothing_of_it_commits(lab: JobsLab) -> None:
    """It finds out at the next renewal, long before it would have finished."""
    gate = Gate(lab, writes_first=lab.store.name != "sqlite")
    await lab.start_worker(lease_seconds=1, concurrency=1)
    job_id = await lab.enqueued("gated", max_attempts=9)
    await gate.started.wait()
    gate.started.clear()
    await lab.steal()

    async def was_told() -> bool:
        return lab.outcomes.all == ["lease_lost"]

    await eventually(was_told, seconds=5)
    assert gate.cancelled == 1
    assert await lab.effects() == []
    assert await lab.state(job_id) == "running", "whoever has it now ends it"
    gate.opened.set()
    detail = await done(lab, job_id)
    assert (detail.view.attempts, await lab.count("effects")) == (2, 1)


@pytest.mark.parametrize("loss", ["stolen", "ran out"])
@pytest.mark.parametrize("writes", [True, False])
@pytest.mark.parametrize("order", [None, "line"])
async def test_a_handler_that_finishes_after_its_lease_was_lost_cannot_commit(
    lab: JobsLab, loss: str, order: str | None, *, writes: bool
) -> None:
    """Also when nobody else has taken the job: an expired lease is a lost one."""
    attempts: list[int] = []

    @lab.jobs.handler("effect")
    async def effect(job: JobRun) -> None:
        attempts.append(job.attempt)
        if job.attempt == 1:
            await (lab.steal() if loss == "stolen" else lab.show_in(-0.001))
        if writes:
            await write_effect(job, f"attempt {job.attempt}")

    await lab.start_worker(concurrency=1)
    job_id = await lab.enqueued("effect", order=order)

    async def was_lost() -> bool:
        return "lease_lost" in lab.outcomes.all

    await eventually(was_lost)
    if loss == "stolen":  # whoever has it is never heard of again
        await lab.show_in(-0.001)
    lab.ring()
    detail = await done(lab, job_id)
    assert attempts == [1, 2]
    assert detail.view.attempts == 2
    assert await lab.effects() == (["attempt 2"] if writes else [])


async def test_of_markers_written_together_a_lost_one_harms_no_other(lab: JobsLab) -> None:
    gate = asyncio.Event()
    stolen: list[str] = []

    @lab.jobs.handler("quiet")
    async def quiet(job: JobRun) -> str:
        if job.payload == 3 and not stolen:
            stolen.append(job.id)
        await gate.wait()
        return job.id

    completed: list[int] = []
    worker = await lab.start_worker(concurrency=20)
    complete = worker.table.complete_alone

    async def counted(results: Any, *, worker: str) -> set[tuple[str, str]]:
        batch = list(results)
        completed.append(len(batch))
        return await complete(batch, worker=worker)

    worker.table.complete_alone = counted  # type: ignore[method-assign]
    ids = [await lab.enqueued("quiet", n) for n in range(20)]

    async def all_run() -> bool:
        return worker.running == 20

    await eventually(all_run)
    await lab.store.write("UPDATE jobs SET lease = lease + 1 WHERE payload = '3'")
    gate.set()
    for job_id in ids:
        if job_id != stolen[0]:
            assert (await done(lab, job_id)).result == job_id
    assert await lab.state(stolen[0]) == "running"
    assert max(completed) > 10, "they share the commit of their markers"
    await lab.show_in(-0.001)
    lab.ring()
    await done(lab, stolen[0])
    await lab.quiet()
    assert sorted(lab.outcomes.all) == ["done"] * 20 + ["lease_lost"]


async def test_a_store_that_fails_one_batch_of_markers_loses_no_job(lab: JobsLab) -> None:
    @lab.jobs.handler("quiet")
    async def quiet(job: JobRun) -> None:
        return

    worker = await lab.start_worker(lease_seconds=1)
    complete = worker.table.complete_alone
    failed: list[int] = []

    async def failing(results: Any, *, worker: str) -> set[tuple[str, str]]:
        if not failed:
            failed.append(len(list(results)))
            raise StoreUnavailableError("away")
        return await complete(results, worker=worker)

    worker.table.complete_alone = failing  # type: ignore[method-assign]
    for n in range(5):
        await lab.enqueue("quiet", n)
    await lab.until_idle()
    assert lab.outcomes.all.count("unknown") == failed[0]
    assert lab.outcomes.all.count("done") == 5


# -- failures ---------------------------------------------------------------------------------


async def test_a_poison_job_is_tried_five_times_with_the_delays_of_the_preset_and_then_dead(
    lab: JobsLab,
) -> None:
    last: list[bool] = []

    @lab.jobs.handler("poison")
    async def poison(job: JobRun) -> None:
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
    async def busy(job: JobRun) -> None:
        raise RetryLaterError("come back", after_seconds=floor)

    await lab.start_worker()
    job_id = await lab.enqueued("busy")
    detail = await lab.until_failed(job_id, 1)
    assert detail.view.due_at is not None
    delay = (detail.view.due_at - detail.failures[0].failed_at).total_seconds()
    assert least - 0.01 <= delay <= most
    assert (detail.view.attempts, detail.failures[0].reason) == (1, "retry_later")


@pytest.mark.parametrize("error", [NonRetryableError("never"), LookupError("never")])
async def test_what_cannot_succeed_is_dead_at_once(lab: JobsLab, error: Exception) -> None:
    @lab.jobs.handler("hopeless", never_retry=(LookupError,))
    async def hopeless(job: JobRun) -> None:
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
async def test_a_handler_that_returns_garbage_is_dead_with_the_reason_and_without_effect(
    lab: JobsLab, garbage: Any
) -> None:
    @lab.jobs.handler("garbage")
    async def returns(job: JobRun) -> Any:
        await write_effect(job)
        return garbage

    await lab.start_worker()
    job_id = await lab.enqueued("garbage")
    dead = await lab.until(job_id, "dead")
    assert (dead.view.attempts, dead.view.reason) == (1, "non_retryable")
    assert dead.error is not None
    assert "the handler of garbage returned" in dead.error
    assert await lab.effects() == []


async def test_an_unknown_type_is_dead_with_the_reason(lab: JobsLab) -> None:
    add_effect(lab)
    await lab.start_worker()
    job_id = await lab.enqueued("unheard.of", queue="default")
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.error) == (
        "unknown_type",
        "no handler for jobs of type unheard.of",
    )


async def test_a_payload_above_the_workers_limit_is_dead_with_the_reason(lab: JobsLab) -> None:
    add_effect(lab)
    await lab.start_worker(max_payload_bytes=100)
    job_id = await lab.enqueued("effect", "x" * 200)
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.error) == (
        "payload_too_large",
        "the payload has more than 100 bytes",
    )
    assert await lab.effects() == []


async def test_a_job_that_has_killed_five_workers_is_dead_with_the_reason(lab: JobsLab) -> None:
    add_effect(lab)
    job_id = await lab.enqueued("effect")
    for n in range(5):
        assert (await lab.claim_one(f"doomed {n}")).attempt == n + 1
        await lab.show_in(-0.001)
    await lab.start_worker()
    dead = await lab.until(job_id, "dead")
    assert (dead.view.reason, dead.view.attempts) == ("worker_lost", 5)
    assert await lab.effects() == []
    assert await lab.desk.requeue(job_id, tenant="ada", actor="grace")
    lab.ring()
    assert (await done(lab, job_id)).view.attempts == 1
    assert await lab.count("effects") == 1


async def test_errors_with_any_text_reach_the_operator(lab: JobsLab) -> None:
    @lab.jobs.handler("odd")
    async def odd(job: JobRun) -> None:
        raise NonRetryableError(f"a\x00b 🐚 {'x' * 5000}")

    @lab.jobs.handler("silent")
    async def silent(job: JobRun) -> None:
        raise NonRetryableError

    await lab.start_worker()
    ids = [await lab.enqueued("odd"), await lab.enqueued("silent")]
    error = (await lab.until(ids[0], "dead")).error
    assert error is not None
    assert error.startswith("NonRetryableError: a\\x00b 🐚 xxx")
    assert len(error) == 2000
    assert (await lab.until(ids[1], "dead")).error == "NonRetryableError"


async def test_a_handler_that_catches_what_its_statement_raised_does_not_commit_half(
    lab: JobsLab,
) -> None:
    """PostgreSQL spoils the transaction; SQLite goes on, and so may the handler."""

    @lab.jobs.handler("careless")
    async def careless(job: JobRun) -> None:
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
async def test_a_handler_past_its_time_limit_is_cancelled_and_its_effect_undone(
    lab: JobsLab, retried_at: str
) -> None:
    @lab.jobs.handler("hangs", time_limit_seconds=0.1, max_attempts=1)
    async def hangs(job: JobRun) -> None:
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


class Stubborn:
    """A handler that does not end when it is cancelled."""

    def __init__(self, lab: JobsLab, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        monkeypatch.setattr(attempt, "_CANCEL_SECONDS", 0.1)
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        asyncio.get_running_loop().call_later(10, self.let_go.set)  # or a failed test never ends
        self.after: list[str] = []

        @lab.jobs.handler("stubborn", **options)
        async def stubborn(job: JobRun) -> None:
            if job.attempt > 1 or self.let_go.is_set():
                await write_effect(job, "second")
                return
            tx = await job.begin()
            await write_effect(job, "first")
            self.started.set()
            while not self.let_go.is_set():
                try:
                    await self.let_go.wait()
                except asyncio.CancelledError:
                    continue
            for write in (write_effect(job, "late"), tx.execute("DELETE FROM effects")):
                try:
                    await write
                except NoTransactionError:
                    self.after.append("refused")
            try:
                await job.step("late", lambda _key: asyncio.sleep(0))
            except NoTransactionError:
                self.after.append("refused")


async def test_a_handler_that_swallows_its_cancellation_is_left_behind_and_cannot_write(
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
    stubborn.let_go.set()

    async def refused() -> bool:
        return stubborn.after == ["refused"] * 3

    await eventually(refused)
    assert await lab.effects() == ["second"]


async def test_a_handler_that_swallows_the_loss_of_its_lease_does_not_keep_its_place(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = Stubborn(lab, monkeypatch)
    if lab.store.name == "sqlite":
        pytest.skip("it has written, so nobody can take its lease before it ends")
    await lab.start_worker(concurrency=1, lease_seconds=1)
    job_id = await lab.enqueued("stubborn")
    await stubborn.started.wait()
    await lab.steal()
    await lab.show_in(0.5)
    await done(lab, job_id)
    await lab.quiet()
    assert lab.outcomes.all == ["lease_lost", "done"]
    assert await lab.effects() == ["second"]
    stubborn.let_go.set()


async def test_a_handler_cancelled_from_inside_has_failed_like_any_other(lab: JobsLab) -> None:
    @lab.jobs.handler("confused")
    async def confused(job: JobRun) -> None:
        raise asyncio.CancelledError

    await lab.start_worker()
    job_id = await lab.enqueued("confused")
    detail = await lab.until_failed(job_id, 1)
    assert detail.failures[0].error == "the handler was cancelled"
    await lab.quiet()


async def test_handlers_that_are_no_coroutines_are_told_apart_from_the_worker(
    lab: JobsLab,
) -> None:
    @lab.jobs.handler("plain", max_attempts=1)
    def plain(job: JobRun) -> Any:
        return None

    await lab.start_worker()
    job_id = await lab.enqueued("plain", max_attempts=1)
    dead = await lab.until(job_id, "dead")
    assert dead.error is not None
    assert dead.error.startswith("TypeError")


# -- jobs that make jobs ------------------------------------------------------------------------


async def test_ids_and_tenant_go_along_to_the_jobs_a_job_enqueues(lab: JobsLab) -> None:
    seen: list[tuple[str, ...]] = []

    @lab.jobs.handler("first")
    async def first(job: JobRun) -> None:
        await job.enqueue("second", {"n": 2}, resource_id="r", queue=None)

    @lab.jobs.handler("second", queue="mail", max_attempts=2)
    async def second(job: JobRun) -> None:
        seen.append((job.tenant, job.queue, job.key, job.request_id, job.correlation_id))
        assert job.payload == {"n": 2}
        await job.enqueue("third", tenant="eve")
        raise NonRetryableError("enough")

    await lab.start_worker()
    await lab.enqueue("first")

    async def dead() -> bool:
        return await lab.count("dead_letters") == 1

    await eventually(dead)
    assert seen == [("ada", "mail", "job:ada:mail:second:r", "request-1", "correlation-1")]
    (row,) = await lab.rows("SELECT actor, max_attempts FROM dead_letters")
    assert (row["actor"], row["max_attempts"]) == ("job first", 2), "as its handler wants it"
    assert await lab.desk.jobs(tenant="eve") == [], "undone with the one that failed"


async def test_a_payload_too_large_for_another_job_is_not_tried_five_times(lab: JobsLab) -> None:
    @lab.jobs.handler("first")
    async def first(job: JobRun) -> None:
        await job.enqueue("second", "x" * 2000)

    await lab.start_worker(max_payload_bytes=1000)
    job_id = await lab.enqueued("first")
    dead = await lab.until(job_id, "dead")
    assert dead.view.attempts == 1
    assert dead.error is not None
    assert dead.error.startswith("JobPayloadTooLargeError")


# -- concurrency and stopping -------------------------------------------------------------------


async def test_no_more_jobs_run_at_once_than_there_is_room_for(lab: JobsLab) -> None:
    now_running = most = 0

    @lab.jobs.handler("busy")
    async def busy(job: JobRun) -> None:
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


async def test_stopping_finishes_what_runs_and_takes_nothing_more(lab: JobsLab) -> None:
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


async def test_what_does_not_end_in_time_is_given_back_and_the_attempt_does_not_count(
    lab: JobsLab,
) -> None:
    gate = Gate(lab, writes_first=True)
    worker = await lab.start_worker(shutdown_seconds=0.1)
    job_id = await lab.enqueued("gated", resource_id="once")
    await gate.started.wait()
    await worker.stop()
    # On SQLite it may just have been waiting to take more, and gives that back as well.
    assert (set(lab.outcomes.all), gate.cancelled) == ({"given_back"}, 1)
    detail = await lab.job(job_id)
    assert (detail.view.state, detail.view.attempts) == ("waiting", 0)
    assert await lab.effects() == []
    gate.opened.set()
    await lab.start_worker()
    assert (await done(lab, job_id)).view.attempts == 1
    assert await lab.effects() == ["once"]


@pytest.mark.parametrize("way", ["swallows", "raises"])
async def test_a_handler_that_is_difficult_when_told_to_stop_is_given_back_all_the_same(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    stubborn = Stubborn(lab, monkeypatch)
    started = asyncio.Event()

    @lab.jobs.handler("raises")
    async def raises(job: JobRun) -> None:
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
    stubborn.let_go.set()


async def test_a_stopped_worker_can_be_started_again(lab: JobsLab) -> None:
    add_effect(lab)
    worker = await lab.start_worker()
    await worker.stop()
    job_id = await lab.enqueued("effect")
    await asyncio.sleep(0.05)
    assert await lab.state(job_id) == "waiting"
    await worker.start()
    await done(lab, job_id)


async def test_trouble_with_taking_ends_no_worker(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_effect(lab)
    troubles: list[Exception] = [StoreUnavailableError("away"), RuntimeError("odd")]
    claim = JobTable.claim

    async def troubled(self: JobTable, *args: Any, **options: Any) -> list[LeasedJob]:
        if troubles:
            raise troubles.pop(0)
        return await claim(self, *args, **options)

    monkeypatch.setattr(JobTable, "claim", troubled)
    monkeypatch.setattr("holdfast.jobs.worker._TROUBLE_SECONDS", 0.01)
    with caplog.at_level(logging.WARNING, "holdfast.jobs"):
        await lab.start_worker()
        await done(lab, await lab.enqueued("effect"))
    assert len([r for r in caplog.records if "cannot be taken" in r.message]) == 2


async def test_trouble_with_renewing_ends_no_renewals(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[Exception] = [RuntimeError("odd")]
    renew = JobTable.renew

    async def troubled(self: JobTable, *args: Any, **options: Any) -> set[tuple[str, str]]:
        if troubles:
            raise troubles.pop(0)
        return await renew(self, *args, **options)

    monkeypatch.setattr(JobTable, "renew", troubled)
    gate = Gate(lab)
    await lab.start_worker(lease_seconds=0.9)
    job_id = await lab.enqueued("gated")
    await gate.started.wait()
    await asyncio.sleep(1.2)
    gate.opened.set()
    assert (await done(lab, job_id)).view.attempts == 1
    assert troubles == []


@pytest.mark.parametrize(
    "options",
    [{"concurrency": 0}, {"lease_seconds": 0}, {"poll_seconds": 0.5}, {"lease_seconds": -1}],
)
def test_a_worker_with_senseless_settings_is_refused(options: dict[str, Any]) -> None:
    class Named:
        name = "sqlite"

        def bell(self) -> None:
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
    ],
)
def test_a_handler_with_senseless_settings_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"should be|should have"):
        JobRegistry().handler(options.pop("job_type", "effect"), **options)


def test_two_handlers_for_one_type_are_refused() -> None:
    jobs = JobRegistry()

    @jobs.handler("effect")
    async def one(job: JobRun) -> None:
        return

    with pytest.raises(ConfigurationError, match="two handlers"):
        jobs.handler("effect")(one)
    assert [registration.job_type for registration in jobs] == ["effect"]
    assert len(jobs) == 1
