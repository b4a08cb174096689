"""Tests of jobs run on SQLite and on one PostgreSQL database, which is emptied before each."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from onceward import open_store
from onceward.jobs.context import JobContext
from onceward.ports import Store
from onceward.stores.parts import JOBS
from onceward_testing.servers import RealPostgres
from packages.nats.tests.nats_harness import faulty_nats, nats, own_nats
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.jobs_harness import JobsLab, make_effects, write_effect
from packages.onceward.tests.support.reset_db import empty_postgres

__all__ = ["faulty_nats", "nats", "own_nats"]

OpenStore = Callable[[], Awaitable[Store]]


@pytest.fixture(scope="session")
def jobs_database(postgres: RealPostgres) -> Iterator[str]:
    postgres.start()
    url = postgres.create_database("jobs")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
async def clean_jobs_url(postgres: RealPostgres, jobs_database: str) -> str:
    postgres.start()  # a test before this one may have stopped it
    await empty_postgres(jobs_database)
    return jobs_database


@pytest.fixture(params=["sqlite", "postgresql", *ON_CITUS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/jobs.db"
    if request.param == "citus":
        return str(request.getfixturevalue("citus_url"))
    return str(request.getfixturevalue("clean_jobs_url"))


@pytest.fixture
async def lab(database: str) -> AsyncIterator[JobsLab]:
    store = open_store(database)
    store.schema.want(JOBS)
    await store.open()
    await make_effects(store)
    lab = JobsLab(store)
    yield lab
    await lab.stop_workers()
    await store.close()


@pytest.fixture
async def another_store(lab: JobsLab, database: str) -> AsyncIterator[OpenStore]:
    """Return a function that opens stores on the same database, as other processes would."""
    opened: list[Store] = []

    async def another() -> Store:
        store = open_store(database)
        await store.open()
        opened.append(store)
        return store

    yield another
    await lab.stop_workers()  # before the stores they work on
    for store in opened:
        await store.close()


@pytest.fixture
def effect_lab(lab: JobsLab) -> JobsLab:
    """Return a lab whose one handler writes an effect."""

    @lab.jobs.handler("effect")
    async def effect(job: JobContext) -> None:
        await write_effect(job)

    return lab
