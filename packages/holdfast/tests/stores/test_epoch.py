"""A replay never outlives its row: after a restore or a failover, the same key runs again."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from holdfast import Holdfast
from holdfast.testing.servers import RealPostgres
from packages.holdfast.tests.support.harness import HeldClock
from packages.holdfast.tests.support.shop import CREATE, make_app

KEY = "the-key-of-a-lost-order"


@dataclass
class Server:
    """One process: an app with its caches."""

    app: FastAPI
    holdfast: Holdfast

    async def order(self, key: str = KEY) -> tuple[str, bool]:
        """Return the id of the order, and whether it was a replay. A lost connection is retried."""
        transport = httpx.ASGITransport(self.app)
        headers = {"Idempotency-Key": key, "X-Tenant": "ada"}
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            for _ in range(50):
                response = await client.post("/orders", json={"item": "boots"}, headers=headers)
                if response.status_code != 503:
                    break
                await asyncio.sleep(0.02)
        assert response.status_code == 201, response.text
        return response.json()["id"], "idempotency-replayed" in response.headers

    async def orders(self) -> set[str]:
        return {row["id"] for row in await self.holdfast.store.read("SELECT id FROM orders")}


@asynccontextmanager
async def servers(
    url: str, *caches: str | None, clock: HeldClock | None = None
) -> AsyncIterator[list[Server]]:
    """Start one server for each cache: the URL of a Redis, or None for memory only."""
    clock = clock or HeldClock()
    running = []
    for redis in caches:
        app, holdfast = make_app(url, redis=redis, clock=clock)
        await holdfast.open()
        await holdfast.store.write(CREATE)
        running.append(Server(app, holdfast))
    try:
        yield running
    finally:
        for server in running:
            await server.holdfast.close()


async def cached_order(running: list[Server]) -> str:
    """Order once; afterwards the response is in the memory of each server, and in Redis."""
    first, was_replayed = await running[-1].order()
    assert not was_replayed
    await running[-1].holdfast.idempotency.close()  # waits for the write to Redis
    for server in running:
        assert await server.order() == (first, True)
        found = server.holdfast.idempotency.memory
        assert len(found) == 1
    return first


async def assert_runs_again(running: list[Server], lost: str) -> None:
    """Check that the first server runs the key again, and that the others replay that one."""
    second, was_replayed = await running[0].order()
    assert (was_replayed, second != lost) == (False, True)
    for server in running:
        assert await server.order() == (second, True)
    orders = await running[0].orders()
    assert second in orders
    assert lost not in orders


@pytest.fixture
def only_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the reading of each second off, so that only a new connection shows a change."""
    monkeypatch.setattr("holdfast.server.cache_epoch._LIFETIME_SECONDS", 3600.0)


@pytest.fixture
def fast_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.core.breaker.Breaker.retry_after", lambda *_: None)


def dump(postgres: RealPostgres, url: str) -> Path:
    file = postgres.directory / f"{urlsplit(url).path[1:]}.dump"
    postgres.run("pg_dump", "--format=custom", f"--file={file}", url)
    return file


def copy_files(source: Path, target: Path) -> None:
    """Copy a directory with the owners of its files."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)


# -- PostgreSQL ----------------------------------------------------------------------------


@pytest.mark.usefixtures("only_new_connections", "fast_breaker")
async def test_dropped_and_restored_database(
    postgres: RealPostgres, postgres_url: str, redis_url: str
) -> None:
    async with servers(postgres_url, None, redis_url, redis_url) as running:
        backup = dump(postgres, postgres_url)
        lost = await cached_order(running)
        postgres.drop_database(postgres_url)
        postgres.run("pg_restore", "--create", f"--dbname={postgres.url()}", str(backup))
        for number, server in enumerate(running):
            await server.order(f"another-key-{number}")  # opens a connection
        await assert_runs_again(running, lost)


async def test_tables_restored_below_open_connections(
    postgres: RealPostgres, postgres_url: str, redis_url: str
) -> None:
    clock = HeldClock()
    async with servers(postgres_url, None, redis_url, clock=clock) as running:
        backup = dump(postgres, postgres_url)
        for how in ("--clean --if-exists", "--data-only"):
            lost = await cached_order(running)
            if how == "--data-only":
                sql = "TRUNCATE holdfast_idempotency_records, orders"
                await running[0].holdfast.store.write(sql)
                postgres.run(
                    "pg_restore", *how.split(), "-t", "orders", f"-d{postgres_url}", str(backup)
                )
            else:
                postgres.run("pg_restore", *how.split(), f"-d{postgres_url}", str(backup))
            clock.pass_by(seconds=1.001)
            await assert_runs_again(running, lost)
            await running[0].holdfast.store.write("TRUNCATE holdfast_idempotency_records, orders")
            clock.pass_by(seconds=1.001)


@pytest.mark.usefixtures("only_new_connections", "fast_breaker")
async def test_data_directory_copied_back(
    postgres: RealPostgres, postgres_url: str, redis_url: str
) -> None:
    data, snapshot = postgres.directory / "data", postgres.directory / "snapshot"
    async with servers(postgres_url, None, redis_url) as running:
        postgres.stop()
        copy_files(data, snapshot)
        postgres.start()
        lost = await cached_order(running)
        async with servers(postgres_url, redis_url) as (later,):
            await later.order("seen-position")
        postgres.stop("immediate")
        shutil.rmtree(data)
        snapshot.rename(data)
        postgres.start()
        # A process that starts now has not seen the WAL position; Redis has kept it.
        async with servers(postgres_url, redis_url) as (later,):
            again, was_replayed = await later.order()
            assert (was_replayed, again != lost) == (False, True)
        for number, server in enumerate(running):
            await server.order(f"another-key-{number}")
            assert await server.order() == (again, True)
        assert lost not in await running[0].orders()
