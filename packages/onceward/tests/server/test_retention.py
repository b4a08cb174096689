"""Retention: rows older than an operator wants to keep them are deleted, and no others."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest

from onceward import open_store
from onceward.errors import ConfigurationError
from onceward.jobs import cleaner
from onceward.maintenance.retention import AUDIT_EVENTS, DEAD_LETTERS, Retention
from onceward.maintenance.sweeper import Sweeper
from onceward.ports import Store
from onceward.stores.parts import AUDIT_SEALS, JOBS
from onceward_protocol.clock import SystemClock
from packages.onceward.tests.support.tenant_rows import add_rows

DAY = timedelta(days=1)


@pytest.fixture(params=["sqlite", "postgresql"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/old.db"
    else:
        url = str(request.getfixturevalue("postgres_url"))
    opened = open_store(url)
    opened.schema.want(JOBS, AUDIT_SEALS)
    await opened.open()
    yield opened
    await opened.close()


async def count(store: Store, table: str) -> list[str]:
    name = store.table_names.table(table)
    return [row["tenant"] for row in await store.read(f"SELECT tenant FROM {name} ORDER BY tenant")]


async def test_only_rows_older_than_their_retention_are_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaner, "_BATCH", 2)
    now = SystemClock().now()
    tables = [AUDIT_EVENTS, DEAD_LETTERS]
    # Ids of audit events follow the time.
    number = 0
    for tenant in ("ada", "bob"):
        for days in (9, 8, 7, 1):
            number += 1
            values = {("audit_events", "id"): f"{number:04}"}
            await add_rows(store, tenant, now - days * DAY, values=values, only=tables)
    await add_rows(store, "old", now - 30 * DAY, only=tables)
    rules = [Retention(AUDIT_EVENTS, 5 * DAY), Retention(DEAD_LETTERS, 7.5 * DAY)]
    sweeper = Sweeper(store, SystemClock(), retention=rules)
    assert await sweeper.delete_old_rows() == {AUDIT_EVENTS: 7, DEAD_LETTERS: 5}
    assert await count(store, AUDIT_EVENTS) == ["ada", "bob"]
    assert await count(store, DEAD_LETTERS) == ["ada", "ada", "bob", "bob"]
    assert await Sweeper(store, SystemClock()).delete_old_rows() == {}


async def test_periodic_sweep_applies_retention(store: Store) -> None:
    await add_rows(store, "ada", SystemClock().now() - 2 * DAY, only=[AUDIT_EVENTS])
    sweeper = Sweeper(
        store, SystemClock(), every_seconds=0.01, retention=[Retention(AUDIT_EVENTS, DAY)]
    )
    sweeper.start()
    async with asyncio.timeout(20):
        while await count(store, AUDIT_EVENTS):
            await asyncio.sleep(0.01)
    await sweeper.stop()


def test_retention_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="longer than 0"):
        Retention(AUDIT_EVENTS, timedelta(0))
    with pytest.raises(ConfigurationError, match="the column of its time"):
        Retention("orders", DAY)
