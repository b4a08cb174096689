"""A reader of changes misses no row, whatever writers commit and roll back meanwhile.

ONCEWARD_TEST_ROUNDS=1000 makes it a thousand rounds with 32 writers.
"""

import asyncio
import os
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from onceward import open_store
from onceward_services.field.changes import Cursor, parse_cursor, read_changes
from onceward_services.field.model import KINDS
from onceward_services.field.repository import add, change, find, next_change, remove
from onceward_services.registry import migration_packages

ROUNDS = int(os.environ.get("ONCEWARD_TEST_ROUNDS", "50"))
WRITERS = 32 if ROUNDS >= 1000 else 4
WRITES = 2
NOW = datetime(2026, 1, 31, tzinfo=UTC)

Replica = dict[tuple[str, str], tuple[int, bool]]


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Any]:
    options: dict[str, Any] = (
        {} if database_url.startswith("sqlite") else {"max_connections": WRITERS + 2}
    )
    opened = open_store(database_url, migration_packages=migration_packages(), **options)
    await opened.open()
    yield opened
    await opened.close()


async def write(store: Any, tenant: str, chance: random.Random) -> None:
    """Create, change or delete a document of a few shared ones, and commit or roll back."""
    unit = await store.begin()
    tx = unit.transaction
    kind, item_id = chance.choice(KINDS), str(UUID(int=chance.randrange(5)))
    try:
        # Another epoch now and then: a branch starts.
        at = await next_change(tx, tenant, NOW, chance.choice(["one"] * 9 + ["two"]))
        await asyncio.sleep(chance.choice([0, 0, 0.001]))
        item = await find(tx, tenant, kind, item_id)
        if item is None:
            new_id = str(UUID(int=chance.getrandbits(128)))
            await add(tx, tenant, kind, item_id=new_id, document="{}", at=at)
        elif chance.random() < 0.3:
            await remove(tx, tenant, kind, item, at)
        else:
            await change(tx, tenant, kind, item=item, document="{}", at=at)
    except BaseException:
        await unit.rollback()
        raise
    if chance.random() < 0.3:
        await unit.rollback()
    else:
        await unit.commit(None, None)


async def read_on(store: Any, tenant: str, after: Cursor, seen: Replica, limit: int) -> Cursor:
    """Apply one page to the replica; each change is newer than what the replica has."""
    page, following = await read_changes(store, tenant, after, limit=limit)
    last = after.seq
    for kind, item in page.items:
        assert item.seq > last
        last = item.seq
        assert item.version > seen.get((kind, item.id), (0, False))[0]
        seen[kind, item.id] = item.version, item.is_deleted
    # As a device sends it.
    return parse_cursor(str(following))


async def race(store: Any, tenant: str, chance: random.Random) -> None:
    seeds = [chance.random() for _ in range(WRITERS)]

    async def writer(seed: float) -> None:
        own = random.Random(seed)
        for _ in range(WRITES):
            await asyncio.sleep(own.choice([0, 0, 0.001, 0.002]))
            await write(store, tenant, own)

    unit = await store.begin()
    for n, kind in enumerate(KINDS):  # some documents to change from the beginning
        at = await next_change(unit.transaction, tenant, NOW, "one")
        await add(unit.transaction, tenant, kind, item_id=str(UUID(int=n)), document="{}", at=at)
    await unit.commit(None, None)
    writing = asyncio.gather(*map(writer, seeds))
    seen: Replica = {}
    cursor = parse_cursor(None)
    while not writing.done():
        cursor = await read_on(store, tenant, cursor, seen, chance.randint(1, 5))
        await asyncio.sleep(0.001)
    await writing
    while (following := await read_on(store, tenant, cursor, seen, 3)) != cursor:
        cursor = following
    rows = await store.read(
        "SELECT kind, id, version, deleted_at FROM field_items WHERE tenant = :tenant",
        {"tenant": tenant},
    )
    assert seen == {
        (row["kind"], row["id"]): (row["version"], row["deleted_at"] is not None) for row in rows
    }


async def test_reader_of_changes_misses_no_row_under_concurrent_writers(store: Any) -> None:
    chance = random.Random(20)
    for number in range(ROUNDS):
        await race(store, f"user {number}", chance)
