"""``onceward tenant`` and ``onceward sweep`` on the tables of the services."""

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from onceward.ports import Store
from onceward_operator.tenant_data import TenantData
from onceward_protocol.clock import SystemClock
from onceward_services.bootstrap import create_store
from onceward_services.registry import tenant_tables
from onceward_services.settings import load_settings
from packages.onceward.tests.support.citus import ON_CITUS
from packages.onceward.tests.support.tenant_rows import add_rows

from .conftest import Here

TABLES = [table for tables in tenant_tables().values() for table in tables]
LIBRARY = 12
# What CHECK constraints allow.
VALUES = {
    ("attestation_logs", "verdict"): "ACCEPTED",
    ("field_items", "kind"): "contacts",
    ("planning_deliveries", "state"): "failed",
    ("planning_missions", "status"): "done",
    ("planning_notifications", "kind"): "moved",
    ("quest_progress", "status"): "completed",
    ("route_requests", "status"): "done",
    ("step_logs", "ruling"): None,
    ("step_logs", "status"): "ACCEPTED",
    ("tree_allocations", "kind"): "node",
    ("walk_reviews", "decision"): None,
    ("walk_reviews", "kind"): "anti_cheat",
    ("walk_reviews", "status"): "open",
    ("walker_devices", "platform"): "web",
}


@pytest.fixture(params=["sqlite", "postgres", *ON_CITUS])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/services.db"
    return str(request.getfixturevalue(f"{request.param}_url"))


async def opened(url: str) -> Store:
    store = create_store(load_settings(database_url=url))
    await store.open()
    return store


async def fill(url: str, at: datetime) -> None:
    store = await opened(url)
    for tenant in ("ada", "bob"):
        added = await add_rows(store, tenant, at, others=TABLES, values=VALUES)
        assert len(added) == LIBRARY + len(TABLES)
    await store.close()


async def counts(url: str, tenant: str) -> dict[str, int]:
    store = await opened(url)
    found = await (await TenantData.open(store, SystemClock(), TABLES)).count(tenant)
    await store.close()
    return found


async def test_every_table_with_a_tenant_is_covered(database: str) -> None:
    store = await opened(database)
    assert await (await TenantData.open(store, SystemClock(), TABLES)).uncovered() == [], (
        "name the table in onceward_services.registry, or in onceward.stores.tenant_tables"
    )
    # It would be found if it were not.
    await store.write("CREATE TABLE new_table (tenant varchar(99) PRIMARY KEY)")
    data = await TenantData.open(store, SystemClock(), TABLES)
    (found,) = await data.uncovered()
    assert found.endswith("new_table")
    await store.close()


def test_services_are_exported_erased_and_swept(here: Here, database: str) -> None:
    old = datetime.now(UTC) - timedelta(days=1000)
    asyncio.run(fill(database, old))
    exported = here("tenant", "export", "ada", "--database", database)
    assert b"warning" not in exported.stderr
    assert len(exported.stdout.splitlines()) == LIBRARY + len(TABLES) + 2
    erase = ("tenant", "erase", "ada", "--reason", "x", "--yes", "--json", "--database", database)
    erased = json.loads(here(*erase).stdout)["rows"]
    assert set(erased.values()) == {1}
    assert {table.name for table in TABLES} <= set(erased)
    assert set(asyncio.run(counts(database, "ada")).values()) == {0}
    assert set(asyncio.run(counts(database, "bob")).values()) == {1}

    kept_for_ever = {
        f"ONCEWARD_{name}_RETENTION_DAYS": "0"
        for name in ("WALK_EVENT", "WALK_REFUND", "WALK_LEDGER", "PLANNING_DELIVERY")
    }
    sweep = ("sweep", "--database", database, "--json")
    swept = json.loads(
        here(*sweep, ONCEWARD_DEAD_LETTER_RETENTION_DAYS="0", **kept_for_ever).stdout
    )
    assert swept == {"deleted": 1}  # the record had expired
    swept = json.loads(here(*sweep).stdout)["old_rows"]
    # Audit events are kept unless a setting says otherwise.
    names = (
        "dead_letters", "walker_events", "tree_refunds", "energy_ledger", "planning_deliveries",
        "planning_delivery_attempts",
    )  # fmt: skip
    assert swept == dict.fromkeys(names, 1)
    swept = json.loads(here(*sweep, ONCEWARD_AUDIT_RETENTION_DAYS="365").stdout)["old_rows"]
    assert swept == dict.fromkeys(names, 0) | {"audit_events": 1}
    refused = here(*sweep, ONCEWARD_WALK_LEDGER_RETENTION_DAYS="3")
    assert "should be a number of days from 30, or 0" in refused.stderr.decode()


def test_tables_of_a_service_are_left_alone_where_it_is_not_used(
    here: Here, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    assert here("migrate", "--database", url).returncode == 0
    assert "walkers" in {table.name for table in TABLES}
    with closing(sqlite3.connect(tmp_path / "app.db")) as db, db:
        db.execute("CREATE TABLE walkers (tenant TEXT PRIMARY KEY)")  # the app's own
        db.execute("INSERT INTO walkers VALUES ('ada')")
    unknown = here("tenant", "erase", "ada", "--database", url)
    assert unknown.returncode == 1
    assert b"nothing is stored of a tenant ada" in unknown.stderr
    with closing(sqlite3.connect(tmp_path / "app.db")) as db, db:
        db.execute("INSERT INTO onceward_sequences VALUES ('ada', 'phone', 1, '2026-01-01')")
    erase = ("tenant", "erase", "ada", "--reason", "x", "--yes", "--database", url, "--json")
    done = here(*erase)
    assert len(json.loads(done.stdout)["rows"]) == LIBRARY
    assert b"table walkers has a column tenant and is left out" in done.stderr
    with closing(sqlite3.connect(tmp_path / "app.db")) as db:
        assert db.execute("SELECT count(*) FROM walkers").fetchone() == (1,)
