"""A planning server on both databases."""

from collections.abc import AsyncIterator

import pytest

from packages.services.tests.conftest import Serve

from .fixtures import OpenPlanning, PlanningServer, opener


@pytest.fixture
def open_planning(serve: Serve, database_url: str, monkeypatch: pytest.MonkeyPatch) -> OpenPlanning:
    """Return ``open_planning(**settings)``, an async context manager of a server."""
    return opener(serve, database_url, monkeypatch)


@pytest.fixture
async def planning(open_planning: OpenPlanning) -> AsyncIterator[PlanningServer]:
    async with open_planning() as opened:
        yield opened


@pytest.fixture
async def sqlite_planning(
    serve: Serve, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PlanningServer]:
    """For tests that do not depend on the database."""
    async with opener(serve, sqlite_url, monkeypatch)() as opened:
        yield opened
