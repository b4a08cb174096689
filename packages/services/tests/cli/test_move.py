"""``onceward move`` of a database with the tables of the services."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from onceward import open_store
from onceward_services.registry import migration_packages
from packages.onceward.tests.support.citus import ON_CITUS
from packages.protocol.tests.cli.conftest import here as here  # noqa: PLC0414 - the fixture
from packages.protocol.tests.cli.harness import Here

NOW = datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC)


async def fill(url: str) -> None:
    store = open_store(url, migration_packages=migration_packages())
    await store.open()
    await store.write(
        "INSERT INTO tree_allocations (tenant, node_id, seq, kind, points_cost, energy_cost,"
        " provisional, allocated_at) VALUES ('ada', 'node.a', 1, 'node', 1, 5, :provisional, :now)",
        {"provisional": True, "now": NOW},
    )
    await store.write(
        "INSERT INTO field_items VALUES"
        " ('ada', 'contacts', 'c1', 3, '{\"name\": \"é\"}', 9, :now, :now, NULL, NULL)",
        {"now": NOW},
    )
    await store.close()


@pytest.mark.parametrize("target", ["postgres", *ON_CITUS])
def test_tables_of_services_are_moved(
    here: Here, tmp_path: Path, target: str, request: pytest.FixtureRequest
) -> None:
    to = str(request.getfixturevalue(f"{target}_url"))
    url = f"sqlite:///{tmp_path}/shop.db"
    asyncio.run(fill(url))
    done = here("move", "--from", url, "--to", to, "--json")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    rows = {table["table"]: table["rows"] for table in report["tables"]}
    assert (rows["tree_allocations"], rows["field_items"], rows["planning_missions"]) == (1, 1, 0)
    assert (report["verified"], report["not_moved"]) == (True, [])

    async def read() -> None:
        store = open_store(to, migration_packages=migration_packages())
        await store.open()
        (allocation,) = await store.read("SELECT * FROM tree_allocations")
        assert (allocation["provisional"], allocation["allocated_at"]) == (True, NOW)
        await store.close()

    asyncio.run(read())
