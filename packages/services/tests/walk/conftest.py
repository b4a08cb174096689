"""A world for walkers, on both databases."""

from collections.abc import AsyncIterator

import pytest

from packages.services.tests.conftest import Serve

from .fixtures import OpenWorld, World, opener
from .step_fixtures import Stepping, stepping


@pytest.fixture
def open_world(serve: Serve, database_url: str) -> OpenWorld:
    """Give ``async with open_world(walk_energy_required=True) as world``."""
    return opener(serve, database_url)


@pytest.fixture
async def world(open_world: OpenWorld) -> AsyncIterator[World]:
    async with open_world() as opened:
        yield opened


@pytest.fixture
async def sqlite_world(serve: Serve, sqlite_url: str) -> AsyncIterator[World]:
    """For what no database has a say in."""
    async with opener(serve, sqlite_url)() as opened:
        yield opened


@pytest.fixture
async def steps(open_world: OpenWorld) -> AsyncIterator[Stepping]:
    async with stepping(open_world) as opened:
        yield opened
