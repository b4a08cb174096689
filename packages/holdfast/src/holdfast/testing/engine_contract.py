"""What every engine of jobs must do, as a pytest suite: for Holdfast's own and for yours.

Inherit, and say on which store and how to make an engine::

    class TestMyEngine(EngineContract):
        @pytest.fixture
        async def store(self, tmp_path):
            store = open_store(f"sqlite:///{tmp_path}/jobs.db")
            await store.open()
            yield store
            await store.close()

        @pytest.fixture
        def new_engine(self):
            return lambda table, queues, worker, lease_seconds: MyEngine(…)

``store`` is open and its database is new. ``new_engine`` is called several times in one test: each
call makes another engine on the same queues, as another process would have. Needs
``pytest-asyncio``.

An engine brings jobs; the tables decide. So a test never asks an engine who may do what, but only
that jobs come, that they come again when they must, and that none is left behind.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, ClassVar, Final

import pytest
import pytest_asyncio

from holdfast.core.job import Enqueued
from holdfast.errors import NonRetryableError
from holdfast.jobs.context import JobContext
from holdfast.jobs.enqueue import Cause, new_job
from holdfast.jobs.job_store import JobStore
from holdfast.jobs.registry import JobRegistry
from holdfast.jobs.worker import EngineMaker, Worker
from holdfast.ports import Delivery, Engine, Finished, Retry, Store

__all__ = ["EngineContract", "EngineHouse"]

_TENANT: Final = "tenant-1"
_QUEUES: Final = ("default", "mail")
_CAUSE: Final = Cause(_TENANT, "actor-1", "request-1", "correlation-1")
_NOTHING_COMES_SECONDS: Final = 0.25


class EngineHouse:
    """One store, and everything that works on it in one test."""

    def __init__(self, store: Store, new_engine: EngineMaker, patience_seconds: float) -> None:
        """Begin with nothing."""
        self.store = store
        self.table = JobStore(store)
        self.jobs = JobRegistry()
        self.patience_seconds = patience_seconds
        self._new_engine = new_engine
        self._engines: list[tuple[Engine, str]] = []
        self._workers: list[Worker] = []

    async def engine(self, name: str = "one", *, lease_seconds: float = 30.0) -> Engine:
        """Open one more engine, without a worker."""
        engine = self._new_engine(self.table, _QUEUES, name, lease_seconds)
        await engine.open()
        self._engines.append((engine, name))
        return engine

    async def worker(self, **options: Any) -> Worker:
        """Start one more worker."""
        worker = Worker(self.store, self.jobs, engine=self._new_engine, queues=_QUEUES, **options)
        await worker.start()
        self._workers.append(worker)
        return worker

    async def close(self) -> None:
        """End everything that was started."""
        for worker in self._workers:
            await worker.stop()
        for engine, _ in self._engines:
            await engine.close()

    async def enqueue(self, payload: Any, job_type: str = "effect", **wishes: Any) -> str:
        """Commit a job, and say so to everyone in this process; returns its id."""
        unit = await self.store.begin()
        job = new_job(job_type, payload, cause=_CAUSE, **wishes)
        outcome = await self.table.enqueue(unit.statements, job)
        assert isinstance(outcome, Enqueued)
        await unit.commit(None, None)
        for engine, _ in self._engines:
            engine.notify()
        for worker in self._workers:
            worker.engine.notify()
        return outcome.job_id

    async def take(self, engine: Engine, limit: int = 10) -> Sequence[Delivery]:
        """Take until something comes."""

        async def something() -> Sequence[Delivery]:
            return await engine.take(limit, 0.5)

        taken: Sequence[Delivery] = await self.eventually(something)
        return taken

    async def take_one(self, engine: Engine) -> Delivery:
        """Take what must be one job."""
        (delivery,) = await self.take(engine)
        return delivery

    async def nothing_comes(self, *engines: Engine) -> bool:
        """Try to take for a while."""
        deadline = asyncio.get_running_loop().time() + _NOTHING_COMES_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            for engine in engines:
                if await engine.take(10, 0.05):
                    return False
        return True

    async def complete(self, engine: Engine, delivery: Delivery) -> None:
        """Write the marker, then tell the engine."""
        name = next(name for known, name in self._engines if known is engine)
        await self.table.complete_alone([(delivery.job.lease, None)], worker=name)
        await engine.settle(delivery, Finished())

    async def count(self, table: str) -> int:
        """Count rows."""
        return int((await self.store.read(f"SELECT count(*) AS n FROM {table}"))[0]["n"])  # noqa: S608

    async def until_idle(self) -> None:
        """Wait until no job is left."""

        async def none_left() -> bool:
            return await self.count("jobs") == 0

        await self.eventually(none_left)

    async def eventually(self, check: Callable[[], Awaitable[Any]]) -> Any:
        """Poll until it gives something; fails when patience is at its end."""
        deadline = asyncio.get_running_loop().time() + self.patience_seconds
        while not (value := await check()):
            assert asyncio.get_running_loop().time() < deadline, "it did not come in time"
            await asyncio.sleep(0.01)
        return value


class EngineContract:
    """Tests that an adapter of ``ports.Engine`` inherits."""

    pytestmark = pytest.mark.asyncio

    patience_seconds: ClassVar[float] = 20.0
    """How long anything may take that must happen in the end."""

    # -- what an adapter's own test class provides -----------------------------------------

    @pytest.fixture
    def store(self) -> Store:
        """Return an open store on a new database."""
        raise NotImplementedError("override store in your test class")

    @pytest.fixture
    def new_engine(self) -> EngineMaker:
        """Return a function that makes engines, all for the same jobs."""
        raise NotImplementedError("override new_engine in your test class")

    @pytest_asyncio.fixture
    async def house(self, store: Store, new_engine: EngineMaker) -> AsyncIterator[EngineHouse]:
        """Put a business table into the store, and end everything afterwards."""
        unit = await store.begin()
        await unit.statements.execute(
            "CREATE TABLE IF NOT EXISTS contract_effects (name text NOT NULL, attempt integer)"
        )
        await unit.statements.execute("DELETE FROM contract_effects")
        await unit.commit(None, None)
        house = EngineHouse(store, new_engine, self.patience_seconds)
        yield house
        await house.close()

    # -- taking ------------------------------------------------------------------------------

    async def test_an_engine_says_what_it_is(self, house: EngineHouse) -> None:
        """For logs and metrics."""
        assert (await house.engine()).name

    async def test_with_nothing_to_do_a_take_ends_empty_after_its_wait(
        self, house: EngineHouse
    ) -> None:
        """It neither hangs nor spins."""
        engine = await house.engine()
        async with asyncio.timeout(self.patience_seconds):
            assert list(await engine.take(10, 0.1)) == []

    async def test_a_committed_job_comes_with_a_lease_and_all_that_was_enqueued(
        self, house: EngineHouse
    ) -> None:
        """From every queue."""
        engine = await house.engine()
        for queue in _QUEUES:
            job_id = await house.enqueue({"ü": 1}, queue=queue, resource_id=f"r {queue}")
            job = (await house.take_one(engine)).job
            assert (job.lease.tenant, job.lease.job_id, job.lease.number) == (_TENANT, job_id, 1)
            assert (job.queue, job.type, job.resource_id) == (queue, "effect", f"r {queue}")
            assert (job.decoded(), job.attempt) == ({"ü": 1}, 1)
            assert (job.request_id, job.correlation_id) == ("request-1", "correlation-1")

    async def test_a_rolled_back_job_never_comes(self, house: EngineHouse) -> None:
        """There is no such job."""
        engine = await house.engine()
        unit = await house.store.begin()
        await house.table.enqueue(unit.statements, new_job("effect", 1, cause=_CAUSE))
        await unit.rollback()
        engine.notify()
        assert await house.nothing_comes(engine)

    async def test_no_more_jobs_come_than_were_asked_for(self, house: EngineHouse) -> None:
        """And the rest comes when it is asked for."""
        engine = await house.engine()
        ids = {await house.enqueue(n) for n in range(5)}
        taken: list[Delivery] = []
        while len(taken) < len(ids):
            some = await house.take(engine, 2)
            assert len(some) <= 2  # noqa: PLR2004
            taken += some
        assert {delivery.job.lease.job_id for delivery in taken} == ids

    async def test_a_job_comes_not_before_its_time(self, house: EngineHouse) -> None:
        """By the clock of the database."""
        engine = await house.engine()
        before = await house.table.now()
        await house.enqueue(1, delay_seconds=0.6)
        await house.take_one(engine)
        assert (await house.table.now() - before).total_seconds() >= 0.6  # noqa: PLR2004

    async def test_a_job_that_someone_has_comes_to_nobody_else(self, house: EngineHouse) -> None:
        """As long as the lease lasts."""
        engines = [await house.engine("one"), await house.engine("other")]
        await house.enqueue(1)
        await house.take_one(engines[0])
        assert await house.nothing_comes(*engines)

    async def test_many_takers_get_each_job_once(self, house: EngineHouse) -> None:
        """Whoever asks, and however often."""
        engines = [await house.engine(f"lane {lane}") for lane in range(3)]
        ids = [await house.enqueue(n, queue=_QUEUES[n % 2]) for n in range(30)]
        taken: Counter[str] = Counter()

        async def lane(engine: Engine) -> None:
            while taken.total() < len(ids):
                for delivery in await engine.take(4, 0.1):
                    taken[delivery.job.lease.job_id] += 1
                    await house.complete(engine, delivery)

        async with asyncio.timeout(self.patience_seconds):
            await asyncio.gather(*(lane(engine) for engine in engines))
        assert taken == Counter(ids)
        assert await house.count("job_completions") == len(ids)

    async def test_a_ring_and_a_wake_end_a_long_wait(self, house: EngineHouse) -> None:
        """One because there is something to do, the other because the worker stops."""
        engine = await house.engine()
        while await engine.take(1, 0.0):
            pass
        waiting = asyncio.create_task(engine.take(1, 60.0))
        await asyncio.sleep(0.1)
        await house.enqueue(1)
        async with asyncio.timeout(self.patience_seconds):
            await waiting
        if not waiting.result():
            await house.take_one(engine)
        waiting = asyncio.create_task(engine.take(1, 60.0))
        await asyncio.sleep(0.1)
        engine.wake()
        async with asyncio.timeout(self.patience_seconds):
            assert list(await waiting) == []

    # -- leases ------------------------------------------------------------------------------

    async def test_a_job_whose_taker_is_gone_comes_again_under_a_new_number(
        self, house: EngineHouse
    ) -> None:
        """When its lease has run out, and not before."""
        gone = await house.engine("gone", lease_seconds=1.0)
        other = await house.engine("other", lease_seconds=1.0)
        await house.enqueue(1)
        first = (await house.take_one(gone)).job
        taken_at = await house.table.now()
        again = (await house.take_one(other)).job
        assert (again.lease.number, again.attempt) == (first.lease.number + 1, 2)
        assert (await house.table.now() - taken_at).total_seconds() > 0.9  # noqa: PLR2004

    async def test_a_renewed_lease_keeps_the_job(self, house: EngineHouse) -> None:
        """Longer than it would have lasted by itself."""
        engine = await house.engine("one", lease_seconds=1.0)
        other = await house.engine("other", lease_seconds=1.0)
        job_id = await house.enqueue(1)
        delivery = await house.take_one(engine)
        for _ in range(6):
            await asyncio.sleep(0.25)
            assert await engine.renew([delivery]) == {(_TENANT, job_id)}
            assert list(await other.take(1, 0.0)) == []
        await house.complete(engine, delivery)
        assert await house.nothing_comes(engine, other)

    async def test_renewing_tells_which_leases_are_lost(self, house: EngineHouse) -> None:
        """Taken by another, or run out."""
        engine = await house.engine("one", lease_seconds=20.0)
        ids = [await house.enqueue(n) for n in range(3)]
        deliveries: list[Delivery] = []
        while len(deliveries) < len(ids):
            deliveries += await house.take(engine)
        await house.store.write(
            "UPDATE jobs SET lease = lease + 1 WHERE payload = :payload", {"payload": "1"}
        )
        held = await engine.renew(deliveries)
        assert held == {(_TENANT, ids[0]), (_TENANT, ids[2])}

    # -- endings -----------------------------------------------------------------------------

    async def test_what_has_ended_never_comes_again(self, house: EngineHouse) -> None:
        """Nor does it harm to hear of it twice."""
        engine, other = await house.engine("one"), await house.engine("other")
        await house.enqueue(1)
        delivery = await house.take_one(engine)
        await house.complete(engine, delivery)
        await engine.settle(delivery, Finished())
        assert await house.nothing_comes(engine, other)
        assert await house.count("jobs") == 0

    async def test_what_comes_back_comes_when_it_was_said_to(self, house: EngineHouse) -> None:
        """As the next attempt."""
        engine = await house.engine("one")
        await house.enqueue(1)
        delivery = await house.take_one(engine)
        failed_at = await house.table.now()
        assert await house.table.retry(
            delivery.job, worker="one", reason="error", error="", delay_seconds=0.6
        )
        await engine.settle(delivery, Retry(0.6))
        again = await house.take_one(engine)
        assert again.job.attempt == 2  # noqa: PLR2004
        assert (await house.table.now() - failed_at).total_seconds() >= 0.6  # noqa: PLR2004

    async def test_the_next_in_line_comes_when_the_first_has_ended(
        self, house: EngineHouse
    ) -> None:
        """And not before."""
        engine = await house.engine("one")
        for n in range(3):
            await house.enqueue(n, order="line")
        for n in range(3):
            delivery = await house.take_one(engine)
            assert delivery.job.decoded() == n
            assert await house.nothing_comes(engine)
            unit = await house.store.begin()
            await house.table.complete_within(unit, delivery.job, None, worker="one")
            await unit.commit(None, None)
            await engine.settle(delivery, Finished())
            engine.notify()

    async def test_a_requeued_dead_letter_comes_again(self, house: EngineHouse) -> None:
        """A broker that thinks it has heard of it before must be told otherwise."""
        engine = await house.engine("one")
        job_id = await house.enqueue(1)
        for _ in range(2):
            delivery = await house.take_one(engine)
            assert delivery.job.attempt == 1
            assert await house.table.dead_letter(delivery.job, worker="one", reason="e", error="")
            await engine.settle(delivery, Finished())
            assert await house.table.requeue(_TENANT, job_id, actor="actor-1")
            engine.notify()
        await house.take_one(engine)

    async def test_closing_twice_is_closing_once(self, house: EngineHouse) -> None:
        """And what another has is not touched by it."""
        engine, other = await house.engine("one"), await house.engine("other")
        await house.enqueue(1)
        delivery = await house.take_one(other)
        await engine.close()
        await engine.close()
        assert await other.renew([delivery]) == {(_TENANT, delivery.job.lease.job_id)}

    # -- with workers ------------------------------------------------------------------------

    async def test_every_job_takes_effect_once_with_two_workers(self, house: EngineHouse) -> None:
        """Whatever fails on the way."""
        _register(house.jobs)
        for _ in range(2):
            await house.worker(concurrency=8)
        for n in range(30):
            await house.enqueue(n, queue=_QUEUES[n % 2])
        await house.enqueue("flaky", "flaky")
        await house.enqueue("hopeless", "hopeless")
        await house.until_idle()
        rows = await house.store.read("SELECT name, attempt FROM contract_effects")
        effects = Counter((row["name"], row["attempt"]) for row in rows)
        assert effects == Counter([*((str(n), 1) for n in range(30)), ("flaky", 2)])
        assert await house.count("job_completions") == len(rows)
        assert await house.count("dead_letters") == 1

    async def test_a_handler_longer_than_its_lease_runs_once(self, house: EngineHouse) -> None:
        """Because the worker renews."""
        _register(house.jobs)
        for _ in range(2):
            await house.worker(lease_seconds=1.0)
        await house.enqueue("slow", "slow")
        await house.until_idle()
        rows = await house.store.read("SELECT name, attempt FROM contract_effects")
        assert [(row["name"], row["attempt"]) for row in rows] == [("slow", 1)]

    async def test_a_worker_that_stops_gives_back_what_another_then_does(
        self, house: EngineHouse
    ) -> None:
        """At once, not when the lease has run out; and the attempt did not count."""
        _register(house.jobs)
        stopping = await house.worker(lease_seconds=300.0, shutdown_seconds=0.1)
        await house.enqueue("slow", "slow")

        async def runs() -> bool:
            return stopping.running == 1

        await house.eventually(runs)
        await stopping.stop()
        await house.worker(lease_seconds=300.0)
        await house.until_idle()
        rows = await house.store.read("SELECT name, attempt FROM contract_effects")
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

    @jobs.handler("flaky")
    async def flaky(job: JobContext) -> None:
        await write(job)
        if job.attempt == 1:
            raise RuntimeError("not yet")

    @jobs.handler("hopeless")
    async def hopeless(job: JobContext) -> None:
        await write(job)
        raise NonRetryableError("never")
