from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.citus import ON_CITUS, empty_citus
from packages.onceward.tests.support.harness import fresh_database
from packages.operator.tests.console.lab import ConsoleLab


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("console")
    yield url
    postgres.start()
    postgres.drop_database(url)


@asynccontextmanager
async def opened(lab: ConsoleLab) -> AsyncIterator[ConsoleLab]:
    try:
        await lab.onceward.open()
        yield lab
    finally:
        await lab.onceward.close()


@pytest.fixture(params=("sqlite", "postgresql", *ON_CITUS))
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConsoleLab]:
    if request.param == "citus":
        url = await empty_citus()
    else:
        url = await fresh_database(request, tmp_path, request.param)
    async with opened(ConsoleLab(url)) as lab:
        yield lab


@pytest.fixture
async def sqlite_lab(tmp_path: Path) -> AsyncIterator[ConsoleLab]:
    """For what does not depend on the database."""
    async with opened(ConsoleLab(f"sqlite:///{tmp_path}/lab.db")) as lab:
        yield lab
