"""The functions for Citus do what those for one PostgreSQL do; on plain PostgreSQL.

The statements that use the others of them find what those for one PostgreSQL find.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from onceward import open_store
from onceward.jobs.admin import JobAdmin
from onceward.jobs.job import LeasedJob
from onceward.jobs.job_store import JobStore
from onceward.jobs.published_jobs import PublishedJobs
from onceward.ports import Row, Store
from onceward.stores.parts import JOBS
from onceward.stores.sql_loader import load_queries
from onceward.tenants import ALL_TENANTS, TenantFilter
from onceward_operator.console.jobs import job_sql
from onceward_operator.record_search import RecordPlace, find_records
from onceward_testing.samples import NOW, a_record, commit
from packages.onceward.tests.support.citus import functions_for_citus
from packages.onceward.tests.support.jobs_harness import JobsLab

TENANTS = ("ada", "bob", "eve")


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[Store]:
    store = open_store(postgres_url)
    store.schema.want(JOBS)
    await store.open()
    await replace_functions(store)
    yield store
    await store.close()


async def replace_functions(store: Store) -> None:
    unit = await store.begin()
    for function in functions_for_citus():
        await unit.statements.execute(function)
    await unit.commit(None, None)


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

    published = PublishedJobs(job_store)

    async def to_publish() -> Sequence[Row]:
        return await published.to_publish(("default",), front=9, limit=9, again_after_seconds=60)

    jobs = await to_publish()
    assert len(jobs) == 6
    await published.mark_published(jobs)
    assert not await to_publish()
    assert await published.reset_published() == 6
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
    of = first.lease
    assert await JobAdmin(store).requeue(of.job_id, tenant=of.tenant, actor="a")
    assert await clean("dead_letters") == [1, 0, 0]
    assert await clean("steps") == [0, 0, 0]


async def test_copied_functions_differ_only_in_the_commit(
    postgres_url: str,
) -> None:
    """Who changes one of them must change the copy, too."""
    store = open_store(postgres_url)
    store.schema.want(JOBS)
    await store.open()

    async def sources() -> dict[str, str]:
        rows = await store.read(
            "SELECT proname, prosrc FROM pg_proc WHERE proname IN ('save_record', 'complete_job')"
        )
        return {row["proname"]: row["prosrc"] for row in rows}

    try:
        before = await sources()
        await replace_functions(store)
        after = await sources()
    finally:
        await store.close()
    added = '    PERFORM "onceward".two_phase_commit();\n'
    assert len(before) == 2
    assert {name: source.replace(added, "") for name, source in after.items()} == before
    assert all(added in source for source in after.values())


# -- statements of the console --------------------------------------------------------------------


@pytest.fixture
def distributed(store: Any, postgres_url: str) -> Any:
    """Return a closed store on the same database, which would be distributed."""
    other: Any = open_store(postgres_url)
    other.table_names = replace(store.table_names, is_distributed=True)
    return other


FIRST = "00000000-0000-0000-0000-000000000000"


@pytest.fixture
async def running(store: Store, job_store: JobStore) -> LeasedJob:
    """Enqueue jobs of several tenants, queues and types; return the one that runs."""
    lab = JobsLab(store)
    for number in range(4):
        for tenant in TENANTS:
            await lab.enqueued("effect", number, tenant=tenant, queue=f"q{number % 2}")
            await lab.enqueued("other", number, tenant=tenant, delay_seconds=60)
    (job,) = await job_store.claim(("default", "q1"), worker="w", limit=1, lease_seconds=60)
    return job


async def test_statement_on_live_jobs_finds_the_same(
    store: Store, distributed: Any, running: LeasedJob
) -> None:
    place = {"after_at": "-infinity", "after_id": FIRST, "scanned": 5, "most": 50}
    found = []
    tenants: tuple[TenantFilter, ...] = (ALL_TENANTS, running.lease.tenant)
    for state, tenant, queue, job_type in itertools.product(
        ("waiting", "running"), tenants, ("", "q1"), ("", "other")
    ):
        values = {**place, "queue": queue, "type": job_type}
        if tenant is not ALL_TENANTS:
            values["tenant"] = str(tenant)
        one, other = [
            await store.read(job_sql(of, "live_jobs", tenant, state=state), values)
            for of in (store, distributed)
        ]
        assert one == other, values
        found.append(len(one))
    assert (min(found), max(found)) == (0, 5)


@pytest.mark.parametrize(("queue", "job_type"), [("", ""), ("q0", ""), ("", "other")])
async def test_statement_on_waiting_jobs_finds_the_same(
    store: Store, distributed: Any, running: LeasedJob, queue: str, job_type: str
) -> None:
    values = {"queue": queue, "type": job_type, "scanned": 50, "most": 50}
    one, other = [
        await store.read(job_sql(of, "matching_waiting", ALL_TENANTS), values)
        for of in (store, distributed)
    ]
    ids = {row["job_id"] for row in one}
    assert ids == {row["job_id"] for row in other}
    assert ids
    assert running.lease.job_id not in ids


async def test_statement_on_tenants_of_a_job_finds_the_same(
    store: Store, distributed: Any, running: LeasedJob
) -> None:
    for job_id, tenants in ((running.lease.job_id, [running.lease.tenant]), (FIRST, [])):
        for of in (store, distributed):
            sql = job_sql(of, "tenants_of_job", ALL_TENANTS)
            rows = await store.read(sql, {"job_id": job_id, "most": 5})
            assert [row["tenant"] for row in rows] == tenants


async def test_depths_of_queues_are_those_of_the_tables(store: Store, job_store: JobStore) -> None:
    await enqueue_for_all(store, 3)
    first, second, *_ = await job_store.claim(("default",), worker="w", limit=4, lease_seconds=60)
    assert await job_store.dead_letter(first, worker="w", reason="e", error="e")
    await job_store.complete_alone([(second.lease, None)], worker="w")
    depths, counted = await JobAdmin(store).capped_depths(most=500, budget=100_000)
    assert counted == 500
    depth = depths["default"]
    assert (depth.waiting, depth.running, depth.dead) == (5, 2, 1)
    assert depth.oldest_seconds > 0
    depths, counted = await JobAdmin(store).capped_depths(most=4, budget=100_000)
    assert (depths["default"].waiting, counted) == (4, 4)


async def test_statements_on_records_find_the_same(store: Store, distributed: Any) -> None:
    for number in range(4):
        for tenant in TENANTS:
            at = NOW + timedelta(seconds=number)
            name = f"endpoint-{number % 2}"
            record = a_record(f"key-{number}", tenant=tenant, endpoint=name, created_at=at)
            await commit(store, record, now=at)
    distributed.read = store.read
    pages = []
    for before in (None, NOW + timedelta(seconds=3)):
        after = None
        for _ in range(4):
            page, same = [
                await find_records(of, tenant=None, filters={}, before=before, after=after, limit=5)
                for of in (store, distributed)
            ]
            assert page == same
            pages.append(len(page))
            if page:
                after = RecordPlace(page[-1].created_at, *page[-1].id)
    assert pages == [5, 5, 2, 0, 5, 4, 0, 0]


async def test_statement_on_tenants_finds_the_same(store: Store, distributed: Any) -> None:
    for tenant in TENANTS:
        for number in range(2):
            await commit(store, a_record(f"key-{number}", tenant=tenant))
    for after, tenants in (("", ["ada", "bob"]), ("bob", ["eve"]), ("eve", [])):
        for of in (store, distributed):
            sql = load_queries("onceward_operator.console", "tenants.sql", names=of.table_names)[
                "tenants"
            ]
            rows = await store.read(sql, {"after": after, "limit": 2})
            assert [row["tenant"] for row in rows] == tenants
