"""Fixtures: a queue per test, and one server per session."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from onceward_outbox.entry import OnRefusal
from onceward_outbox.settings import QueueSettings
from onceward_protocol.staleness import CAP
from onceward_services.field.outbox_profile import PROFILE as FIELD
from onceward_services.walk.outbox_profile import PROFILE as WALK
from packages.onceward.tests.support.outbox_harness import SECRET
from packages.outbox.tests.queue_harness import Lab
from packages.services.tests.cli.conftest import Server

MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path() -> Iterator[Path]:
    """A directory in memory where there is one: for rules, not for durability."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture
def lab(quick_path: Path) -> Iterator[Lab]:
    """A queue in which entries of every profile expire after the cap."""
    made = Lab(quick_path / "outbox.db", settings=QueueSettings(stale_after=CAP))
    yield made
    made.close()


@pytest.fixture
def stopping_lab(quick_path: Path) -> Iterator[Lab]:
    """A queue whose lanes stop at a refused entry."""
    profiles = [
        dataclasses.replace(profile, on_refusal=OnRefusal.STOP) for profile in (WALK, FIELD)
    ]
    made = Lab(quick_path / "outbox.db", profiles=profiles)
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One real server for all tests that need one; each has users of its own."""
    process = Server(tmp_path_factory.mktemp("server"), "--no-jobs", ONCEWARD_JWT_SECRET=SECRET)
    yield process
    process.close()
