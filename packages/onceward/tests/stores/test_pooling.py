"""Transaction pooling is refused when a store is opened; session pooling is not noticed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward.ports import Store
from onceward.stores.postgres import PostgresStore, connections
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.pooling_proxy import Mode, PoolingProxy

STORES = pytest.mark.parametrize("make", [PostgresStore, PsycopgStore, PsycopgSyncStore])


def through(proxy: PoolingProxy, postgres: RealPostgres, url: str) -> str:
    return url.replace(f":{postgres.port}/", f":{proxy.port}/")


@STORES
@pytest.mark.parametrize("mode", ["last", "same"])
async def test_transaction_pooling_is_refused_with_one_line(
    make: Callable[[str], Store],
    mode: Mode,
    postgres: RealPostgres,
    clean_postgres_url: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(connections, "_NOTIFICATION_SECONDS", 0.2)
    async with PoolingProxy(postgres.port, mode) as proxy:
        store = make(through(proxy, postgres, clean_postgres_url))
        with pytest.raises(ConfigurationError, match="use session pooling") as refused:
            await store.open()
    assert "\n" not in str(refused.value)


@STORES
async def test_session_pooling_is_accepted(
    make: Callable[[str], Store], postgres: RealPostgres, clean_postgres_url: str
):
    async with PoolingProxy(postgres.port, "session") as proxy:
        store = make(through(proxy, postgres, clean_postgres_url))
        await store.open()
        try:
            rows = await asyncio.gather(*(store.read("SELECT 1 AS one") for _ in range(20)))
            assert all(found[0]["one"] == 1 for found in rows)
            # The connection of the check is in the pool, as it was before.
            assert not await store.read("SELECT pg_listening_channels()")
        finally:
            await store.close()


async def test_late_notification_comes_with_the_next_response(
    postgres: RealPostgres, clean_postgres_url: str
):
    """A server that is slow is not taken for a pooler."""
    for make in (PostgresStore, PsycopgStore, PsycopgSyncStore):
        driver: Any = make(clean_postgres_url).driver
        first, second = await driver.connect(), await driver.connect()

        async def notify(other: Any = second) -> None:
            await other.execute("SELECT pg_notify('late', '')")

        assert await driver.is_notified(first, "late", notify, 0.0)
        first.terminate()
        second.terminate()
