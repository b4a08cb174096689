"""Batches while processes are killed, connections are cut, and PostgreSQL runs out of locks."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import redis.asyncio

from onceward import open_store
from onceward.errors import StoreUnavailableError
from onceward.observability.noop import NullMetrics
from onceward.records import RecordId
from onceward.stores.redis import RedisRecords
from onceward_testing.fork_server import ForkServer
from onceward_testing.samples import NOW
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.batch_lab import BatchLab, item, open_batch_lab
from packages.onceward.tests.support.batch_processes import batch_of
from packages.onceward.tests.support.cut_proxy import LosesTheAnswerTo
from packages.onceward.tests.support.serving import ROOT

# A batch of six items in chunks of three: where it is killed, and how many items are committed.
KILLS = [
    ("after_claim", 1, 0),
    ("after_business_write", 2, 0),
    ("chunk_before_commit", 1, 0),
    ("chunk_after_commit", 1, 3),
    ("after_claim", 5, 3),
    ("chunk_after_commit", 2, 6),
]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    with ForkServer("packages.onceward.tests.support.batch_processes", cwd=ROOT) as server:
        yield server


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_process_killed_at_each_step_of_a_chunk(
    forks: ForkServer, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    is_sqlite = kind == "sqlite"
    database = f"sqlite:///{tmp_path}/lab.db" if is_sqlite else "postgres_url"
    if not is_sqlite:
        database = request.getfixturevalue(database)
    async with open_batch_lab(database) as lab:
        calls = [
            ("send_batch", {"database": database, "name": f"n{at}", "point": point, "times": times})
            for at, (point, times, _) in enumerate(KILLS)
        ]
        codes = await asyncio.to_thread(forks.run, *calls)
        assert codes == [-signal.SIGKILL] * len(KILLS)
        for at, (point, times, committed) in enumerate(KILLS):
            batch = batch_of(f"n{at}")
            sent = [one["key"] for one in batch]
            found = [name for name in await lab.names() if name in sent]
            assert found == sent[:committed], (point, times)
            results = await drain(lab, batch)
            assert [result["status"] for result in results] == [201] * 6
            replayed = [result["replayed"] for result in results]
            assert replayed == [place < committed for place in range(6)], (point, times)
            again = await drain(lab, batch)
            assert [result["replayed"] for result in again] == [True] * 6
            assert [result["body"] for result in again] == [result["body"] for result in results]
        assert await lab.names() == sorted(
            one["key"] for at in range(len(KILLS)) for one in batch_of(f"n{at}")
        )
        assert await lab.count("onceward_audit_events") == 6 * len(KILLS)


async def drain(lab: BatchLab, batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Send what has no result yet until all items have one."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while len(found) < len(batch):
            response = (await lab.post(batch[len(found) :])).json()
            assert response["results"], "the first item always has a result"
            found += response["results"]
            await asyncio.sleep(min(response["retry_after"] or 0, 0.02))
    return found


class CountingMetrics(NullMetrics):
    def __init__(self) -> None:
        self.outcomes: list[str] = []

    def outcome(self, endpoint: str, outcome: str) -> None:
        self.outcomes.append(f"{endpoint} {outcome}")


@pytest.mark.parametrize("is_refused", [False, True])
async def test_others_learn_of_a_chunk_after_its_commit(
    postgres_url: str, redis_url: str, is_refused: bool
) -> None:
    """Memory, Redis, metrics and workers. If the commit is refused, the items run again, alone."""
    store: Any = open_store(postgres_url)
    cache = RedisRecords(redis_url, environment="test", secret=store.secret, timeout_seconds=30)
    metrics = CountingMetrics()
    options: dict[str, Any] = {"around": lambda _: store, "cache": cache, "metrics": metrics}
    async with open_batch_lab(postgres_url, **options) as lab:
        await lab.set_savepoints()
        metrics.outcomes.clear()
        notified: list[str] = []
        lab.onceward.runtime.notifier.notify = lambda: notified.append("jobs")  # type: ignore[method-assign]
        last = "wait orphan job" if is_refused else "wait 422"
        batch = [item("k0", "job"), item("k1"), item("k2", "422"), item("k3", last)]
        sending = asyncio.create_task(lab.results(batch))
        while len(lab.runs) < 4:
            await asyncio.sleep(0.01)
        redis_client = redis.asyncio.from_url(redis_url)

        async def learnt() -> tuple[int, int, int, int]:
            known = [RecordId("ada", "things.create", f"k{at}") for at in range(4)]
            idempotency = lab.onceward.runtime.idempotency
            now, epoch = idempotency.clock.now(), idempotency.epoch.current
            in_memory = [one for one in known if idempotency.memory.get(one, now, epoch)]
            cached = len([key async for key in redis_client.scan_iter("idempo:*:k?")])
            return len(in_memory), cached, len(metrics.outcomes), len(notified)

        assert await learnt() == (0, 0, 0, 0)
        lab.gate.set()
        results = await sending
        statuses = [result["status"] for result in results]
        if is_refused:
            assert statuses[:3] == [201, 201, 422]
            assert statuses[3] >= 500
            assert lab.runs == ["k0", "k1", "k2", "k3"] * 2
            stored = 3
        else:
            assert statuses == [201, 201, 422, 422]
            stored = 4
        async with asyncio.timeout(30):  # Redis is written in the background
            while (await learnt())[1] < stored:
                await asyncio.sleep(0.01)
        assert (await learnt())[0] == stored
        assert notified == ["jobs"]
        counted = Counter(metrics.outcomes)
        assert counted["things.create fresh"] == 2
        assert counted["things.create refused"] == stored - 2
        jobs = await lab.onceward.store.read(
            lab.onceward.store.table_names.render("SELECT count(*) AS n FROM onceward_jobs")
        )
        assert jobs[0]["n"] == 1
        await redis_client.aclose()


@pytest.mark.parametrize("is_delivered", [True, False])
async def test_connection_cut_at_the_commit_of_a_chunk(
    postgres_url: str, is_delivered: bool
) -> None:
    proxy = LosesTheAnswerTo(
        b"COMMIT", postgres_url, after=b"WITH saved", is_delivered=is_delivered
    )
    async with proxy as url, open_batch_lab(url) as lab:
        batch = [item(f"k{at}") for at in range(5)]
        results = await drain(lab, batch)
        assert proxy.cuts >= 1
        assert [result["status"] for result in results] == [201] * 5
        # Committed: what the handlers have responded counts. Not committed: they ran again.
        assert len(lab.runs) == (5 if is_delivered else 10)
        assert sorted(lab.background) == [one["key"] for one in batch]
        again = await drain(lab, batch)
        assert [result["body"] for result in again] == [result["body"] for result in results]
        assert await lab.names() == [one["key"] for one in batch]
        assert await lab.count("onceward_audit_events") == 5


async def test_overlapping_batches_in_any_order_do_not_deadlock(postgres_url: str) -> None:
    """Two processes, many rounds. A claim that waited while it held others would deadlock."""
    seeded = random.Random(20)
    async with open_batch_lab(postgres_url) as one, open_batch_lab(postgres_url) as other:
        for round_ in range(8):
            keys = [item(f"r{round_}-{at:02}") for at in range(12)]
            orders = [keys, keys[::-1], seeded.sample(keys, 12), seeded.sample(keys, 12)]
            sending = [
                drain(lab, order) for lab, order in zip((one, other) * 2, orders, strict=True)
            ]
            singles = (other.single(keys[5]), one.single(keys[7]))
            found = asyncio.gather(*sending)
            alone = await asyncio.gather(*singles)
            statuses = [result["status"] for results in await found for result in results]
            assert [*statuses, *(one.status_code for one in alone)] == [201] * 50
        assert await one.count("effects") == 8 * 12
        deadlocks = await one.onceward.store.read(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        assert deadlocks[0]["deadlocks"] == 0


async def test_chunks_are_capped_so_that_single_requests_get_a_connection(
    postgres_url: str,
) -> None:
    store: Any = open_store(postgres_url, max_connections=4)
    async with open_batch_lab(postgres_url, around=lambda _: store) as lab:
        begin, begun = store.begin_chunk, 0

        async def begin_chunk(**options: Any) -> Any:
            nonlocal begun
            begun += 1
            return await begin(**options)

        store.begin_chunk = begin_chunk
        batches = [[item(f"b{at}-0", "wait"), item(f"b{at}-1")] for at in range(6)]
        sending = [asyncio.create_task(lab.statuses(batch)) for batch in batches]
        while len(lab.runs) < 2:
            await asyncio.sleep(0.01)
        assert (await lab.single(item("alone"))).status_code == 201
        assert begun == store.max_chunks == 2
        lab.gate.set()
        assert await asyncio.gather(*sending) == [[201, 201]] * 6


async def test_ten_thousand_claims_against_a_small_lock_table(
    postgres: RealPostgres, postgres_url: str
) -> None:
    await set_max_locks(postgres, postgres_url, 10)
    try:
        async with open_batch_lab(postgres_url) as lab:
            store: Any = open_store(postgres_url, max_connections=50, acquire_seconds=60)
            await store.open()
            try:
                await fill_lock_table(store, lab)
            finally:
                await store.close()
    finally:
        await set_max_locks(postgres, postgres_url, 64)


async def set_max_locks(postgres: RealPostgres, url: str, most: int) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(f"ALTER SYSTEM SET max_locks_per_transaction = {most}")
    await connection.close()
    postgres.restart()


async def fill_lock_table(store: Any, lab: BatchLab) -> None:
    """Claim 10,000 keys at once, send a batch meanwhile, and free them."""
    chunks = [await store.begin_chunk() for _ in range(50)]
    refusals: list[StoreUnavailableError] = []

    def keys_of(at: int) -> list[RecordId]:
        return [RecordId("bob", "things.create", f"c{at}-{key}") for key in range(200)]

    async def claim(at: int) -> int:
        try:
            return len(await chunks[at].claim(keys_of(at), NOW))
        except StoreUnavailableError as refused:
            refusals.append(refused)
            return 0

    claimed = await asyncio.gather(*(claim(at) for at in range(50)))
    assert set(claimed) == {0, 200}
    assert all("out of shared memory" in str(refused) for refused in refusals)
    assert not any(refused.is_outage for refused in refusals), "the breaker must not count them"
    filler = await asyncpg.connect(lab.database)
    with pytest.raises(asyncpg.OutOfMemoryError):  # the locks before the error are kept
        await filler.execute("SELECT pg_advisory_lock(n) FROM generate_series(1, 1000000) AS n")
    batch = [item(f"k{at:03}") for at in range(200)]
    response = (await lab.post(batch)).json()
    assert [result["status"] for result in response["results"]] == [503]
    assert response["results"][0]["body"]["code"] == "idempotency.store_unavailable"
    assert response["retry_after"] >= 1
    assert (await lab.single(batch[0])).status_code == 503
    assert lab.runs == []
    await filler.close()
    for chunk in chunks:
        await chunk.rollback()
    assert [result["status"] for result in await drain(lab, batch)] == [201] * 200
    assert await lab.names() == [one["key"] for one in batch]
    free = await store.begin_chunk()
    for at in (0, 49):
        assert len(await free.claim(keys_of(at), NOW)) == 200
    await free.rollback()
