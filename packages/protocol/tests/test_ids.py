"""Ids: format and uniqueness across threads and processes."""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from onceward_protocol.ids import new_id, new_request_id, new_uuid4

NOW = datetime(2026, 3, 1, 12, 0, 0, 5000, tzinfo=UTC)


@pytest.fixture
def restless() -> Iterator[None]:
    """Switch threads as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_ids_of_many_threads_are_unique() -> None:
    def some() -> list[str]:
        return [made for _ in range(5_000) for made in (new_request_id(), new_id(NOW))]

    with ThreadPoolExecutor(8) as pool:
        made = [one for ids in pool.map(lambda _: some(), range(8)) for one in ids]
    assert len(set(made)) == len(made) == 80_000


def test_ids_of_a_forked_process_are_unique() -> None:
    new_request_id()  # fills the buffer of random bytes that a fork would share
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_request_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert len(theirs) == 32
    assert theirs != new_request_id()


def test_ids_are_uuids_of_version_7_that_grow_with_time() -> None:
    made = [new_id(NOW + timedelta(milliseconds=n)) for n in range(500)]
    assert made == sorted(made)
    for text in made:
        assert str(UUID(text)) == text
        assert (UUID(text).version, UUID(text).variant) == (7, "specified in RFC 4122")


def test_keys_are_uuids_of_version_4() -> None:
    made = {new_uuid4() for _ in range(500)}
    assert len(made) == 500
    for text in made:
        assert str(UUID(text)) == text
        assert (UUID(text).version, UUID(text).variant) == (4, "specified in RFC 4122")
