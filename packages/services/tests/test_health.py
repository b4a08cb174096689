"""``/readyz`` says why a database that is replicated, or should be, cannot be used."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from onceward import SINGLE_TENANT, Onceward
from onceward.errors import CommitUnknownError
from onceward.stores.postgres import PostgresStore
from onceward_protocol.clock import SystemClock
from onceward_services.health import router
from onceward_testing.samples import a_record, claimed
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.standby import (
    HANG_SECONDS,
    absent_standby,
    set_standbys,
)

pytestmark = pytest.mark.xdist_group("failover")


@pytest.fixture(scope="module")
def server() -> Iterator[RealPostgres]:
    """Return a server of its own: all its commits wait."""
    with RealPostgres() as started:
        yield started


@asynccontextmanager
async def ready(url: str, **options: Any) -> AsyncIterator[tuple[PostgresStore, httpx.AsyncClient]]:
    """Open a store; yield it, and a client of ``/readyz``."""
    store = PostgresStore(url, max_connections=2, commit_seconds=1, **options)
    app = FastAPI()
    app.include_router(router(Onceward(store, tenants=SINGLE_TENANT), None))
    await store.open()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        try:
            yield store, client
        finally:
            await store.close()


def unavailable(reason: str) -> tuple[int, dict[str, str]]:
    return 503, {"status": "unavailable", "reason": reason}


async def get(client: httpx.AsyncClient) -> tuple[int, Any]:
    response = await client.get("/readyz")
    return response.status_code, response.json()


async def until(client: httpx.AsyncClient, expected: tuple[int, Any]) -> None:
    """Ask until the response is as expected."""
    async with asyncio.timeout(HANG_SECONDS):
        while await get(client) != expected:
            await asyncio.sleep(0.1)


async def test_readiness_follows_the_required_durability(server: RealPostgres) -> None:
    url = server.create_database()
    async with ready(url) as (_, client):  # migrates
        ok = {"status": "ok", "store": "postgresql"}
        assert await get(client) == (200, ok | {"replicated": False})
    async with (
        absent_standby(url) as observer,
        ready(url, require_durability="replicated") as (_, client),
    ):
        assert await get(client) == (200, ok | {"replicated": True})
        await set_standbys(observer, "")
        await until(client, unavailable("the database is not replicated as required"))
        await set_standbys(observer, "absent")
        await until(client, (200, ok | {"replicated": True}))


async def test_readiness_says_that_commits_wait(server: RealPostgres) -> None:
    url = server.create_database()
    async with ready(url) as (store, client), absent_standby(url) as observer:
        record = a_record()
        unit = await claimed(store, record.id)
        with pytest.raises(CommitUnknownError):
            await unit.commit(record, None)
        assert await get(client) == unavailable("too many commits wait for a standby")
        await set_standbys(observer, "")
        await until(client, (200, {"status": "ok", "store": "postgresql", "replicated": False}))


async def test_readiness_says_that_a_frozen_database_does_not_respond(
    server: RealPostgres,
) -> None:
    url = server.create_database()
    async with ready(url) as (_, client):
        with server.frozen():
            assert await get(client) == unavailable("the store does not respond")
        await until(client, (200, {"status": "ok", "store": "postgresql", "replicated": False}))


async def test_readiness_says_that_the_clock_is_wrong(
    server: RealPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SystemClock.now
    monkeypatch.setattr(SystemClock, "now", staticmethod(lambda: right() - timedelta(minutes=2)))
    async with ready(server.create_database("behind")) as (_, client):
        expected = unavailable("the clock of this machine is not that of the database")
        assert await get(client) == expected
