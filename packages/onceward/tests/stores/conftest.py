"""PostgreSQL databases for all tests of stores, emptied before each: to make one is slow."""

import asyncio
from collections.abc import Iterator

import pytest

from onceward import open_store
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.reset_db import drop_postgres_tables, empty_postgres


@pytest.fixture(scope="session")
def stores_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("stores")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
def clean_postgres_url(postgres: RealPostgres, stores_database: str) -> str:
    """Return the URL of a database without tables."""
    postgres.start()  # a test before this one may have stopped it
    drop_postgres_tables(stores_database)
    return stores_database


@pytest.fixture(scope="session")
def migrated_database(postgres: RealPostgres) -> Iterator[str]:
    async def migrate() -> None:
        store = open_store(url)
        await store.open()
        await store.close()

    postgres.start()
    url = postgres.create_database("migrated")
    asyncio.run(migrate())
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
async def migrated_postgres_url(postgres: RealPostgres, migrated_database: str) -> str:
    """Return the URL of a database with Onceward's tables, which are empty.

    For tests of what is done with them: to create them takes longer than most tests.
    """
    postgres.start()
    await empty_postgres(migrated_database, keep_tables=False)
    return migrated_database
