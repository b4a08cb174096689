"""The metrics of an app on PostgreSQL: queues, waits for connections, failed commits."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest
from fastapi import FastAPI, Response
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from onceward import GuardConfig, JobContext, Onceward, Principal, open_store
from onceward.frameworks.starlette import Tx
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import Store
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.observability.test_metrics import samples


@pytest.fixture
def url(postgres: RealPostgres) -> Iterator[str]:
    postgres.start()
    url = postgres.create_database("metrics")
    yield url
    postgres.drop_database(url)


async def cut(url: str, pid: int) -> None:
    """End a connection on the server, as an administrator or a failover would."""
    connection = await asyncpg.connect(url)
    await connection.execute("SELECT pg_terminate_backend($1, 5000)", pid)
    await connection.close()


class Shop:
    """An app with one guarded operation and one job, which may lose their connection."""

    def __init__(self, store: Store, url: str) -> None:
        self.has_lost = False
        self.metrics = PrometheusMetrics()
        self.onceward = Onceward(
            store,
            config=GuardConfig(metrics=self.metrics),
            identify=lambda _head: Principal("ada", "ada"),
        )
        self.app = FastAPI()
        self.onceward.install(self.app)

        @self.app.post("/orders", status_code=201)
        @self.onceward.guard("orders.create")
        async def create(do: str, tx: Tx) -> dict[str, str]:
            row: Any = await tx.fetch_one("SELECT pg_backend_pid() AS pid")
            await self.onceward.enqueue("pack", do, resource_id=do)
            await asyncio.sleep(0.02)
            if do == "cut":
                await cut(url, row["pid"])
            return {"done": do}

        @self.app.get("/metrics")
        def show_metrics() -> Response:
            body, content_type = self.metrics.exposition()
            return Response(body, headers={"content-type": content_type})

        @self.onceward.jobs.handler("pack")
        async def pack(job: JobContext) -> None:
            row: Any = await job.transaction.fetch_one("SELECT pg_backend_pid() AS pid")
            if job.payload == "lose" and not self.has_lost:
                self.has_lost = True
                await cut(url, row["pid"])

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        await self.onceward.open()
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            yield client
        await self.onceward.close()

    async def until(self, name: tuple[str, ...], value: float) -> None:
        async with asyncio.timeout(30):
            while samples(self.metrics).get(name) != value:
                await asyncio.sleep(0.01)


async def post(client: httpx.AsyncClient, do: str) -> int:
    response = await client.post(f"/orders?do={do}", headers={"Idempotency-Key": f"key-{do}"})
    return response.status_code


async def test_metrics_of_an_app_have_its_queues_waits_and_failed_commits(url: str) -> None:
    shop = Shop(open_store(url, max_connections=1), url)
    async with shop.client() as client:
        assert set(await asyncio.gather(post(client, "a"), post(client, "b"))) == {201}
        assert await post(client, "cut") == 503
        assert await post(client, "lose") == 201
        seen = samples(shop.metrics)
        assert seen["onceward_pool_wait_seconds_count",] >= 1
        assert 0 < seen["onceward_pool_wait_seconds_sum",] < 5
        failed = [n for name, n in seen.items() if name[0] == "onceward_commit_failures_total"]
        assert sum(failed) == 1
        assert seen["onceward_jobs", "queue=default", "state=waiting"] == 0, "read at the start"

        await shop.onceward.runtime.depths.report()
        seen = samples(shop.metrics)
        assert seen["onceward_jobs", "queue=default", "state=waiting"] == 3
        assert seen["onceward_job_oldest_seconds", "queue=default"] > 0
        await shop.onceward.runtime.depths.report(max_age_seconds=60)

        worker = shop.onceward.worker(lease_seconds=1)
        await worker.start()
        labels = ("outcome=done", "queue=default", "type=pack")
        await shop.until(("onceward_job_seconds_count", *labels), 3)
        await worker.stop()
        seen = samples(shop.metrics)
        assert (
            sum(
                seen["onceward_commit_failures_total", f"failure={f}", "of=job"]
                for f in ("rolled_back", "unknown")
            )
            == 1
        )
        await shop.onceward.runtime.depths.report(max_age_seconds=60)
        assert seen["onceward_jobs", "queue=default", "state=waiting"] == 3, "not read again"


@pytest.mark.parametrize("is_sync", [False, True], ids=["async", "sync"])
async def test_waits_for_the_pool_of_a_sqlalchemy_engine_are_counted(
    url: str, *, is_sync: bool
) -> None:
    store: Any
    if is_sync:
        engine = create_engine(
            url.replace("postgresql://", "postgresql+psycopg://"), pool_size=1, max_overflow=0
        )
        store = SqlAlchemySyncStore(sessionmaker(engine))
        dispose: Any = engine.dispose
    else:
        async_engine = create_async_engine(
            url.replace("postgresql://", "postgresql+asyncpg://"), pool_size=1, max_overflow=0
        )
        store = SqlAlchemyStore(async_sessionmaker(async_engine, expire_on_commit=False))
        dispose = async_engine.dispose
    metrics = PrometheusMetrics()
    Onceward(store, config=GuardConfig(metrics=metrics, sweep_every_seconds=None))
    await store.open()
    first = await store.begin()
    second = asyncio.create_task(store.begin())
    await asyncio.sleep(0.05)
    assert samples(metrics)["onceward_pool_wait_seconds_count",] == 0
    await first.rollback()
    await (await second).rollback()
    seen = samples(metrics)
    assert seen["onceward_pool_wait_seconds_count",] == 1
    assert seen["onceward_pool_wait_seconds_sum",] >= 0.04
    await store.close()
    if is_sync:
        dispose()
    else:
        await dispose()
