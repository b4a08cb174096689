"""The functions of ``citus.sql`` do what those of the migrations do; on plain PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from importlib.resources import files

import pytest

from holdfast import open_store
from holdfast.jobs.job_store import JobStore
from holdfast.ports import Row, Store
from holdfast.testing.samples import NOW, a_record, commit
from packages.holdfast.tests.support.jobs_harness import JobsLab

TENANTS = ("ada", "bob", "eve")


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[Store]:
    store = open_store(postgres_url)
    await store.open()
    script = (files("holdfast.stores") / "citus.sql").read_text(encoding="utf-8")
    unit = await store.begin()
    await unit.statements.execute(script)
    await unit.commit(None, None)
    yield store
    await store.close()


@pytest.fixture
def job_store(store: Store) -> JobStore:
    return JobStore(store)


async def enqueue_for_all(store: Store, count: int) -> None:
    lab = JobsLab(store)
    for tenant in TENANTS:
        for number in range(count):
            await lab.enqueued("effect", number, tenant=tenant)


async def test_concurrent_claims_get_every_job_once(store: Store, job_store: JobStore) -> None:
    await enqueue_for_all(store, 10)
    claims = await asyncio.gather(
        *(
            job_store.claim(("default",), worker=f"w{n}", limit=7, lease_seconds=60)
            for n in range(6)
        )
    )
    ids = [(job.lease.tenant, job.lease.job_id) for jobs in claims for job in jobs]
    assert len(ids) == len(set(ids)) == 30


async def test_lost_attempts_are_recorded(store: Store, job_store: JobStore) -> None:
    await enqueue_for_all(store, 1)
    first = await job_store.claim(("default",), worker="one", limit=9, lease_seconds=0.01)
    assert len(first) == len(TENANTS)
    await asyncio.sleep(0.05)
    named = [(job.lease.tenant, job.lease.job_id) for job in first]
    second = await job_store.claim_these(named, worker="two", lease_seconds=60)
    assert {job.lease.number for job in second} == {2}
    for job in second:
        assert await job_store.lost_before(job.lease) == (
            "one",
            "the worker died, hung or lost its lease",
        )


async def test_published_jobs_are_marked_and_reset(store: Store, job_store: JobStore) -> None:
    await enqueue_for_all(store, 2)

    async def to_publish() -> Sequence[Row]:
        return await job_store.to_publish(("default",), front=9, limit=9, again_after_seconds=60)

    jobs = await to_publish()
    assert len(jobs) == 6
    await job_store.mark_published(jobs)
    assert not await to_publish()
    assert await job_store.reset_published() == 6
    assert len(await to_publish()) == 6


async def test_sweep_deletes_expired_records_of_all_tenants_up_to_the_limit(store: Store) -> None:
    for tenant in TENANTS:
        for number in range(4):
            life = timedelta(seconds=1) if number else timedelta(days=9)
            await commit(store, a_record(f"key-{number}", tenant=tenant, life=life))
    later = NOW + timedelta(days=1)
    assert [await store.sweep(later, 5) for _ in range(3)] == [5, 4, 0]
    for tenant in TENANTS:
        assert await store.find(a_record("key-0", tenant=tenant).id, later) is not None


async def test_old_rows_of_jobs_are_deleted_in_batches(store: Store, job_store: JobStore) -> None:
    await enqueue_for_all(store, 3)
    first, second, *others = await job_store.claim(
        ("default",), worker="w", limit=9, lease_seconds=60
    )
    for job in (first, *others):
        await job_store.save_step(job.lease, "mail", "1", worker="w")
    assert await job_store.retry(second, worker="w", reason="e", error="e", delay_seconds=9)
    assert await job_store.dead_letter(first, worker="w", reason="e", error="e")
    await job_store.complete_alone([(job.lease, None) for job in others], worker="w")

    async def clean(what: str) -> list[int]:
        return [
            await job_store.clean(f"clean_{what}", older_than_seconds=-9, limit=4) for _ in range(3)
        ]

    # Those of a waiting job and of a dead letter that was not requeued are kept.
    assert await clean("completions") == [4, 3, 0]
    assert await clean("steps") == [4, 3, 0]
    assert await clean("failures") == [0, 0, 0]
    assert await clean("dead_letters") == [0, 0, 0]
    assert await job_store.requeue(first.lease.tenant, first.lease.job_id, actor="a")
    assert await clean("dead_letters") == [1, 0, 0]
    assert await clean("steps") == [0, 0, 0]
