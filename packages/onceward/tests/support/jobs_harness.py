"""A harness for tests of jobs, and a worker program that can be killed and paused.

Run as a module, with JOBS_DATABASE, JOBS_KILL_AT and others in the environment.
"""

import asyncio
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from onceward import open_store
from onceward.jobs.admin import JobAdmin, JobDetail
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import Enqueued, EnqueueOutcome, LeasedJob
from onceward.jobs.job_store import JobStore
from onceward.jobs.published_jobs import PublishedJobs
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import Worker
from onceward.ports import JobOutcome, Row, Store
from onceward.stores.parts import JOBS
from onceward_testing.server_process import suspend_child

ROOT = Path(__file__).parents[4]
TENANT = "ada"
T = TypeVar("T")

# Most waits end within milliseconds; busy machines need more.
TIMEOUT_SECONDS = 60.0

_SERIAL = {
    "sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT",
    "postgresql": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
}
_IN_SECONDS = {
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000 + :seconds * 1000 AS INTEGER)",
    "postgresql": "statement_timestamp() + make_interval(secs => :seconds::float8)",
}


class Outcomes:
    """Records the outcome of every attempt."""

    def __init__(self) -> None:
        self.all: list[JobOutcome] = []

    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        self.all.append(outcome)

    def job_depths(self, depths: Mapping[str, tuple[int, int, int, float]]) -> None:
        return


class JobsLab:
    """One store with its jobs and workers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.job_store = JobStore(self.store)
        self.published_jobs = PublishedJobs(self.job_store)
        self.admin = JobAdmin(self.store)
        self.jobs = JobRegistry()
        self.outcomes = Outcomes()
        self.workers: list[Worker] = []

    async def start_worker(self, store: Store | None = None, **options: Any) -> Worker:
        settings = {"lease_seconds": 5, "shutdown_seconds": 5, "metrics": self.outcomes, **options}
        worker = Worker(store or self.store, self.jobs, **settings)
        await worker.start()
        self.workers.append(worker)
        return worker

    async def stop_workers(self) -> None:
        while self.workers:
            await self.workers.pop().stop()

    # -- enqueueing -------------------------------------------------------------------------

    async def enqueue(
        self, job_type: str = "effect", payload: Any = None, *, tenant: str = TENANT, **options: Any
    ) -> EnqueueOutcome:
        """Enqueue in a separate transaction, and wake the workers."""
        async with self.transaction() as tx:
            outcome = await self.enqueue_in(tx, job_type, payload, tenant=tenant, **options)
        self.notify()
        return outcome

    async def enqueue_in(
        self, tx: Any, job_type: str, payload: Any = None, *, tenant: str = TENANT, **options: Any
    ) -> EnqueueOutcome:
        cause = Cause(tenant, f"{tenant}'s phone", "request-1", "correlation-1")
        options.setdefault("queue", self.jobs.defaults_for(job_type).get("queue"))
        return await self.job_store.enqueue(tx, new_job(job_type, payload, cause=cause, **options))

    async def enqueued(self, *args: Any, **options: Any) -> str:
        """Enqueue a job, which must be new, and return its id."""
        outcome = await self.enqueue(*args, **options)
        assert isinstance(outcome, Enqueued), outcome
        return outcome.job_id

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Any]:
        unit = await self.store.begin()
        try:
            yield unit.statements
        except BaseException:
            await unit.rollback()
            raise
        await unit.commit(None, None)

    def notify(self) -> None:
        for worker in self.workers:
            worker.engine.notify()

    async def claim(
        self, worker: str = "test-worker", *, lease_seconds: float = 30
    ) -> list[LeasedJob]:
        return await self.job_store.claim(
            self.jobs.queues or ("default",), worker=worker, limit=100, lease_seconds=lease_seconds
        )

    async def claim_one(
        self, worker: str = "test-worker", *, lease_seconds: float = 30
    ) -> LeasedJob:
        (job,) = await self.claim(worker, lease_seconds=lease_seconds)
        return job

    # -- manipulation -----------------------------------------------------------------------

    async def show_in(self, seconds: float, where: str = "true") -> None:
        """Make jobs visible in so many seconds, even if they are leased."""
        await self.store.write(
            self.store.table_names.render(
                f"UPDATE onceward_jobs SET visible_at = {_IN_SECONDS[self.store.name]}"
                f" WHERE {where}"
            ),
            {"seconds": seconds},
        )

    async def hurry(self) -> None:
        """Make retries due now. Jobs that wait for their order key keep waiting."""
        await self.show_in(-0.001, "state = 'waiting' AND attempts > 0")
        self.notify()

    async def steal(self) -> None:
        """Change the number of every lease, as a claim by another worker would."""
        await self.store.write(
            self.store.table_names.render("UPDATE onceward_jobs SET lease = lease + 1")
        )

    # -- reading ----------------------------------------------------------------------------

    async def rows(self, sql: str, **params: Any) -> Sequence[Row]:
        return await self.store.read(self.store.table_names.render(sql), params)

    async def count(self, table: str) -> int:
        return int((await self.rows(f"SELECT count(*) AS n FROM {table}"))[0]["n"])

    async def effects(self) -> list[str]:
        """Return the committed effects, in the order in which they were written."""
        rows = await self.store.read("SELECT name FROM effects ORDER BY seq")
        return [row["name"] for row in rows]

    async def job(self, job_id: str, *, tenant: str = TENANT) -> JobDetail:
        found = await self.admin.find(job_id, tenant=tenant)
        assert found is not None, "there is no such job"
        return found

    async def state(self, job_id: str) -> str | None:
        return await self.admin.state(job_id, tenant=TENANT)

    async def until(
        self, job_id: str, state: str, *, seconds: float = TIMEOUT_SECONDS
    ) -> JobDetail:
        """Wait until a job has a state."""

        async def check() -> bool:
            return await self.state(job_id) == state

        await eventually(check, seconds=seconds)
        return await self.job(job_id)

    async def until_failed(self, job_id: str, times: int) -> JobDetail:
        """Wait until a job has failed so often and waits for its retry."""

        async def check() -> bool:
            found = await self.job(job_id)
            return len(found.failures) >= times and found.view.state != "running"

        await eventually(check)
        return await self.job(job_id)

    async def until_idle(self, *, hurry: bool = False, seconds: float = TIMEOUT_SECONDS) -> None:
        """Wait until no job is left and no worker runs any."""

        async def check() -> bool:
            if hurry:
                await self.hurry()
            return await self.count("onceward_jobs") == 0

        await eventually(check, seconds=seconds)
        await self.quiet()

    async def quiet(self) -> None:
        """Wait until no worker runs a job: its commit is visible before it has finished."""

        async def check() -> bool:
            return not any(worker.running for worker in self.workers)

        await eventually(check)


async def eventually(
    check: Callable[[], Awaitable[T]], *, seconds: float = TIMEOUT_SECONDS, pause: float = 0.01
) -> T:
    """Poll until ``check`` returns a true value, and return it. Fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = await check()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s; last: {value!r}")
        await asyncio.sleep(pause)


async def make_effects(store: Store) -> None:
    unit = await store.begin()
    await unit.statements.execute(
        f"CREATE TABLE IF NOT EXISTS effects (seq {_SERIAL[store.name]}, name text NOT NULL,"
        " worker text)"
    )
    await unit.statements.execute(
        "CREATE TABLE IF NOT EXISTS counters (name text PRIMARY KEY, n integer NOT NULL)"
    )
    await unit.commit(None, None)


async def write_effect(job: JobContext, name: str | None = None, worker: str = "") -> None:
    """Insert an effect as a handler would."""
    await job.transaction.execute(
        "INSERT INTO effects (name, worker) VALUES (:name, :worker)",
        {"name": name or job.resource_id or job.id, "worker": worker},
    )


# -- the program ------------------------------------------------------------------------------


class WorkerProcess:
    """A worker in its own process. Tests wait for the lines that it prints."""

    def __init__(self, database: str, **environment: str) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.printed: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "packages.onceward.tests.support.jobs_harness"],
            cwd=ROOT,
            env={**os.environ, "JOBS_DATABASE": database, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self.wait_for("ready")

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())

    def wait_for(self, line: str, *, seconds: float = TIMEOUT_SECONDS) -> str:
        """Wait for a line that starts like this, and return all of it."""
        deadline = time.monotonic() + seconds
        while True:
            for printed in self.printed:
                if printed.startswith(line):
                    self.printed.remove(printed)
                    return printed
            try:
                self.printed.append(self._lines.get(timeout=deadline - time.monotonic()))
            except (queue.Empty, ValueError):
                text = f"the worker did not print {line!r} in {seconds} s, but {self.printed}"
                raise AssertionError(text) from None

    def write_line(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def signal(self, sign: signal.Signals) -> None:
        self._process.send_signal(sign)

    def pause(self) -> None:
        """Stop all threads: none takes a lock after this has returned."""
        suspend_child(self._process.pid)

    def wait_until_killed(self) -> int:
        return self._process.wait(timeout=30)

    def end(self) -> None:
        """Kill the process if it is running, and close its pipes."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class _KillAt:
    """Kill this process with SIGKILL at a point."""

    def __init__(self, point: str) -> None:
        self._point = point

    async def reach(self, point: str) -> None:
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)


class _PrintingOutcomes(Outcomes):
    def job_ended(self, queue: str, job_type: str, outcome: JobOutcome, seconds: float) -> None:
        _print(f"ended {outcome}")


def _print(line: str) -> None:
    print(line, flush=True)


def handlers(*, name: str, sleep_seconds: float = 0.0, fail: bool = False) -> JobRegistry:
    """Return the handlers of the program, which print their progress."""
    jobs = JobRegistry()

    @jobs.handler("effect")
    async def effect(job: JobContext) -> dict[str, str]:
        """Sleep, then write."""
        _print(f"started {job.attempt} {time.time()}")
        await asyncio.sleep(sleep_seconds)
        await write_effect(job, worker=name)
        if fail:
            raise RuntimeError("not today")
        return {"by": name}

    @jobs.handler("count")
    async def count(job: JobContext) -> None:
        """Write, then sleep with a locked row."""
        await job.transaction.execute(
            "UPDATE counters SET n = n + 1 WHERE name = :name", {"name": "shared"}
        )
        _print(f"written {job.attempt}")
        await asyncio.sleep(sleep_seconds)

    return jobs


async def _work() -> None:
    env = os.environ
    name = env.get("JOBS_NAME", "process")
    store = open_store(env["JOBS_DATABASE"])
    store.schema.want(JOBS)
    await store.open()
    await make_effects(store)
    kill_at = env.get("JOBS_KILL_AT")
    sleep_seconds = float(env.get("JOBS_THINK_SECONDS", "0"))
    registry = handlers(name=name, sleep_seconds=sleep_seconds, fail=kill_at == "job_before_retry")
    worker = Worker(
        store,
        registry,
        name=name,
        lease_seconds=float(env.get("JOBS_LEASE_SECONDS", "1")),
        concurrency=int(env.get("JOBS_CONCURRENCY", "16")),
        metrics=_PrintingOutcomes(),
        faults=_KillAt(kill_at) if kill_at else None,
    )
    if env.get("JOBS_WORK", "yes") == "yes":
        await worker.start()
    notifier = store.notifier()
    _print("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *rest = line.split(maxsplit=1)
        if command == "enqueue":  # in a transaction, then notify, as a guarded request does
            options = msgspec.json.decode(rest[0])
            unit = await store.begin()
            cause = Cause(TENANT, "process", "request-1", "correlation-1")
            job = new_job(options.pop("type"), options.pop("payload", None), cause=cause, **options)
            await JobStore(store).enqueue(unit.statements, job)
            await unit.commit(None, None)
            committed_at = time.time()
            notifier.notify()
            _print(f"committed {committed_at}")


def _shift_clock(seconds: float) -> None:
    """Shift the clock of this process. The databases use the clock of the machine."""
    import datetime as dt

    machine_time = time.time
    time.time = lambda: machine_time() + seconds

    class Shifted(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return super().now(tz) + dt.timedelta(seconds=seconds)

    for module in list(sys.modules.values()):
        if getattr(module, "datetime", None) is dt.datetime and module is not dt:
            module.datetime = Shifted  # type: ignore[attr-defined]


if __name__ == "__main__":
    _shift_clock(float(os.environ.get("JOBS_CLOCK_OFF_SECONDS", "0")))
    asyncio.run(_work())
