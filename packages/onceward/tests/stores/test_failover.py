"""COMMIT that waits for a standby, and silent servers, with each driver."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from onceward import SINGLE_TENANT, Onceward
from onceward.errors import CommitUnknownError, ConfigurationError, StoreUnavailableError
from onceward.jobs.context import JobContext
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job_store import JobStore
from onceward.observability.metrics import PrometheusMetrics
from onceward.ports import Found, Held, UnitOfWork
from onceward.records import Record
from onceward.stores.postgres import PostgresStore
from onceward.stores.postgres import store as store_module
from onceward.stores.postgres.asyncpg_driver import AsyncpgDriver
from onceward.stores.postgres.driver import Deadlines
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward_testing.samples import NOW, a_record, claimed, commit
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.pooling_proxy import PoolingProxy
from packages.onceward.tests.support.standby import (
    HANG_SECONDS,
    WAITING,
    absent_standby,
    set_standbys,
    until_waiting,
)

pytestmark = pytest.mark.xdist_group("failover")

STORES: dict[str, Callable[..., Any]] = {
    "asyncpg": PostgresStore,
    "psycopg": PsycopgStore,
    "psycopg, sync": PsycopgSyncStore,
}
SHORT: dict[str, Any] = {
    "max_connections": 4,
    "acquire_seconds": 3,
    "connect_seconds": 2,
    "claim_seconds": 1,
    "commit_seconds": 1,
    "statement_seconds": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RealPostgres]:
    """Return a server of its own: all its commits wait."""
    with RealPostgres() as started:
        yield started


@pytest.fixture
def url(server: RealPostgres) -> str:
    return server.create_database()


# ``make proof`` tries all drivers everywhere. The two that share no pool, or one where the drivers
# differ in nothing that matters, are enough for each change.
IS_PROOF = "ONCEWARD_TEST_ROUNDS" in os.environ
any_driver = pytest.mark.parametrize(
    "driver", list(STORES) if IS_PROOF else ["asyncpg"], indirect=True
)


@pytest.fixture(params=list(STORES) if IS_PROOF else ["asyncpg", "psycopg, sync"])
def driver(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def opened(driver: str, url: str, **options: Any) -> AsyncIterator[Any]:
    store = STORES[driver](url, **(SHORT | options))
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def committing(store: Any, record: Record) -> "asyncio.Task[None]":
    """Claim a key and begin to commit a record."""
    unit: UnitOfWork = await claimed(store, record.id)
    return asyncio.create_task(unit.commit(record, None))


async def test_commit_whose_wait_was_cancelled_is_unknown_and_not_replayed(
    driver: str, url: str
) -> None:
    record = a_record()
    async with opened(driver, url, commit_seconds=30) as store, absent_standby(url) as observer:
        task = await committing(store, record)
        (pid,) = await until_waiting(observer)
        await observer.fetch("SELECT pg_cancel_backend($1)", pid)
        with pytest.raises(CommitUnknownError) as unknown:
            await asyncio.wait_for(task, HANG_SECONDS)
        assert not unknown.value.is_cut
        # It can be read, and would be lost if a standby were promoted now.
        async with opened(driver, url) as other:
            with pytest.raises(StoreUnavailableError) as unavailable:
                await other.claim(record.id, NOW)
            assert unavailable.value.reason == "outcome_unknown"
            await set_standbys(observer, "")
            assert await other.claim(record.id, NOW) == Found(record)


async def test_cancelled_task_leaves_its_commit_waiting(driver: str, url: str) -> None:
    record = a_record()
    async with opened(driver, url, commit_seconds=30) as store, absent_standby(url) as observer:
        task = await committing(store, record)
        waiting = await until_waiting(observer)
        other = await store.begin()
        idle = await other.statements.fetch_one("SELECT pg_backend_pid() AS pid")
        await other.rollback()
        task.cancel()
        with suppress(asyncio.CancelledError, CommitUnknownError):
            await asyncio.wait_for(task, HANG_SECONDS)
        # The server has responded: idle connections stay open.
        alive = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1"
        assert await observer.fetchval(alive, idle["pid"]) == 1
        # A request to cancel would have arrived before these statements on a new connection.
        assert isinstance(await store.claim(record.id, NOW), Held)
        assert [row["pid"] for row in await observer.fetch(WAITING)] == waiting
        assert store.abandoned_commits == 1
        await set_standbys(observer, "")
        async with asyncio.timeout(HANG_SECONDS):
            while await store.claim(record.id, NOW) != Found(record):
                await asyncio.sleep(0.02)


async def test_commit_that_takes_too_long_is_cut_and_counted(driver: str, url: str) -> None:
    async with (
        opened(driver, url, max_connections=2) as store,
        absent_standby(url) as observer,
    ):
        record = a_record()
        with pytest.raises(CommitUnknownError) as unknown:
            await asyncio.wait_for(await committing(store, record), HANG_SECONDS)
        assert unknown.value.is_cut
        assert len(await observer.fetch(WAITING)) == 1
        assert store.abandoned_commits == 1
        with pytest.raises(StoreUnavailableError, match="still waiting on the server"):
            await store.claim(a_record(key="other").id, NOW)
        await set_standbys(observer, "")
        async with asyncio.timeout(HANG_SECONDS):
            while store.abandoned_commits:
                with suppress(StoreUnavailableError):
                    await store.ping()
                await asyncio.sleep(0.05)
        assert await store.claim(record.id, NOW) == Found(record)


async def test_commits_cut_behind_a_pooler_are_found_on_the_server(
    server: RealPostgres, url: str
) -> None:
    """The pooler gives its clients other process ids than those of the backends."""
    async with (
        PoolingProxy(server.port, "session") as proxy,
        opened(
            "asyncpg", url.replace(f":{server.port}/", f":{proxy.port}/"), max_connections=2
        ) as store,
        absent_standby(url),
    ):
        with pytest.raises(CommitUnknownError):
            await asyncio.wait_for(await committing(store, a_record()), HANG_SECONDS)
        with pytest.raises(StoreUnavailableError, match="still waiting on the server"):
            await store.claim(a_record(key="other").id, NOW)


@any_driver
async def test_record_is_replayed_after_a_restart_only_when_it_is_replicated(
    driver: str, server: RealPostgres, url: str
) -> None:
    record = a_record()
    async with opened(driver, url):  # migrates
        pass
    async with absent_standby(url) as observer:
        async with opened(driver, url) as store:
            task = await committing(store, record)
            await until_waiting(observer)
            await asyncio.to_thread(server.stop, "immediate")
            with pytest.raises(CommitUnknownError):
                await asyncio.wait_for(task, HANG_SECONDS)
        await asyncio.to_thread(server.start)
        async with opened(driver, url) as store:
            with pytest.raises(StoreUnavailableError) as unavailable:
                await store.claim(record.id, NOW)
            assert unavailable.value.reason == "outcome_unknown"
            with pytest.raises(StoreUnavailableError):
                await store.find(record.id, NOW)
            connection = await asyncpg.connect(url)
            await set_standbys(connection, "")
            await connection.close()
            assert await store.claim(record.id, NOW) == Found(record)
            assert await store.find(record.id, NOW) == record


async def test_one_confirming_commit_serves_many_replays(url: str) -> None:
    records = [a_record(key=f"key-{number}") for number in range(20)]
    async with opened("asyncpg", url, commit_seconds=30, max_connections=30) as store:
        for record in records:
            await commit(store, record)
        async with absent_standby(url) as observer:
            await store.read_epoch()
            replays = [asyncio.create_task(store.claim(record.id, NOW)) for record in records]
            await until_waiting(observer)
            done, _ = await asyncio.wait(replays, timeout=0.3)
            assert not done
            assert len(await observer.fetch(WAITING)) == 1
            await set_standbys(observer, "")
            found = await asyncio.wait_for(asyncio.gather(*replays), HANG_SECONDS)
        assert found == [Found(record) for record in records]


@any_driver
async def test_statement_that_commits_by_itself_is_not_reported_as_done(
    driver: str, url: str
) -> None:
    async with opened(driver, url, statement_seconds=30) as store:
        await store.write("CREATE TABLE boots (id int)")
        async with absent_standby(url) as observer:
            await store.read_epoch()
            task = asyncio.create_task(store.write("INSERT INTO boots VALUES (1)"))
            (pid,) = await until_waiting(observer)
            await observer.fetch("SELECT pg_cancel_backend($1)", pid)
            with pytest.raises(StoreUnavailableError) as unavailable:
                await asyncio.wait_for(task, HANG_SECONDS)
            assert unavailable.value.reason == "outcome_unknown"


async def test_frozen_server_fails_each_call_and_recovers_after_the_thaw(
    driver: str, server: RealPostgres, url: str
) -> None:
    # Of the claims, two get a connection, and the others would wait for one: as many times two
    # seconds as there are pairs, or ten minutes.
    waiting = [a_record(key=f"waiting-{number}") for number in range(60)]
    async with opened(driver, url, acquire_seconds=600) as store:
        held = await claimed(store, a_record(key="held").id)
        in_commit = a_record(key="in-commit")
        unit = await claimed(store, in_commit.id)
        with server.frozen():
            calls = [
                unit.commit(in_commit, None),
                held.statements.fetch_all("SELECT 1"),
                store.claim(a_record(key="new").id, NOW),
                store.ping(),
                store.find(a_record().id, NOW),
                store.read_epoch(),
                *(store.claim(each.id, NOW) for each in waiting),
            ]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
            assert isinstance(results[0], CommitUnknownError)
            assert {type(each) for each in results[1:]} == {StoreUnavailableError}
            await held.rollback()
        await commit(store, a_record(key="after"))


async def test_claim_on_an_open_connection_to_a_frozen_server_is_cut(
    driver: str, server: RealPostgres, url: str
) -> None:
    others = dict.fromkeys(("connect_seconds", "statement_seconds", "commit_seconds"), 600)
    async with opened(driver, url, **others) as store:
        await store.ping()
        with server.frozen(), pytest.raises(StoreUnavailableError):
            await asyncio.wait_for(store.claim(a_record().id, NOW), HANG_SECONDS)
        await commit(store, a_record(key="after"))


def test_raw_statement_past_its_limit_ends_in_503(driver: str, url: str) -> None:
    onceward = Onceward(STORES[driver](url, **SHORT), tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app)

    def sleep() -> Any:
        return onceward.transaction.connection.execute("SELECT pg_sleep(30)")

    async def sleep_async() -> None:
        await sleep()

    app.post("/sleep")(onceward.guard()(sleep if driver.endswith(", sync") else sleep_async))

    def other() -> None:
        raise TimeoutError("of another server")

    async def other_async() -> None:
        other()

    app.post("/other-timeout")(
        onceward.guard()(other if driver.endswith(", sync") else other_async)
    )

    with TestClient(app, raise_server_exceptions=False) as client:
        response = client.post("/sleep", headers={"Idempotency-Key": "a"})
        assert response.status_code == 503
        assert response.json()["details"] == {"reason": "unreachable"}
        response = client.post("/other-timeout", headers={"Idempotency-Key": "b"})
        assert response.status_code == 500


async def test_store_that_could_not_open_leaves_no_thread_and_no_timer(driver: str) -> None:
    before = set(threading.enumerate())
    store = STORES[driver]("postgresql://postgres@127.0.0.1:1/none", **SHORT)
    with pytest.raises(StoreUnavailableError):
        await store.open()
    own = {each for each in threading.enumerate() if each.name.startswith("onceward")} - before
    for thread in own:  # stopped threads may still be ending
        await asyncio.to_thread(thread.join, HANG_SECONDS)
    assert not any(thread.is_alive() for thread in own)
    if not store.driver.is_sync:
        looked = store.driver.time.now
        await asyncio.sleep(0.6)  # the pool looks at its deadlines four times a second
        assert store.driver.time.now == looked


@pytest.mark.parametrize("is_cut", [False, True])
async def test_job_whose_commit_waits_has_one_effect(url: str, is_cut: bool) -> None:
    limit = 1 if is_cut else HANG_SECONDS
    store = PostgresStore(url, commit_seconds=limit)
    onceward = Onceward(store, tenants=SINGLE_TENANT)
    has_written, may_end = asyncio.Event(), asyncio.Event()

    @onceward.jobs.handler("greet")
    async def greet(job: JobContext) -> None:
        await job.transaction.execute("INSERT INTO greetings VALUES (1)")
        has_written.set()
        await may_end.wait()

    await onceward.open()
    worker = onceward.worker(lease_seconds=2)
    try:
        await store.write("CREATE TABLE greetings (n int)")
        unit = await store.begin()
        cause = Cause("ada", "ada", "request-1", "correlation-1")
        await JobStore(store).enqueue(unit.statements, new_job("greet", {}, cause=cause))
        await unit.commit(None, None)
        await worker.start()
        await asyncio.wait_for(has_written.wait(), HANG_SECONDS)
        async with absent_standby(url) as observer:
            may_end.set()
            (pid, *_) = await until_waiting(observer)
            if is_cut:
                async with asyncio.timeout(HANG_SECONDS):
                    while not store.abandoned_commits:
                        await asyncio.sleep(0.02)
            else:
                await observer.fetch("SELECT pg_cancel_backend($1)", pid)
            await set_standbys(observer, "")
            async with asyncio.timeout(HANG_SECONDS):
                while await observer.fetchval("SELECT count(*) FROM onceward.jobs"):
                    await asyncio.sleep(0.05)
            assert await observer.fetchval("SELECT count(*) FROM greetings") == 1
            assert await observer.fetchval("SELECT count(*) FROM onceward.dead_letters") == 0
    finally:
        await worker.stop()
        await onceward.close()


async def test_read_only_server_renews_the_pool(url: str) -> None:
    """A server that was demoted refuses to write; it, and others, may be writable again."""
    async with opened("asyncpg", url) as store:
        units: list[Any] = [await claimed(store, a_record(key=key).id) for key in ("a", "b")]
        connections = [unit.connection for unit in units]
        await units[0].statements.execute("SET LOCAL transaction_read_only = on")
        with pytest.raises(StoreUnavailableError):
            await units[0].statements.execute("CREATE TABLE refused ()")
        for unit in units:
            await unit.rollback()
        assert all(connection.is_closed() for connection in connections)
        await commit(store, a_record(key="after"))


async def test_durability_and_cut_commits_are_in_the_metrics(url: str) -> None:
    metrics = PrometheusMetrics()
    store = PostgresStore(url, **SHORT)
    store.report_to(metrics)
    await store.open()

    def values() -> tuple[float | None, float | None]:
        read = metrics.registry.get_sample_value
        return read("onceward_database_replicated"), read("onceward_abandoned_commits")

    try:
        assert values() == (0, 0)
        async with absent_standby(url) as observer:
            await store.read_durability()
            assert values() == (1, 0)
            with pytest.raises(CommitUnknownError):
                await asyncio.wait_for(await committing(store, a_record()), HANG_SECONDS)
            assert values() == (1, 1)
            await set_standbys(observer, "")
            async with asyncio.timeout(HANG_SECONDS):
                while values() != (0, 0):
                    await store.read_durability()
                    await asyncio.sleep(0.05)
    finally:
        await store.close()


@any_driver
async def test_migrations_do_not_wait_for_an_absent_standby_without_a_word(
    driver: str, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_LOCK_SECONDS", 0.1)
    async with absent_standby(url) as observer:
        with pytest.raises(StoreUnavailableError, match="pg_stat_replication"):
            async with opened(driver, url):
                pass
        store = STORES[driver](url, **SHORT)
        second = asyncio.create_task(store.open())
        async with asyncio.timeout(HANG_SECONDS):
            while "waiting for the migrations of another process" not in caplog.text:
                await asyncio.sleep(0.02)
        await set_standbys(observer, "")
        await asyncio.wait_for(second, HANG_SECONDS)
        await store.close()


async def test_required_durability_refuses_to_open_and_to_serve(url: str) -> None:
    strict: dict[str, Any] = {"require_durability": "replicated"}
    async with opened("asyncpg", url):  # migrates
        pass
    async with absent_standby(url) as observer, opened("asyncpg", url, **strict) as store:
        await (await claimed(store, a_record().id)).rollback()
        assert store.is_replicated
        await set_standbys(observer, "")
        await asyncio.sleep(1.1)  # it is read once a second
        with pytest.raises(StoreUnavailableError, match="set synchronous_standby_names") as refused:
            await store.claim(a_record().id, NOW)
        assert refused.value.reason == "not_replicated"
        with pytest.raises(ConfigurationError, match="set synchronous_standby_names"):
            async with opened("asyncpg", url, **strict):
                pass
        await set_standbys(observer, "absent")
        await asyncio.sleep(1.1)
        await (await claimed(store, a_record().id)).rollback()


async def test_connection_cut_between_prepare_and_bind_is_an_outage(postgres_url: str) -> None:
    driver = AsyncpgDriver(postgres_url, Deadlines())
    connection = await driver.connect()
    prepare = connection._get_statement

    async def prepare_and_cut(*arguments: Any, **options: Any) -> Any:
        statement = await prepare(*arguments, **options)
        connection.terminate()
        return statement

    connection._get_statement = prepare_and_cut
    with pytest.raises(driver.outages):
        await connection.fetch("SELECT $1::int", 1)
