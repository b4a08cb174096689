"""Databases for tests that run on SQLite and PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.harness import fresh_database


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("lab")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)
