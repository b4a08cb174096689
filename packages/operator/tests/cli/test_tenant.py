"""``onceward tenant``: every row of one tenant, and of no other."""

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from onceward import open_store
from onceward.ports import Row, Store
from onceward.records import Record, RecordId, RequestFingerprint
from onceward.stores.redis import RedisRecords
from onceward.stores.tenant_tables import TenantTable, covered_tables, delete_batch
from onceward_operator.tenant_data import OPERATOR_TENANT, StillWrittenError, TenantData
from onceward_protocol.clock import SystemClock
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.shop import CREATE, make_app
from packages.onceward.tests.support.tenant_rows import add_rows
from packages.protocol.tests.cli.harness import Here, one_line

# No hexadecimal digits: it must not be found in random ids by chance.
ADA = "grace@example.org"
BOB = "bob"
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
ORDERS = (
    "CREATE TABLE orders (customer varchar(99), id varchar(99), note varchar(99), PRIMARY KEY (id))"
)
LIBRARY = 12


@pytest.fixture(params=["sqlite", "postgresql", "postgresql+psycopg in a schema"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/tenants.db"
    url = str(request.getfixturevalue("postgres_url"))
    if request.param == "postgresql":
        return url
    url = url.replace("postgresql://", "postgresql+psycopg://")
    return f"{url}{'&' if '?' in url else '?'}schema=acme&table_prefix=shop_"


async def opened(url: str) -> Store:
    store = open_store(url)
    await store.open()
    return store


async def fill(url: str) -> None:
    store = await opened(url)
    await store.write(ORDERS)
    await store.write("CREATE TABLE notes (tenant varchar(99) PRIMARY KEY)")
    for tenant in (ADA, BOB):
        added = await add_rows(store, tenant, AT, others=[TenantTable("orders", "customer")])
        assert len(added) == LIBRARY + 1
    await store.close()


async def everything(url: str) -> list[tuple[str, Row]]:
    """Return all rows of the library's tables and of ``orders``."""
    store = await opened(url)
    found = []
    for table in await covered_tables(store, [TenantTable("orders", "customer")]):
        found += [(table.name, row) for row in await store.read(f"SELECT * FROM {table.name}")]
    await store.close()
    return found


def test_tenant_is_exported_then_erased_and_no_other(
    here: Here, database: str, tmp_path: Path
) -> None:
    asyncio.run(fill(database))
    where = ("--database", database, "--table", "orders:customer")

    exported = here("tenant", "export", ADA, *where, "--output", "ada.jsonl", "--json")
    assert exported.returncode == 0, exported
    assert b"notes has a column tenant and is left out" in exported.stderr
    file = tmp_path / "ada.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.glob(".*partial")] == []
    head, *rows, end = map(json.loads, file.read_text().splitlines())
    assert (head["tenant"], head["format"]) == (ADA, 1)
    assert len(head["tables"]) == len(rows) == sum(end["rows"].values()) == LIBRARY + 1
    assert end["complete"]
    assert ADA in json.dumps(rows)
    assert BOB not in json.dumps(rows)
    (body,) = (row["row"]["response_body"] for row in rows if "response_body" in row["row"])
    assert body == '{"name":"Ada"}'
    again = here("tenant", "export", ADA, *where, "--output", "ada.jsonl")
    assert again.returncode == 2
    assert "ada.jsonl exists" in again.stderr.decode()
    printed = here("tenant", "export", ADA, *where)
    assert len(printed.stdout.splitlines()) == LIBRARY + 3

    before = asyncio.run(everything(database))
    planned = here("tenant", "erase", ADA, *where, "--json")
    assert json.loads(planned.stdout)["erased"] is False
    assert set(json.loads(planned.stdout)["rows"].values()) == {1}
    assert (
        f"{LIBRARY + 1} rows would be erased".encode()
        in here("tenant", "erase", ADA, *where).stdout
    )
    for reason in ((), ("--reason", " ")):
        refused = here("tenant", "erase", ADA, *where, "--yes", *reason)
        assert refused.returncode == 2
        assert "--reason is missing" in one_line(refused.stderr)
    assert asyncio.run(everything(database)) == before

    erase = ("tenant", "erase", ADA, *where, "--reason", "request 4711", "--yes", "--json")
    done = here(*erase)
    assert done.returncode == 0, done
    assert set(json.loads(done.stdout)["rows"].values()) == {1}
    left = asyncio.run(everything(database))
    events = [row for _, row in left if row.get("tenant") == OPERATOR_TENANT]
    of_bob = [row for _, row in left if row.get("tenant", row.get("customer")) == BOB]
    assert len(left) == len(events) + len(of_bob)
    assert len(of_bob) == LIBRARY + 1
    assert [event["endpoint"] for event in events] == ["tenant.erase_started", "tenant.erased"]
    assert events[1]["id"] == json.loads(done.stdout)["audit_id"]
    assert events[1]["reason"] == f"request 4711 ({LIBRARY + 1} rows)"
    assert "grace" not in repr(left)
    if database.startswith("sqlite"):
        with closing(sqlite3.connect(tmp_path / "tenants.db")):
            raw = b"".join(path.read_bytes() for path in tmp_path.glob("tenants.db*"))
        assert ADA.encode() not in raw

    assert here(*erase).returncode == 0  # again, as after an interruption


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("erase", ""), "the name of the tenant is empty"),
        (("erase", "ada", "--table", "orders; DROP"), "is not the name of a table"),
        (("erase", "ada", "--table", "missing"), "there is no table missing"),
        (("export", "ada", "--table", "orders:owner"), "table orders has no column owner"),
        (("export", "ada", "--output", "no/such/directory.jsonl"), "cannot write to no/such"),
    ],
)
def test_bad_arguments_are_one_line_and_change_nothing(
    here: Here, tmp_path: Path, arguments: tuple[str, ...], line: str
) -> None:
    url = f"sqlite:///{tmp_path}/tenants.db"
    asyncio.run(fill(url))
    before = asyncio.run(everything(url))
    done = here("tenant", *arguments, "--database", url)
    assert done.returncode == 2
    assert line in one_line(done.stderr)
    assert asyncio.run(everything(url)) == before


async def test_interrupted_erasure_continues(tmp_path: Path) -> None:
    store = await opened(f"sqlite:///{tmp_path}/tenants.db")
    await add_rows(store, ADA, AT)
    data = await TenantData.open(store, SystemClock())

    def interrupt(table: str, rows: int) -> None:
        if table == "onceward_dead_letters":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await data.erase(ADA, actor="me", reason="x", on_progress=interrupt)
    counts = await data.count(ADA)
    assert 0 < sum(counts.values()) < LIBRARY
    epoch = await store.read(store.table_names.render("SELECT cache_epoch FROM onceward_secret"))
    erased = await data.erase(ADA, actor="me", reason="x")
    assert erased.rows == counts
    assert (
        await store.read(store.table_names.render("SELECT cache_epoch FROM onceward_secret"))
        != epoch
    )
    assert set((await data.count(ADA)).values()) == {0}
    await store.close()


async def test_tenant_that_writes_meanwhile_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await opened(f"sqlite:///{tmp_path}/tenants.db")
    await add_rows(store, ADA, AT)

    async def delete_and_write(*arguments: Any, **options: Any) -> int:
        deleted = await delete_batch(*arguments, **options)
        if "audit_events" in arguments[1].name and not deleted:
            await add_rows(store, ADA, AT, only=["dead_letters"])
        return deleted

    monkeypatch.setattr("onceward_operator.tenant_data.delete_batch", delete_and_write)
    data = await TenantData.open(store, SystemClock())
    with pytest.raises(StillWrittenError, match="end its access"):
        await data.erase(ADA, actor="me", reason="x")
    await store.close()


async def test_running_servers_replay_nothing_of_an_erased_tenant(
    here: Here, tmp_path: Path, redis_url: str
) -> None:
    url = f"sqlite:///{tmp_path}/shop.db"
    clock = HeldClock()
    app, onceward = make_app(url, redis=redis_url, clock=clock)
    await onceward.open()
    await onceward.store.write(CREATE)

    async def order(tenant: str) -> bool:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": "key-1", "X-Tenant": tenant}
            response = await client.post("/orders", json={"item": "boots"}, headers=headers)
        assert response.status_code == 201
        return "idempotency-replayed" in response.headers

    for tenant in ("a*a", "aba"):  # a pattern of Redis would match both
        assert not await order(tenant)
        assert await order(tenant)
    await onceward.runtime.idempotency.close()  # waits for the writes to Redis
    client = Redis.from_url(redis_url)
    names = sorted(bytes(name) for name in await client.keys("*") if isinstance(name, bytes))
    assert len(names) == 2
    environment = names[0].decode().split(":")[1]
    erase = ("tenant", "erase", "a*a", "--reason", "x", "--yes", "--database", url, "--json")
    done = await asyncio.to_thread(here, *erase, "--redis", redis_url, "--environment", environment)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["redis_values"] == 1
    assert await client.keys("*") == [name for name in names if b"aba" in name]
    await client.aclose()
    clock.pass_by(seconds=1.001)
    assert not await order("a*a"), "replayed from memory"
    await onceward.close()


def test_redis_that_is_down_is_reported_and_not_skipped(here: Here, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/tenants.db"
    asyncio.run(fill(url))
    erase = ("tenant", "erase", ADA, "--reason", "x", "--yes", "--database", url)
    done = here(*erase, "--redis", "redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "the erasure is not finished: Redis" in done.stderr.decode()
    assert "run the command again" in done.stderr.decode()


def test_app_names_its_tables(here: Here, tmp_path: Path) -> None:
    (tmp_path / "shop_app.py").write_text(
        "from onceward import SINGLE_TENANT, Onceward\n"
        f"onceward = Onceward('sqlite:///{tmp_path}/tenants.db', tenants=SINGLE_TENANT)\n"
        "onceward.add_tenant_table('orders', column='customer')\n"
    )
    asyncio.run(fill(f"sqlite:///{tmp_path}/tenants.db"))
    done = here("tenant", "erase", ADA, "--app", "shop_app:onceward", "--json")
    assert json.loads(done.stdout)["rows"]["orders"] == 1, done


def test_sweep_of_one_tenant_leaves_others(here: Here, database: str) -> None:
    asyncio.run(fill(database))
    for expected in (1, 0):
        done = here("sweep", "--tenant", ADA, "--database", database, "--json")
        assert json.loads(done.stdout) == {"deleted": expected}, done
    assert json.loads(here("sweep", "--database", database, "--json").stdout)["deleted"] == 1


async def test_sweep_of_one_tenant_drops_its_records_from_redis(
    here: Here, tmp_path: Path, redis_url: str
) -> None:
    url = f"sqlite:///{tmp_path}/tenants.db"
    await fill(url)
    store = await opened(url)
    rows = await store.read(
        store.table_names.render("SELECT * FROM onceward_idempotency_records ORDER BY tenant")
    )
    cache = RedisRecords(redis_url, environment="test", secret=store.secret, timeout_seconds=30)
    for row in rows:
        record_id = RecordId(row["tenant"], row["endpoint"], row["idempotency_key"])
        later = AT + timedelta(hours=1)  # it stays in Redis for an hour, although it has expired
        hashes = RequestFingerprint("0", "0")
        record = Record(record_id, hashes, 201, {}, b"{}", AT, later, "r", "c")
        await cache.put(record, AT)
    await cache.close()
    await store.close()
    client = Redis.from_url(redis_url)
    assert len(await client.keys("*")) == 2
    sweep = ("sweep", "--tenant", ADA, "--database", url, "--json", "--redis", redis_url)
    done = await asyncio.to_thread(here, *sweep, "--environment", "test")
    assert json.loads(done.stdout) == {"deleted": 1}, done
    (left,) = await client.keys("*")
    assert BOB.encode() in left
    await client.aclose()
    # A cache that is down does not prevent the deletion.
    down = ("sweep", "--tenant", BOB, "--database", url, "--json", "--redis", "redis://127.0.0.1:1")
    done = await asyncio.to_thread(here, *down)
    assert json.loads(done.stdout) == {"deleted": 1}, done
