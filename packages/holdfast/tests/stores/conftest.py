"""One PostgreSQL database for all tests of stores, emptied before each: to make one is slow."""

from collections.abc import Iterator

import asyncpg
import pytest

from holdfast.testing.servers import RealPostgres


@pytest.fixture(scope="session")
def stores_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("stores")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
async def clean_postgres_url(postgres: RealPostgres, stores_database: str) -> str:
    postgres.start()  # a test before this one may have stopped it
    connection = await asyncpg.connect(stores_database)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid();"
        )
        await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    finally:
        await connection.close()
    return stores_database
