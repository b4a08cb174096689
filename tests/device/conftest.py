"""A queue for each test that asks for one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.queue_lab import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path / "outbox.db")
    yield made
    made.queue.close()
