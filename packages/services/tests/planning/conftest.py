"""An office on both databases."""

from collections.abc import AsyncIterator

import pytest

from packages.services.tests.conftest import Serve

from .fixtures import Office, OpenOffice, opener


@pytest.fixture
def open_office(serve: Serve, database_url: str, monkeypatch: pytest.MonkeyPatch) -> OpenOffice:
    """Give ``async with open_office(planning_cache_bytes=0) as office``."""
    return opener(serve, database_url, monkeypatch)


@pytest.fixture
async def office(open_office: OpenOffice) -> AsyncIterator[Office]:
    async with open_office() as opened:
        yield opened


@pytest.fixture
async def sqlite_office(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Office]:
    """For what no database has a say in."""
    async with opener(serve, sqlite_url, monkeypatch)() as opened:
        yield opened
