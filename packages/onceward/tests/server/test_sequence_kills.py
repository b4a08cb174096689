"""Processes killed with SIGKILL while they run numbered requests: number and record agree."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from onceward.guard.chunk import FAULT_POINTS as CHUNK_POINTS
from onceward.guard.idempotency import FAULT_POINTS
from onceward_protocol.sequence import key_hash
from onceward_testing.fork_server import ForkServer
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.batch_lab import BatchLab, open_batch_lab
from packages.onceward.tests.support.harness import fresh_database
from packages.onceward.tests.support.sequence_processes import (
    NUMBER_USED,
    REFUSED,
    STRICT,
    headers_of,
    items_of,
)
from packages.onceward.tests.support.serving import ROOT


class Kill(NamedTuple):
    """Where a process is killed, and how many numbers of its client are used then."""

    point: str
    times: int
    used: int


SINGLES = [
    Kill(NUMBER_USED, 1, 0),
    Kill("after_commit", 1, 1),
    Kill("after_claim", 3, 2),
    Kill("after_business_write", 3, 2),
    Kill("before_commit", 3, 2),
    Kill(NUMBER_USED, 3, 2),
    Kill("after_commit", 3, 3),
    # The refusal, whose record is committed after the handler was rolled back.
    Kill("after_business_write", REFUSED, REFUSED - 1),
    Kill(NUMBER_USED, REFUSED, REFUSED - 1),
    Kill("after_commit", REFUSED, REFUSED),
]
# Five numbers in chunks of three and two; the last one is the refusal.
BATCHES = [
    Kill("after_claim", 2, 0),
    Kill("chunk_savepoint", 3, 0),
    Kill("after_business_write", 3, 0),
    Kill("chunk_before_commit", 1, 0),
    Kill(NUMBER_USED, 1, 0),
    Kill("chunk_after_commit", 1, 3),
    Kill("chunk_claimed", 2, 3),
    Kill("after_claim", 5, 3),
    Kill("chunk_item_ended", 5, 3),
    Kill(NUMBER_USED, 2, 3),
    Kill("chunk_after_commit", 2, 5),
    Kill("batch_before_response", 1, 5),
]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer("packages.onceward.tests.support.sequence_processes", cwd=ROOT) as server:
        yield server


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("sequence_kills")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return await fresh_database(request, tmp_path, request.param)


def test_every_fault_point_is_killed_at() -> None:
    assert {kill.point for kill in SINGLES} == {NUMBER_USED, *FAULT_POINTS}
    chunk_points = {NUMBER_USED, "after_claim", "after_business_write", *CHUNK_POINTS}
    assert {kill.point for kill in BATCHES} == chunk_points


async def test_single_requests_killed_at_each_fault_point(forks: ForkServer, database: str) -> None:
    async with open_batch_lab(database, policy=STRICT) as lab:
        await kill_all(forks, database, SINGLES, is_batch=False)
        for at, kill in enumerate(SINGLES):
            client = f"c{at}"
            await expect_agreement(lab, client, kill.used, kill)
            for number, one in enumerate(items_of(client), 1):
                response = await lab.single(one, **headers_of(one))
                assert response.status_code == (422 if number == REFUSED else 201), kill
                assert ("idempotency-replayed" in response.headers) is (number <= kill.used), kill
            await expect_agreement(lab, client, len(items_of(client)), kill)
            # Each has run once here, but for those that had a record.
            ran = [name for name in lab.runs if name.startswith(f"{client}-")]
            assert ran == [one["key"] for one in items_of(client)[kill.used :]], kill
        await expect_effects(lab, len(SINGLES))


async def test_batches_killed_at_each_fault_point_of_a_chunk(
    forks: ForkServer, database: str
) -> None:
    async with open_batch_lab(database, policy=STRICT) as lab:
        await kill_all(forks, database, BATCHES, is_batch=True)
        for at, kill in enumerate(BATCHES):
            client = f"c{at}"
            items = items_of(client)
            await expect_agreement(lab, client, kill.used, kill)
            for is_first in (True, False):
                results = await lab.results(items[:REFUSED])
                assert [one["status"] for one in results] == [201, 201, 201, 201, 422], kill
                known = kill.used if is_first else REFUSED
                replayed = [one["replayed"] for one in results]
                assert replayed == [number <= known for number in range(1, REFUSED + 1)], kill
            await expect_agreement(lab, client, REFUSED, kill)
            after = items[REFUSED]
            assert (await lab.single(after, **headers_of(after))).status_code == 201, kill
            await expect_agreement(lab, client, REFUSED + 1, kill)
        await expect_effects(lab, len(BATCHES))


async def kill_all(forks: ForkServer, database: str, kills: list[Kill], *, is_batch: bool) -> None:
    """Run one process for each; client ``c0`` is that of the first."""
    calls = [
        (
            "send",
            {
                "database": database,
                "client": f"c{at}",
                "is_batch": is_batch,
                "point": kill.point,
                "times": kill.times,
            },
        )
        for at, kill in enumerate(kills)
    ]
    codes = await asyncio.to_thread(forks.run, *calls)
    assert codes == [-signal.SIGKILL] * len(kills)


async def expect_agreement(lab: BatchLab, client: str, used: int, kill: Kill) -> None:
    """Expect as many records as numbers, each number with the key of its record."""
    keys = [one["key"] for one in items_of(client)[:used]]
    assert (
        await column(
            lab,
            "onceward_idempotency_records",
            "idempotency_key",
            f"idempotency_key LIKE '{client}-%'",
        )
        == keys
    ), kill
    hashes = await column(
        lab, "onceward_sequence_numbers", "key_hash", f"client_id = '{client}'", by="number"
    )
    assert hashes == [key_hash(key) for key in keys], kill
    last = await column(lab, "onceward_sequences", "last_number", f"client_id = '{client}'")
    assert last == ([used] if used else []), kill


async def column(lab: BatchLab, table: str, name: str, where: str, by: str = "") -> list[Any]:
    statement = f"SELECT {name} AS found FROM {table} WHERE {where} ORDER BY {by or name}"
    store = lab.onceward.store
    return [row["found"] for row in await store.read(store.table_names.render(statement))]


async def expect_effects(lab: BatchLab, clients: int) -> None:
    """Expect each request to have had its effect once, and the refused ones none."""
    items = [one for at in range(clients) for one in items_of(f"c{at}")]
    assert await lab.names() == sorted(one["key"] for one in items if not one["body"]["do"])
