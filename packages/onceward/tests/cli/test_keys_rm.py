"""``onceward keys rm``: audited, effective in running servers, harmless to running requests."""

import asyncio
import getpass
import json
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from onceward import open_store
from onceward.cli import keys
from onceward.cli.database import opened
from onceward.ports import Claimed
from onceward.records import RecordId
from packages.onceward.tests.cli.test_database_commands import (
    KEY,
    NOW,
    record,
    save_records,
)
from packages.onceward.tests.server.test_sync_stores import Shop
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.shop import CREATE, make_app
from packages.protocol.tests.cli.harness import Here, one_line


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/commands.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


def read(url: str, sql: str) -> list[Any]:
    async def run() -> list[Any]:
        store = open_store(url)
        await store.open()
        try:
            return list(await store.read(store.table_names.render(sql)))
        finally:
            await store.close()

    return asyncio.run(run())


def test_records_are_listed_by_status(
    here: Here, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_PAGE", 2)  # page by page, however small the pages are
    stale = [
        msgspec.structs.replace(record("ada", f"stale-{n}", age=timedelta(minutes=n)), status=422)
        for n in (1, 5)
    ]
    others = [record("ada", f"key-{n}", age=timedelta(minutes=n)) for n in (0, 2, 3, 4, 6)]
    save_records(database, *stale, *others)
    where = ("--database", database, "--json")
    found = json.loads(here("keys", "ls", "--status", "422", *where).stdout)
    assert [each["key"] for each in found] == ["stale-1", "stale-5"]
    found = json.loads(here("keys", "ls", "--status", "422", "--limit", "1", *where).stdout)
    assert [each["key"] for each in found] == ["stale-1"]
    assert json.loads(here("keys", "ls", "--status", "409", *where).stdout) == []


def test_record_is_removed_with_an_audit_event(here: Here, database: str) -> None:
    save_records(
        database,
        record("ada", KEY, age=timedelta(0)),
        record("bob", KEY, age=timedelta(0)),
        record("ada", "old", age=timedelta(hours=25)),
    )
    where = ("--tenant", "ada", "--endpoint", "POST /things", "--database", database)
    for reason in ((), ("--reason", "  "), ("--reason", "x" * 1001)):
        done = here("keys", "rm", KEY, *where, *reason)
        assert done.returncode == 2
        assert "--reason is missing or longer" in one_line(done.stderr)
    planned = here("keys", "rm", KEY, *where, "--dry-run")
    assert (planned.returncode, KEY.encode() in planned.stdout) == (0, True)
    assert len(json.loads(here("keys", "ls", "--database", database, "--json").stdout)) == 3

    done = here("keys", "rm", KEY, *where, "--reason", "ticket 4711", "--json")
    removed = json.loads(done.stdout)
    assert (removed["removed"], removed["tenant"]) == (True, "ada")
    assert here("keys", "rm", "old", *where, "--reason", "expired, too").returncode == 0
    left = json.loads(here("keys", "ls", "--database", database, "--json").stdout)
    assert [(each["tenant"], each["key"]) for each in left] == [("bob", KEY)]
    events = read(database, "SELECT * FROM onceward_audit_events ORDER BY id")
    assert [event["reason"] for event in events] == ["ticket 4711", "expired, too"]
    first = events[0]
    assert (first["id"], first["tenant"]) == (removed["audit_id"], "ada")
    assert first["actor"] == f"{getpass.getuser()} via onceward keys rm"
    assert first["endpoint"] == "record.removed POST /things"
    assert first["resource"] == f"key:{KEY}"

    missing = here("keys", "rm", KEY, *where, "--reason", "again")
    assert missing.returncode == 1
    assert "no record matches" in one_line(missing.stderr)
    assert len(read(database, "SELECT * FROM onceward_audit_events")) == 2


async def test_running_request_is_not_disturbed(here: Here, postgres_url: str) -> None:
    store = open_store(postgres_url)
    await store.open()
    running = await store.claim(RecordId("ada", "POST /things", KEY), NOW)
    assert isinstance(running, Claimed)
    remove = ("keys", "rm", KEY, "--tenant", "ada", "--endpoint", "POST /things")
    done = await asyncio.to_thread(here, *remove, "--reason", "x", "--database", postgres_url)
    assert done.returncode == 1
    assert "a request with this key is running" in one_line(done.stderr)
    await running.unit.commit(record("ada", KEY, age=timedelta(0)), None)
    await store.close()


async def test_request_running_on_sqlite_keeps_its_record(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/commands.db"
    store = open_store(url)
    await store.open()
    running = await store.claim(RecordId("ada", "POST /things", KEY), NOW)
    assert isinstance(running, Claimed)
    await running.unit.statements.execute("CREATE TABLE orders (id text)")  # takes the write lock
    has_started = threading.Event()

    def opened_by_command(target: str) -> Any:
        has_started.set()
        return opened(target)

    monkeypatch.setattr(keys, "opened", opened_by_command)
    remove = ("keys", "rm", KEY, "--tenant", "ada", "--endpoint", "POST /things")
    command = asyncio.create_task(
        asyncio.to_thread(here, *remove, "--reason", "x", "--database", url)
    )
    await asyncio.to_thread(has_started.wait, 60)
    kept = record("ada", KEY, age=NOW - datetime.now(UTC))
    await running.unit.commit(kept, None)
    done = await command
    assert done.returncode == 1
    assert "a request with this key is running" in one_line(done.stderr)
    assert await store.find(kept.id, NOW) == kept
    await store.close()


async def test_running_servers_stop_replaying_a_removed_record(
    here: Here, tmp_path: Path, redis_url: str
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    clock = HeldClock()
    servers = []
    for redis in (None, redis_url, redis_url):
        app, onceward = make_app(url, redis=redis, clock=clock)
        await onceward.open()
        servers.append((app, onceward))
    await servers[0][1].store.write(CREATE)

    async def order(number: int) -> tuple[str, bool]:
        transport = httpx.ASGITransport(servers[number][0])
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": KEY, "X-Tenant": "ada"}
            response = await client.post("/orders", json={"item": "boots"}, headers=headers)
        assert response.status_code == 201
        return response.json()["id"], "idempotency-replayed" in response.headers

    first, _ = await order(1)
    await servers[1][1].runtime.idempotency.close()  # waits for the write to Redis
    # In memory of the first and second server, and in Redis for the third.
    for number in range(2):
        assert await order(number) == (first, True)
    remove = ("keys", "rm", KEY, "--tenant", "ada", "--endpoint", "orders.create")
    done = await asyncio.to_thread(here, *remove, "--reason", "x", "--database", url)
    assert done.returncode == 0, done
    clock.pass_by(seconds=1.001)
    second, was_replayed = await order(2)
    assert not was_replayed, "from Redis"
    assert second != first
    for number in range(3):
        assert await order(number) == (second, True)
    for _, onceward in servers:
        await onceward.close()


def test_running_sync_server_stops_replaying_a_removed_record(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onceward.guard.caches._LIFETIME_SECONDS", 0.0)
    url = f"sqlite:///{tmp_path}/shop.db"
    shop = Shop(url)
    try:
        assert shop.post("/orders/boots", 1).status_code == 201
        assert "Idempotency-Replayed" in shop.post("/orders/boots", 1).headers
        (listed,) = json.loads(here("keys", "ls", "--database", url, "--json").stdout)
        where = ("--tenant", listed["tenant"], "--endpoint", "orders.create", "--database", url)
        assert here("keys", "rm", "key-1", *where, "--reason", "x").returncode == 0
        assert "Idempotency-Replayed" not in shop.post("/orders/boots", 1).headers
        assert shop.count() == 2
    finally:
        shop.close()
