"""Handlers that are plain functions run in a thread; what cannot be a handler is refused."""

import asyncio
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from onceward import SINGLE_TENANT, GuardConfig, JobContext, Onceward
from onceward.errors import ConfigurationError, NoTransactionError
from onceward.jobs import executor
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.registry import JobRegistry
from onceward.jobs.sync_handler import SyncJobContext
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore
from packages.onceward.tests.support.jobs_harness import JobsLab, write_effect

INSERT = "INSERT INTO effects (name) VALUES (:name)"


def write(job: SyncJobContext, note: str = "") -> None:
    assert job.transaction.execute(INSERT, {"name": note}) == 1


async def test_plain_function_writes_steps_and_enqueues_without_await(lab: JobsLab) -> None:
    charged: list[str] = []

    def charge(key: str) -> dict[str, str]:
        charged.append(key)
        return {"id": "c1"}

    @lab.jobs.handler("order")
    def order(job: SyncJobContext) -> dict[str, Any]:
        charge_id = job.step("charge", charge)["id"]
        write(job, charge_id)
        row = job.transaction.fetch_one("SELECT count(*) AS n FROM effects")
        assert row is not None
        job.enqueue("mail", {"to": job.payload["to"]})
        if job.attempt == 1:
            raise RuntimeError("after the writes")
        return {"n": row["n"], "thread": threading.current_thread() is threading.main_thread()}

    @lab.jobs.handler("mail")
    def mail(job: SyncJobContext) -> None:
        write(job, job.payload["to"])

    await lab.start_worker()
    job_id = await lab.enqueued("order", {"to": "ada"})
    failed = await lab.until_failed(job_id, 1)
    assert failed.failures[0].error == "RuntimeError: after the writes"
    assert await lab.effects() == []
    await lab.hurry()
    done = await lab.until(job_id, "done")
    assert (done.result, len(charged)) == ({"n": 1, "thread": False}, 1)
    await lab.until_idle()
    assert sorted(await lab.effects()) == ["ada", "c1"]


async def test_plain_function_past_its_time_limit_cannot_write_any_more(
    lab: JobsLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_CANCEL_SECONDS", 0.1)
    may_end, has_ended = threading.Event(), threading.Event()
    refused: list[str] = []

    @lab.jobs.handler("hangs", time_limit_seconds=0.1)
    def hangs(job: SyncJobContext) -> None:
        if job.attempt > 1:
            write(job, "second")
            return
        write(job, "first")
        may_end.wait(10)
        for call in (lambda: write(job), lambda: job.enqueue("hangs"), job.begin):
            try:
                call()
            except NoTransactionError as error:
                refused.append(str(error))
        has_ended.set()

    await lab.start_worker()
    job_id = await lab.enqueued("hangs")
    assert (await lab.until_failed(job_id, 1)).failures[0].reason == "time_limit"
    await lab.hurry()
    await lab.until(job_id, "done")
    may_end.set()
    assert await asyncio.to_thread(has_ended.wait, 10)
    assert refused == ["this attempt has ended: it was cancelled"] * 3
    assert await lab.effects() == ["second"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_statement_of_a_cancelled_plain_function_is_cancelled(lab: JobsLab) -> None:
    @lab.jobs.handler("slow", time_limit_seconds=0.2)
    def slow(job: SyncJobContext) -> None:
        write(job)
        job.transaction.fetch_one("SELECT pg_sleep(30)")

    await lab.start_worker()
    started = time.monotonic()
    failed = await lab.until_failed(await lab.enqueued("slow"), 1)
    assert (failed.failures[0].reason, await lab.effects()) == ("time_limit", [])
    assert time.monotonic() - started < 5


async def test_session_of_sync_sqlalchemy_is_used_in_the_thread(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/jobs.db")
    store = SqlAlchemySyncStore(sessionmaker(engine))
    onceward = Onceward(store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None))

    @onceward.jobs.handler("note")
    def note(job: SyncJobContext) -> None:
        session = job.begin()
        session.execute(text("INSERT INTO effects VALUES (:note)"), {"note": job.id})

    await onceward.open()
    await store.write("CREATE TABLE effects (note text)")

    async with onceward.runtime.job_store.transaction() as tx:
        job = new_job("note", None, cause=Cause("ada", "ada", "r", "c"))
        await onceward.runtime.job_store.enqueue(tx, job)
    worker = onceward.worker()
    await worker.start()
    await worker.until_idle()
    await worker.stop()
    assert [row["note"] for row in await store.read("SELECT note FROM effects")] == [job.id]
    await onceward.close()
    engine.dispose()


class Plain:
    def __call__(self, job: SyncJobContext) -> None:
        write(job, "plain object")


class Async:
    async def __call__(self, job: JobContext) -> None:
        await write_effect(job, "async object")


def noted(note: str, job: SyncJobContext) -> None:
    write(job, note)


async def awaited(job: JobContext) -> None:
    await write_effect(job, await job.step("a", returned))


async def returned(key: str) -> str:
    return "awaited"


def wrapped(job: Any) -> Any:
    return awaited(job)  # as a decorator does that knows nothing of coroutines


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_partials_objects_and_wrappers_are_handlers(lab: JobsLab) -> None:
    handlers: dict[str, Any] = {
        "plain object": Plain(),
        "async object": Async(),
        "partial": partial(noted, "partial"),
        "lambda": lambda job: write(job, "lambda"),
        "awaited": wrapped,
        "partial of an async object": partial(Async()),
    }
    for number, handler in enumerate(handlers.values()):
        lab.jobs.handler(f"n{number}")(handler)
    await lab.start_worker()
    for number in range(len(handlers)):
        await lab.until(await lab.enqueued(f"n{number}"), "done")
    expected = {name.removeprefix("partial of an ") for name in handlers}
    assert set(await lab.effects()) == expected


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_exit_in_a_plain_function_fails_the_job_and_not_the_worker(lab: JobsLab) -> None:
    @lab.jobs.handler("exits")
    def exits(job: SyncJobContext) -> None:
        raise SystemExit(3)

    @lab.jobs.handler("mixes")
    def mixes(job: SyncJobContext) -> None:
        job.step("a", returned)  # type: ignore[unused-coroutine]

    await lab.start_worker()
    failed = await lab.until_failed(await lab.enqueued("exits"), 1)
    assert failed.failures[0].error == "RuntimeError: the handler raised SystemExit: 3"
    dead = await lab.until(await lab.enqueued("mixes"), "dead")
    assert dead.view.reason == "non_retryable"
    assert "make both async, or none" in str(dead.error)


def yields(job: Any) -> Any:
    yield


async def yields_async(job: Any) -> Any:
    yield


def takes_nothing() -> None: ...


@pytest.mark.parametrize(
    ("handler", "line"),
    [
        (yields, "has a yield"),
        (yields_async, "has a yield"),
        (partial(yields), "has a yield"),
        (takes_nothing, "must take one argument"),
        (noted, "must take one argument"),
        (Plain, "is not a function"),
        ("shop.tasks.pack", "is not a function"),
    ],
)
def test_what_cannot_run_a_job_is_refused_at_registration(handler: Any, line: str) -> None:
    jobs = JobRegistry()
    with pytest.raises(ConfigurationError, match=rf"the handler of pack, .* {line}"):
        jobs.handler("pack")(handler)
    assert len(jobs) == 0


def test_handler_without_a_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="with the type of the jobs"):
        JobRegistry().handler(noted)  # type: ignore[arg-type]
