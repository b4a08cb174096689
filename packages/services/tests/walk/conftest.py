"""A walk server on both databases."""

from collections.abc import AsyncIterator

import pytest

from packages.services.tests.conftest import Serve

from .fixtures import Game, OpenGame, opener
from .step_fixtures import Stepping, stepping


@pytest.fixture
def open_game(serve: Serve, database_url: str) -> OpenGame:
    """Return ``open_game``: ``async with open_game(walk_energy_required=True) as game``."""
    return opener(serve, database_url)


@pytest.fixture
async def game(open_game: OpenGame) -> AsyncIterator[Game]:
    async with open_game() as opened:
        yield opened


@pytest.fixture
async def sqlite_game(serve: Serve, sqlite_url: str) -> AsyncIterator[Game]:
    """For tests that do not depend on the database."""
    async with opener(serve, sqlite_url)() as opened:
        yield opened


@pytest.fixture
async def steps(open_game: OpenGame) -> AsyncIterator[Stepping]:
    async with stepping(open_game) as opened:
        yield opened
