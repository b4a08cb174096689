from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from holdfast.testing.servers import RealPostgres
from packages.holdfast.tests.console.lab import ConsoleLab
from packages.holdfast.tests.support.harness import fresh_database


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("console")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=("sqlite", "postgresql"))
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ConsoleLab]:
    lab = ConsoleLab(await fresh_database(request, tmp_path, request.param))
    try:
        await lab.holdfast.open()
        yield lab
    finally:
        await lab.holdfast.close()
