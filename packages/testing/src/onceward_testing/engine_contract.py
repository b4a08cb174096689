"""The contract of ``ports.Engine`` as a pytest suite, for Onceward's engines and for yours.

Inherit from it and provide a store and a function that makes engines::

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def store(self, tmp_path):
            store = open_store(f"sqlite:///{tmp_path}/jobs.db")
            await store.open()
            yield store
            await store.close()

        @pytest.fixture
        def new_engine(self):
            return lambda job_store, queues, worker, lease_seconds: MyEngine(…)

``store`` is open and its database is new. ``new_engine`` is called several times in one test: each
call makes another engine for the same queues, as another process would. Needs ``pytest-asyncio``.

Engines deliver jobs; the job tables decide who may run them. So the tests check that jobs are
delivered, that they are delivered again when they must be, and that none is lost.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final

import pytest
import pytest_asyncio

from onceward.errors import NonRetryableError
from onceward.jobs.admin import JobAdmin
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import Enqueued
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import EngineMaker, Worker
from onceward.ports import Delivery, Engine, Finished, Retry, Store
from onceward.stores.parts import JOBS

__all__ = ["EngineContract", "EngineHarness"]

_TENANT: Final = "tenant-1"
_QUEUES: Final = ("default", "mail")
_CAUSE: Final = Cause(_TENANT, "actor-1", "request-1", "correlation-1")
_QUIET_SECONDS: Final = 0.25
# Long enough for a busy machine to renew it in time.
_OUTLASTED_LEASE_SECONDS: Final = 4.0


class EngineHarness:
    """One store with the engines and workers of one test."""

    def __init__(self, store: Store, new_engine: EngineMaker, timeout_seconds: float) -> None:
        # An open store.
        self.store = store
        # Jobs in that store.
        self.job_store = JobStore(store)
        # The handlers of the tests.
        self.jobs = JobRegistry()
        # How long a test waits.
        self.timeout_seconds = timeout_seconds
        self._new_engine = new_engine
        self._engines: list[tuple[Engine, str]] = []
        self._workers: list[Worker] = []

    async def engine(self, name: str = "one", *, lease_seconds: float = 30.0) -> Engine:
        """Open another engine, without a worker."""
        engine = self._new_engine(self.job_store, _QUEUES, name, lease_seconds)
        await engine.open()
        self._engines.append((engine, name))
        return engine

    async def worker(self, **options: Any) -> Worker:
        """Start another worker."""
        worker = Worker(self.store, self.jobs, engine=self._new_engine, queues=_QUEUES, **options)
        await worker.start()
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        """Stop all workers and engines."""
        for worker in self._workers:
            await worker.stop()
        for engine, _ in self._engines:
            await engine.close()

    async def enqueue(self, payload: Any, job_type: str = "effect", **options: Any) -> str:
        """Commit a job, notify all engines and workers, and return its id."""
        unit = await self.store.begin()
        job = new_job(job_type, payload, cause=_CAUSE, **options)
        outcome = await self.job_store.enqueue(unit.statements, job)
        assert isinstance(outcome, Enqueued)
        await unit.commit(None, None)
        for engine, _ in self._engines:
            engine.notify()
        for worker in self._workers:
            worker.engine.notify()
        return outcome.job_id

    async def take(self, engine: Engine, limit: int = 10) -> Sequence[Delivery]:
        """Call ``take`` until it returns a delivery."""

        async def deliveries() -> Sequence[Delivery]:
            return await engine.take(limit, 0.5)

        taken: Sequence[Delivery] = await self.eventually(deliveries)
        return taken

    async def take_one(self, engine: Engine) -> Delivery:
        """Take exactly one job."""
        (delivery,) = await self.take(engine)
        return delivery

    async def delivers_nothing(self, *engines: Engine) -> bool:
        """Check that no engine delivers anything for a quarter of a second."""
        deadline = asyncio.get_running_loop().time() + _QUIET_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            for engine in engines:
                if await engine.take(10, 0.05):
                    return False
        return True

    async def complete(self, engine: Engine, delivery: Delivery) -> None:
        """Complete the job, then acknowledge the delivery."""
        name = next(name for known, name in self._engines if known is engine)
        await self.job_store.complete_alone([(delivery.job.lease, None)], worker=name)
        await engine.settle(delivery, Finished())

    async def count(self, table: str) -> int:
        """Count the rows of a table."""
        sql = self.store.table_names.render(f"SELECT count(*) AS n FROM {table}")  # noqa: S608
        return int((await self.store.read(sql))[0]["n"])

    async def until_idle(self) -> None:
        """Wait until no job is left."""

        async def none_left() -> bool:
            return await self.count("onceward_jobs") == 0

        await self.eventually(none_left)

    async def eventually(self, check: Callable[[], Awaitable[Any]]) -> Any:
        """Poll until ``check`` returns a true value; fail after the timeout."""
        deadline = asyncio.get_running_loop().time() + self.timeout_seconds
        while not (value := await check()):
            assert asyncio.get_running_loop().time() < deadline, "timed out"
            await asyncio.sleep(0.01)
        return value


class EngineContract:
    """Tests that an adapter of ``ports.Engine`` inherits."""

    pytestmark = pytest.mark.asyncio

    timeout_seconds: ClassVar[float] = 20.0
    """How long to wait for anything that must happen."""

    # -- provided by the adapter's test class -----------------------------------------------

    @pytest.fixture
    def store(self) -> Store:
        """Return an open store on a new database."""
        raise NotImplementedError("override store in your test class")

    @pytest.fixture
    def new_engine(self) -> EngineMaker:
        """Return a function that makes engines for the same jobs."""
        raise NotImplementedError("override new_engine in your test class")

    @pytest_asyncio.fixture
    async def harness(self, store: Store, new_engine: EngineMaker) -> AsyncIterator[EngineHarness]:
        """Create the tables of jobs and a business table; stop everything after the test."""
        store.schema.want(JOBS)
        await store.open()
        unit = await store.begin()
        await unit.statements.execute(
            "CREATE TABLE IF NOT EXISTS contract_effects (name text NOT NULL, attempt integer)"
        )
        await unit.statements.execute("DELETE FROM contract_effects")
        await unit.commit(None, None)
        harness = EngineHarness(store, new_engine, self.timeout_seconds)
        yield harness
        await harness.close()

    # -- delivery ----------------------------------------------------------------------------

    async def test_engine_has_a_name(self, harness: EngineHarness) -> None:
        assert (await harness.engine()).name

    async def test_take_without_due_jobs_returns_none_after_the_wait(
        self, harness: EngineHarness
    ) -> None:
        engine = await harness.engine()
        async with asyncio.timeout(self.timeout_seconds):
            assert list(await engine.take(10, 0.1)) == []

    async def test_committed_job_is_delivered_with_its_lease_and_arguments(
        self, harness: EngineHarness
    ) -> None:
        engine = await harness.engine()
        for queue in _QUEUES:
            job_id = await harness.enqueue({"ü": 1}, queue=queue, resource_id=f"r {queue}")
            job = (await harness.take_one(engine)).job
            assert (job.lease.tenant, job.lease.job_id, job.lease.number) == (_TENANT, job_id, 1)
            assert (job.queue, job.type, job.resource_id) == (queue, "effect", f"r {queue}")
            assert (job.decoded(), job.attempt) == ({"ü": 1}, 1)
            assert (job.request_id, job.correlation_id) == ("request-1", "correlation-1")

    async def test_rolled_back_job_is_never_delivered(self, harness: EngineHarness) -> None:
        engine = await harness.engine()
        unit = await harness.store.begin()
        await harness.job_store.enqueue(unit.statements, new_job("effect", 1, cause=_CAUSE))
        await unit.rollback()
        engine.notify()
        assert await harness.delivers_nothing(engine)

    async def test_take_returns_at_most_the_limit(self, harness: EngineHarness) -> None:
        engine = await harness.engine()
        ids = {await harness.enqueue(n) for n in range(5)}
        taken: list[Delivery] = []
        while len(taken) < len(ids):
            some = await harness.take(engine, 2)
            assert len(some) <= 2  # noqa: PLR2004
            taken += some
        assert {delivery.job.lease.job_id for delivery in taken} == ids

    async def test_job_is_not_delivered_before_it_is_due(self, harness: EngineHarness) -> None:
        engine = await harness.engine()
        before = await harness.job_store.now()
        await harness.enqueue(1, delay_seconds=0.6)
        await harness.take_one(engine)
        assert (await harness.job_store.now() - before).total_seconds() >= 0.6  # noqa: PLR2004

    async def test_leased_job_is_not_delivered_to_another_engine(
        self, harness: EngineHarness
    ) -> None:
        engines = [await harness.engine("one"), await harness.engine("other")]
        await harness.enqueue(1)
        await harness.take_one(engines[0])
        assert await harness.delivers_nothing(*engines)

    async def test_concurrent_engines_get_each_job_once(self, harness: EngineHarness) -> None:
        engines = [await harness.engine(f"lane {lane}") for lane in range(3)]
        ids = [await harness.enqueue(n, queue=_QUEUES[n % 2]) for n in range(30)]
        taken: Counter[str] = Counter()

        async def lane(engine: Engine) -> None:
            while taken.total() < len(ids):
                for delivery in await engine.take(4, 0.1):
                    taken[delivery.job.lease.job_id] += 1
                    await harness.complete(engine, delivery)

        async with asyncio.timeout(self.timeout_seconds):
            await asyncio.gather(*(lane(engine) for engine in engines))
        assert taken == Counter(ids)
        assert await harness.count("onceward_job_completions") == len(ids)

    async def test_notify_and_wake_end_a_long_wait(self, harness: EngineHarness) -> None:
        engine = await harness.engine()
        while await engine.take(1, 0.0):
            pass
        waiting = asyncio.create_task(engine.take(1, 60.0))
        await asyncio.sleep(0.1)
        await harness.enqueue(1)
        async with asyncio.timeout(self.timeout_seconds):
            await waiting
        if not waiting.result():
            await harness.take_one(engine)
        waiting = asyncio.create_task(engine.take(1, 60.0))
        await asyncio.sleep(0.1)
        engine.wake()
        async with asyncio.timeout(self.timeout_seconds):
            assert list(await waiting) == []

    # -- leases ------------------------------------------------------------------------------

    async def test_expired_lease_is_delivered_again_with_a_new_number(
        self, harness: EngineHarness
    ) -> None:
        expiring = await harness.engine("expiring", lease_seconds=1.0)
        other = await harness.engine("other", lease_seconds=1.0)
        await harness.enqueue(1)
        first = (await harness.take_one(expiring)).job
        taken_at = await harness.job_store.now()
        again = (await harness.take_one(other)).job
        assert (again.lease.number, again.attempt) == (first.lease.number + 1, 2)
        assert (await harness.job_store.now() - taken_at).total_seconds() > 0.9  # noqa: PLR2004

    async def test_renewed_lease_outlasts_its_first_expiry(self, harness: EngineHarness) -> None:
        engine = await harness.engine("one", lease_seconds=3.0)
        other = await harness.engine("other", lease_seconds=3.0)
        job_id = await harness.enqueue(1)
        delivery = await harness.take_one(engine)
        for _ in range(5):
            await asyncio.sleep(0.75)
            assert await engine.renew([delivery]) == {(_TENANT, job_id)}
            assert list(await other.take(1, 0.0)) == []
        await harness.complete(engine, delivery)
        assert await harness.delivers_nothing(engine, other)

    async def test_renew_returns_only_the_leases_still_held(self, harness: EngineHarness) -> None:
        engine = await harness.engine("one", lease_seconds=20.0)
        ids = [await harness.enqueue(n) for n in range(3)]
        deliveries: list[Delivery] = []
        while len(deliveries) < len(ids):
            deliveries += await harness.take(engine)
        await harness.store.write(
            harness.store.table_names.render(
                "UPDATE onceward_jobs SET lease = lease + 1 WHERE payload = :payload"
            ),
            {"payload": "1"},
        )
        held = await engine.renew(deliveries)
        assert held == {(_TENANT, ids[0]), (_TENANT, ids[2])}

    # -- outcomes ----------------------------------------------------------------------------

    async def test_finished_job_is_not_delivered_again(self, harness: EngineHarness) -> None:
        engine, other = await harness.engine("one"), await harness.engine("other")
        await harness.enqueue(1)
        delivery = await harness.take_one(engine)
        await harness.complete(engine, delivery)
        await engine.settle(delivery, Finished())
        assert await harness.delivers_nothing(engine, other)
        assert await harness.count("onceward_jobs") == 0

    async def test_retried_job_is_delivered_after_its_delay(self, harness: EngineHarness) -> None:
        engine = await harness.engine("one")
        await harness.enqueue(1)
        delivery = await harness.take_one(engine)
        failed_at = await harness.job_store.now()
        assert await harness.job_store.retry(
            delivery.job, worker="one", reason="error", error="", delay_seconds=0.6
        )
        await engine.settle(delivery, Retry(0.6))
        again = await harness.take_one(engine)
        assert again.job.attempt == 2  # noqa: PLR2004
        assert (await harness.job_store.now() - failed_at).total_seconds() >= 0.6  # noqa: PLR2004

    async def test_next_job_of_an_order_key_is_delivered_after_the_first_has_ended(
        self, harness: EngineHarness
    ) -> None:
        engine = await harness.engine("one")
        for n in range(3):
            await harness.enqueue(n, order="line")
        for n in range(3):
            delivery = await harness.take_one(engine)
            assert delivery.job.decoded() == n
            assert await harness.delivers_nothing(engine)
            unit = await harness.store.begin()
            await harness.job_store.complete_within(unit, delivery.job, None, worker="one")
            await unit.commit(None, None)
            await engine.settle(delivery, Finished())
            engine.notify()

    async def test_requeued_dead_letter_is_delivered_again(self, harness: EngineHarness) -> None:
        engine = await harness.engine("one")
        job_id = await harness.enqueue(1)
        for _ in range(2):
            delivery = await harness.take_one(engine)
            assert delivery.job.attempt == 1
            assert await harness.job_store.dead_letter(
                delivery.job, worker="one", reason="e", error=""
            )
            await engine.settle(delivery, Finished())
            assert await JobAdmin(harness.job_store.store).requeue(
                job_id, tenant=_TENANT, actor="actor-1"
            )
            engine.notify()
        await harness.take_one(engine)

    async def test_close_is_idempotent(self, harness: EngineHarness) -> None:
        engine, other = await harness.engine("one"), await harness.engine("other")
        await harness.enqueue(1)
        delivery = await harness.take_one(other)
        await engine.close()
        await engine.close()
        assert await other.renew([delivery]) == {(_TENANT, delivery.job.lease.job_id)}

    # -- with workers ------------------------------------------------------------------------

    async def test_every_job_takes_effect_once_with_two_workers(
        self, harness: EngineHarness
    ) -> None:
        _register(harness.jobs)
        for _ in range(2):
            await harness.worker(concurrency=8)
        for n in range(30):
            await harness.enqueue(n, queue=_QUEUES[n % 2])
        await harness.enqueue("flaky", "flaky")
        await harness.enqueue("hopeless", "hopeless")
        await harness.until_idle()
        rows = await harness.store.read("SELECT name, attempt FROM contract_effects")
        effects = Counter((row["name"], row["attempt"]) for row in rows)
        assert effects == Counter([*((str(n), 1) for n in range(30)), ("flaky", 2)])
        assert await harness.count("onceward_job_completions") == len(rows)
        assert await harness.count("onceward_dead_letters") == 1

    async def test_handler_that_outlasts_its_lease_runs_once(self, harness: EngineHarness) -> None:
        _register(harness.jobs)
        for _ in range(2):
            await harness.worker(lease_seconds=_OUTLASTED_LEASE_SECONDS)
        await harness.enqueue("outlasting", "outlasting")
        await harness.until_idle()
        rows = await harness.store.read("SELECT name, attempt FROM contract_effects")
        assert [(row["name"], row["attempt"]) for row in rows] == [("outlasting", 1)]

    async def test_stopping_worker_releases_its_jobs_to_another_worker(
        self, harness: EngineHarness
    ) -> None:
        _register(harness.jobs)
        stopping = await harness.worker(lease_seconds=300.0, shutdown_seconds=0.1)
        await harness.enqueue("slow", "slow")

        async def runs() -> bool:
            return stopping.running == 1

        await harness.eventually(runs)
        await stopping.stop()
        await harness.worker(lease_seconds=300.0)
        await harness.until_idle()
        rows = await harness.store.read("SELECT name, attempt FROM contract_effects")
        assert [(row["name"], row["attempt"]) for row in rows] == [("slow", 1)]


def _register(jobs: JobRegistry) -> None:
    async def write(job: JobContext) -> None:
        await job.transaction.execute(
            "INSERT INTO contract_effects (name, attempt) VALUES (:name, :attempt)",
            {"name": str(job.payload), "attempt": job.attempt},
        )

    @jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await write(job)

    @jobs.handler("slow")
    async def slow(job: JobContext) -> None:
        await asyncio.sleep(1.3)
        await write(job)

    @jobs.handler("outlasting")
    async def outlasting(job: JobContext) -> None:
        await asyncio.sleep(_OUTLASTED_LEASE_SECONDS * 1.1)
        await write(job)

    @jobs.handler("flaky")
    async def flaky(job: JobContext) -> None:
        await write(job)
        if job.attempt == 1:
            raise RuntimeError("not yet")

    @jobs.handler("hopeless")
    async def hopeless(job: JobContext) -> None:
        await write(job)
        raise NonRetryableError("never")
