"""Tests of jobs by NATS use the databases and the lab of the tests of jobs."""

from collections.abc import Iterator

import pytest

from onceward_testing.servers import RealNats
from packages.nats.tests.nats_harness import NatsLab
from packages.onceward.tests.jobs.conftest import (
    another_store,
    clean_jobs_url,
    database,
    effect_lab,
    jobs_database,
    lab,
)

__all__ = ["another_store", "clean_jobs_url", "database", "effect_lab", "jobs_database", "lab"]


@pytest.fixture
def nats(nats_server: RealNats) -> NatsLab:
    nats_server.start()
    return NatsLab(nats_server.url())


@pytest.fixture(scope="session")
def faulty_nats() -> Iterator[RealNats]:
    with RealNats() as server:
        yield server


@pytest.fixture
def own_nats(faulty_nats: RealNats) -> Iterator[RealNats]:
    """Return a server that a test may freeze and stop, and whose files it may delete."""
    faulty_nats.start()
    yield faulty_nats
    faulty_nats.thaw()
