"""A replay never outlives its row: after a restore or a failover, the same key runs again."""

import asyncio
import logging
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg
import httpx
import msgspec
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from onceward import Onceward
from onceward.errors import StoreUnavailableError
from onceward.ports import Claimed, EpochReading
from onceward.records import Record, RecordId
from onceward.stores.postgres import PostgresStore
from onceward.stores.postgres.epoch import EpochReader
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.redis import RedisRecords
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward.stores.sqlite import SqliteStore
from onceward.stores.table_names import TableNames
from onceward_operator.sqlite_backup import back_up
from onceward_testing.samples import NOW, a_record
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.shop import CREATE, make_app

KEY = "the-key-of-a-lost-order"

NAMES = TableNames.chosen(None, None, is_sqlite=False)


@dataclass
class Server:
    """One process: an app with its caches."""

    app: FastAPI
    onceward: Onceward

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
        return {row["id"] for row in await self.onceward.store.read("SELECT id FROM orders")}


@asynccontextmanager
async def servers(
    url: str, *caches: str | None, clock: HeldClock | None = None
) -> AsyncIterator[list[Server]]:
    """Start one server for each cache: the URL of a Redis, or None for memory only."""
    clock = clock or HeldClock()
    running = []
    for redis in caches:
        app, onceward = make_app(url, redis=redis, clock=clock)
        await onceward.open()
        await onceward.store.write(CREATE)
        running.append(Server(app, onceward))
    try:
        yield running
    finally:
        for server in running:
            await server.onceward.close()


async def cached_order(running: list[Server]) -> str:
    """Order once; afterwards the response is in the memory of each server, and in Redis."""
    first, was_replayed = await running[-1].order()
    assert not was_replayed
    await running[-1].onceward.runtime.idempotency.close()  # waits for the write to Redis
    for server in running:
        assert await server.order() == (first, True)
        found = server.onceward.runtime.idempotency.memory
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


@pytest.fixture(autouse=True)
def patient_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a reading as long as it takes: on a busy machine, to open a file again is slow."""
    monkeypatch.setattr("onceward.guard.caches._WAIT_SECONDS", 30.0)


@pytest.fixture
def only_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the reading of each second off, so that only a new connection shows a change."""
    monkeypatch.setattr("onceward.guard.caches._LIFETIME_SECONDS", 3600.0)


@pytest.fixture
def fast_breaker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onceward.stores.breaker.Breaker.retry_after", lambda *_: None)


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
        for how in ("--clean --if-exists --single-transaction", "--data-only"):
            lost = await cached_order(running)
            if how == "--data-only":
                sql = "TRUNCATE onceward.idempotency_records, orders"
                await running[0].onceward.store.write(sql)
                postgres.run(
                    "pg_restore", *how.split(), "-t", "orders", f"-d{postgres_url}", str(backup)
                )
            else:
                postgres.run("pg_restore", *how.split(), f"-d{postgres_url}", str(backup))
            clock.pass_by(seconds=1.001)
            await assert_runs_again(running, lost)
            await running[0].onceward.store.write(
                running[0].onceward.store.table_names.render(
                    "TRUNCATE onceward_idempotency_records, orders"
                )
            )
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


@pytest.mark.usefixtures("only_new_connections", "fast_breaker")
async def test_promoted_standby_that_lacks_the_last_commits(
    postgres: RealPostgres, postgres_url: str, redis_url: str
) -> None:
    name = urlsplit(postgres_url).path[1:]
    async with servers(postgres_url, None):
        standby = RealPostgres(standby_of=postgres)
    with standby:
        hosts = f"127.0.0.1:{postgres.port},127.0.0.1:{standby.port}"
        url = f"postgresql://postgres@{hosts}/{name}?target_session_attrs=read-write"
        connection = await asyncpg.connect(standby.url(name))
        in_recovery = await EpochReader().read(NAMES, connection.fetchrow, ())
        assert in_recovery.identity is None
        await connection.close()
        standby.stop()  # "immediate" would make the next start recover
        async with servers(url, None, redis_url) as running:
            lost = await cached_order(running)
            postgres.stop()
            standby.start()
            standby.promote()
            for number, server in enumerate(running):
                await server.order(f"another-key-{number}")
            await assert_runs_again(running, lost)


_STORES: Final[dict[str, Callable[[str], Any]]] = {
    "asyncpg": PostgresStore,
    "psycopg": PsycopgStore,
    "psycopg in threads": PsycopgSyncStore,
    "SQLAlchemy on asyncpg": lambda url: create_async_engine(f"postgresql+asyncpg{url[10:]}"),
    "SQLAlchemy on psycopg": lambda url: create_engine(f"postgresql+psycopg{url[10:]}"),
    "SQLite": SqliteStore,
    "SQLAlchemy on aiosqlite": lambda path: create_async_engine(f"sqlite+aiosqlite:///{path}"),
    "SQLAlchemy on SQLite": lambda path: create_engine(f"sqlite:///{path}"),
}


@asynccontextmanager
async def opened(driver: str, place: str, report: Callable[[EpochReading], None]) -> Any:
    """Open a store; its engine, if it has one, is disposed of."""
    made = _STORES[driver](place)
    store = made
    if isinstance(made, AsyncEngine):
        store = SqlAlchemyStore(made)
    elif isinstance(made, Engine):
        store = SqlAlchemySyncStore(made)
    store.report_epochs(report)
    await store.open()
    try:
        yield store
    finally:
        await store.close()
        if isinstance(made, AsyncEngine):
            await made.dispose()
        elif isinstance(made, Engine):
            made.dispose()


@pytest.fixture
def postgres_url(postgres: RealPostgres) -> Iterator[str]:
    """Return a database that no other test uses: some tests change its functions' privileges."""
    postgres.start()
    url = postgres.create_database()
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture
async def limited_url(postgres_url: str) -> AsyncIterator[str]:
    """Return the URL of a user that is not allowed everything, as on a managed server."""
    admin = await asyncpg.connect(postgres_url)
    name = urlsplit(postgres_url).path[1:]
    await admin.execute(f"CREATE ROLE {name} LOGIN; GRANT CREATE ON DATABASE {name} TO {name}")
    yield postgres_url.replace("postgres@", f"{name}@")
    await admin.execute(f"DROP OWNED BY {name}")
    await admin.execute(f"DROP ROLE {name}")
    await admin.close()


@pytest.mark.parametrize("driver", list(_STORES)[:5])
async def test_each_new_connection_reports_the_epoch(
    postgres_url: str, limited_url: str, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    admin = await asyncpg.connect(postgres_url)
    readings: list[EpochReading] = []

    async def after(sql: str) -> EpochReading:
        """Run a statement, end all connections, and return what the next one reports."""
        await admin.execute(sql)
        await admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1",
            urlsplit(limited_url).username,
        )
        readings.clear()
        for _ in range(20):
            with suppress(StoreUnavailableError):
                await store.ping()
                if readings:
                    break
            await asyncio.sleep(0.01)
        return msgspec.structs.replace(readings[0], time=None)

    async with opened(driver, limited_url, readings.append) as store:
        first = await store.read_epoch()
        same = await after("SELECT 1")
        assert (same.identity, same.went_back) == (first.identity, False)
        assert same.position is not None
        truncated = await after("TRUNCATE onceward.idempotency_records")
        assert truncated.identity not in {None, first.identity}
        with caplog.at_level(logging.WARNING, "onceward.stores"):
            denied = await after("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC")
            again = await store.read_epoch()
            assert (again.identity, again.went_back) == (denied.identity, False)
        assert denied.identity is not None
        assert denied.identity.startswith("started/")
        assert sum("denies its system identifier" in line for line in caplog.messages) == 1
    await admin.close()


# -- SQLite --------------------------------------------------------------------------------


async def test_replaced_sqlite_file(tmp_path: Path, redis_url: str) -> None:
    file, clock = tmp_path / "shop.db", HeldClock()
    url = f"sqlite:///{file}"
    async with servers(url, None, redis_url, redis_url, clock=clock) as running:
        back_up(str(file), tmp_path / "backup.db")
        lost = await cached_order(running)
        replace_file(tmp_path / "backup.db", file)
        clock.pass_by(seconds=1.001)
        await assert_runs_again(running, lost)
        file.unlink()
        with pytest.raises(StoreUnavailableError, match="does not exist any more"):
            await running[0].onceward.store.claim(a_record().id, NOW)
        assert not file.exists()


async def commit(store: Any, record: Record) -> None:
    """Claim a key that has no record, and commit one."""
    claim = await store.claim(record.id, NOW)
    assert isinstance(claim, Claimed)
    await claim.unit.commit(record, None)


def replace_file(new: Path, file: Path) -> None:
    for suffix in ("-wal", "-shm"):
        file.with_name(file.name + suffix).unlink(missing_ok=True)
    new.replace(file)


@pytest.mark.parametrize("driver", list(_STORES)[5:])
async def test_connections_to_a_replaced_sqlite_file_are_closed(
    tmp_path: Path, driver: str
) -> None:
    file, record = tmp_path / "shop.db", a_record()
    readings: list[EpochReading] = []
    async with opened(driver, str(file), readings.append) as store:
        before = await store.read_epoch()
        back_up(str(file), tmp_path / "backup.db")
        await commit(store, record)
        replace_file(tmp_path / "backup.db", file)
        await commit(store, record)
        assert (await store.read_epoch()).identity != before.identity
    async with opened(driver, str(file), readings.append) as store:
        assert await store.find(record.id, NOW) == record


# -- order ---------------------------------------------------------------------------------


async def test_request_of_an_earlier_epoch_is_not_cached_in_a_later_one(
    tmp_path: Path, redis_url: str
) -> None:
    async with servers(f"sqlite:///{tmp_path}/shop.db", redis_url) as (server,):
        idempotency = server.onceward.runtime.idempotency
        running = asyncio.create_task(server.order())
        while not server.app.state.runs:
            await asyncio.sleep(0.001)
        idempotency.epoch.learn(EpochReading("another database"))
        first, _ = await running
        await idempotency.close()
        assert len(idempotency.memory) == 0
        async with Redis.from_url(redis_url) as redis:
            assert await redis.keys() == []
        # It is in the database, and now a connection has said that this is the one.
        assert await server.order() == (first, True)


class _ChangesDuringGet(RedisRecords):
    """Reports another epoch while a response of Redis is on its way."""

    learn: Callable[[EpochReading], None]

    async def get(self, record_id: RecordId, now: datetime, *, epoch: str = "") -> Record | None:
        found = await super().get(record_id, now, epoch=epoch)
        if found is not None:
            self.learn(EpochReading("another database"))
        return found


async def test_epoch_that_changes_during_a_look_up_in_redis(tmp_path: Path, redis_url: str) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    async with servers(url, redis_url) as (server,):
        lost = await cached_order([server])
        await server.onceward.store.write(
            server.onceward.store.table_names.render("DELETE FROM onceward_idempotency_records")
        )
        await server.onceward.store.write("DELETE FROM orders")
        idempotency = server.onceward.runtime.idempotency
        idempotency.memory.clear()
        cache = _ChangesDuringGet(
            redis_url, environment="test", secret=server.onceward.store.secret, timeout_seconds=2
        )
        cache.learn = idempotency.epoch.learn
        assert idempotency.cache is not None
        await idempotency.cache.close()
        idempotency.cache = cache
        again, was_replayed = await server.order()
        assert (was_replayed, again != lost) == (False, True)
        await cache.close()
