"""Promotion of a standby, with a URL of both servers: which one is used, and what is forgotten."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest

from onceward.errors import CommitUnknownError, StoreUnavailableError
from onceward.guard.caches import CacheEpoch, RecordLruCache
from onceward.stores.postgres import PostgresStore
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.redis import RedisRecords
from onceward_protocol.clock import SystemClock
from onceward_testing.postgres_pair import PairedPostgres, RealPostgresPair
from onceward_testing.samples import NOW, a_record, claimed, commit
from packages.onceward.tests.support.standby import HANG_SECONDS

pytestmark = pytest.mark.xdist_group("failover")

STORES: dict[str, Callable[..., Any]] = {
    "asyncpg": PostgresStore,
    "psycopg": PsycopgStore,
    "psycopg, sync": PsycopgSyncStore,
}
SHORT: dict[str, Any] = {"max_connections": 4, "acquire_seconds": 3, "connect_seconds": 2}
# Without a limit that would end them.
PATIENT = dict.fromkeys(("claim_seconds", "statement_seconds", "commit_seconds"), 600)
# The two that share no pool; ``make proof`` tries all of them.
DRIVERS = list(STORES) if "ONCEWARD_TEST_ROUNDS" in os.environ else ["asyncpg", "psycopg, sync"]


@pytest.fixture(scope="module")
def pair() -> Iterator[RealPostgresPair]:
    with RealPostgresPair() as started:
        yield started


@pytest.fixture
def url(pair: RealPostgresPair) -> Iterator[str]:
    """Return a new database, whose URL names both servers; the standby follows the primary."""
    if not pair.is_in_sync:
        pair.rewind()
    yield pair.create_database()
    pair.thaw()


@asynccontextmanager
async def opened(driver: str, url: str, **options: Any) -> AsyncIterator[Any]:
    store = STORES[driver](url, **(SHORT | options))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def commit_soon(store: Any, key: str) -> None:
    """Commit a record as soon as there is a server for it."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            with suppress(StoreUnavailableError):
                await commit(store, a_record(key=key))
                return
            await asyncio.sleep(0.01)


async def port_of(store: Any) -> int:
    rows = await store.read("SELECT inet_server_port() AS port")
    return int(rows[0]["port"])


async def keys_on(server: PairedPostgres, url: str) -> set[str]:
    connection = await asyncpg.connect(server.url(url.rpartition("/")[2].partition("?")[0]))
    rows = await connection.fetch("SELECT idempotency_key FROM onceward.idempotency_records")
    await connection.close()
    return {row[0] for row in rows}


async def test_frozen_first_host_does_not_keep_stores_from_the_promoted_one(
    pair: RealPostgresPair, url: str
) -> None:
    async with AsyncExitStack() as stack:
        stores = {
            driver: await stack.enter_async_context(opened(driver, url, **PATIENT))
            for driver in DRIVERS
        }
        commits: list[asyncio.Task[None]] = []
        units = []
        for driver, store in stores.items():
            await commit(store, a_record(key=f"before {driver}"))
            record = a_record(key=f"during {driver}")
            units.append((await claimed(store, record.id), record))
        pair.freeze_primary()
        # No request opens a connection: the stores look for a promoted server by themselves.
        commits += [asyncio.create_task(unit.commit(record, None)) for unit, record in units]
        await asyncio.to_thread(pair.fail_over)
        async with asyncio.timeout(HANG_SECONDS):
            results = await asyncio.gather(*commits, return_exceptions=True)
        assert {type(result) for result in results} == {CommitUnknownError}
        for driver, store in stores.items():
            await commit_soon(store, f"after {driver}")
            before = a_record(key=f"before {driver}")
            assert await store.find(before.id, NOW) == before
        # The old primary is back, and says that it is writable.
        pair.thaw()
        for driver, store in stores.items():
            for number in range(6):
                await commit(store, a_record(key=f"thawed {driver} {number}"))
        # A new process has seen no timeline yet.
        async with opened("psycopg", url) as new:
            assert await port_of(new) == pair.primary.port
        known = {f"{when} {driver}" for when in ("before", "during") for driver in DRIVERS}
        assert await keys_on(pair.standby, url) <= known


@pytest.mark.parametrize("driver", DRIVERS)
async def test_store_that_opens_during_a_promotion_keeps_no_connection_to_the_old_server(
    pair: RealPostgresPair, url: str, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first connection is older than what it knows of its servers."""
    store = STORES[driver](url, **SHORT)
    migrate = store._migrate

    async def promote_and_migrate() -> None:
        pair.freeze_primary()
        await asyncio.to_thread(pair.fail_over)
        await migrate()
        pair.thaw()  # and says that it is writable

    monkeypatch.setattr(store, "_migrate", promote_and_migrate)
    await store.open()
    try:
        ports = await asyncio.gather(*(port_of(store) for _ in range(8)))
    finally:
        await store.close()
    assert set(ports) == {pair.primary.port}


async def test_rewound_primary_is_used_and_memory_and_redis_are_dropped_after_a_promotion(
    pair: RealPostgresPair, url: str, redis_url: str
) -> None:
    async with opened("asyncpg", url) as store:
        await commit(store, a_record(key="before"))
        memory = RecordLruCache(1024 * 1024)
        cache = RedisRecords(redis_url, environment="test", secret=store.secret, timeout_seconds=30)
        epoch = CacheEpoch(store, SystemClock(), memory.clear, positions=cache)
        await epoch.check()
        known, record = epoch.current, a_record(key="known to the caches only")
        assert known.value is not None
        memory.put(record, known)
        await cache.put(record, NOW, epoch=known.value)
        assert memory.get(record.id, NOW, known) == record
        assert await cache.get(record.id, NOW, epoch=known.value) == record
        rewound = pair.standby  # by ``url``, after the other test
        pair.kill_primary()
        pair.fail_over()
        await commit_soon(store, "after")
        assert await port_of(store) == rewound.port
        assert await keys_on(rewound, url) == {"before", "after"}
        await epoch.check()
        assert epoch.current.value not in (None, known.value)
        assert memory.get(record.id, NOW, epoch.current) is None
        assert await cache.get(record.id, NOW, epoch=str(epoch.current.value)) is None
        await epoch.close()
        await cache.close()
