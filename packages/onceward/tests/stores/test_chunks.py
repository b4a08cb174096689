"""The transactions of batches: savepoints, claims without waiting, one commit. On every store."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from onceward import open_store
from onceward.errors import NoTransactionError, StoreUnavailableError, SupersededError
from onceward.ports import Found, Held, KeyClaimed
from onceward.records import RecordId
from onceward.stores.parts import SEQUENCES
from onceward.stores.sequences import SequenceNumbers
from onceward_protocol.sequence import Stream
from onceward_testing.samples import NOW, a_record, an_audit_event
from packages.onceward.tests.support.citus import ON_CITUS


@dataclass
class Stores:
    """Two processes with one database."""

    one: Any
    other: Any

    async def names(self) -> list[str]:
        rows = await self.one.read("SELECT name FROM things ORDER BY name")
        return [row["name"] for row in rows]


@pytest.fixture(params=["sqlite", "postgresql", "postgresql+psycopg", *ON_CITUS])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/chunks.db"
    if request.param == "citus":
        return str(request.getfixturevalue("citus_url"))
    url = str(request.getfixturevalue("postgres_url"))
    return url.replace("postgresql", request.param, 1)


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Stores]:
    one: Any = open_store(url)
    other: Any = open_store(url)
    one.schema.want(SEQUENCES)
    await one.open()
    await other.open()
    try:
        await one.write("CREATE TABLE things (name text)")
        yield Stores(one, other)
    finally:
        await one.close()
        await other.close()


def key(name: str) -> RecordId:
    return RecordId("ada", "things.create", name)


async def insert(unit: Any, name: str) -> None:
    await unit.statements.execute("INSERT INTO things (name) VALUES (:name)", {"name": name})


async def test_items_share_a_transaction_with_a_savepoint_each(url: str) -> None:
    async with opened(url) as stores:
        assert all(store.chunk_items for store in (stores.one, stores.other))
        chunk = await stores.one.begin_chunk()
        ids = [key("a"), key("b"), key("c")]
        assert await chunk.claim(ids, NOW) == [KeyClaimed()] * 3
        units = []
        for name, is_kept in (("a", True), ("b", False), ("c", True)):
            unit = await chunk.begin_item()
            units.append(unit)
            await insert(unit, name)
            await (unit.commit(None, None) if is_kept else unit.rollback())
        with pytest.raises(NoTransactionError):
            await insert(units[0], "late")
        assert await stores.names() == []
        records = [
            a_record(key=name, tenant="ada", endpoint="things.create", client_generated_at=made_at)
            for name, made_at in zip("abc", (NOW, None, NOW), strict=True)
        ]
        await chunk.commit(records, [an_audit_event(records[0])])
        assert await stores.names() == ["a", "c"]
        assert await stores.one.find(key("b"), NOW) == records[1]
        again = await stores.other.begin_chunk()
        assert await again.claim(ids, NOW) == [Found(record) for record in records]
        expired = await again.claim([key("a")], NOW + timedelta(days=365))
        assert expired == [KeyClaimed(after_expiry=True)]
        await again.rollback()


async def test_rollback_leaves_nothing(url: str) -> None:
    async with opened(url) as stores:
        chunk = await stores.one.begin_chunk()
        await chunk.claim([key("a")], NOW)
        unit = await chunk.begin_item()
        await insert(unit, "a")
        await unit.commit(None, None)
        await chunk.rollback()
        assert await stores.names() == []
        other = await stores.other.begin_chunk()
        assert await other.claim([key("a")], NOW) == [KeyClaimed()]
        await other.rollback()


async def test_chunk_does_not_commit_over_a_live_record(url: str) -> None:
    async with opened(url) as stores:
        record = a_record(key="a", tenant="ada", endpoint="things.create")
        first = await stores.one.begin_chunk()
        await first.commit([record], [])
        second = await stores.other.begin_chunk()
        unit = await second.begin_item()
        await insert(unit, "b")
        await unit.commit(None, None)
        with pytest.raises((SupersededError, StoreUnavailableError)):
            await second.commit([record], [])
        assert await stores.names() == []


async def test_held_key_ends_the_claims_and_frees_those_behind_it(postgres_url: str) -> None:
    async with opened(postgres_url) as stores:
        holder = await stores.other.begin_chunk()
        assert await holder.claim([key("b")], NOW) == [KeyClaimed()]
        chunk = await stores.one.begin_chunk()
        assert await chunk.claim([key("a"), key("b"), key("c")], NOW) == [KeyClaimed()]
        free = await stores.other.claim(key("c"), NOW)
        await free.unit.rollback()
        assert isinstance(await stores.other.claim(key("a"), NOW), Held)
        assert await chunk.claim([key("b")], NOW) == []
        # A rollback to an item's savepoint keeps the key.
        unit = await chunk.begin_item()
        await unit.rollback()
        assert isinstance(await stores.other.claim(key("a"), NOW), Held)
        await holder.rollback()
        assert await chunk.claim([key("b")], NOW) == [KeyClaimed()]
        await chunk.rollback()


async def test_asyncpg_looks_no_types_up_in_the_catalogue(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Citus that takes a second, for each connection."""
    looked_up: list[Any] = []
    look_up = asyncpg.Connection._introspect_types

    async def noted(self: Any, oids: Any, timeout: Any) -> Any:
        looked_up.append(oids)
        return await look_up(self, oids, timeout)

    monkeypatch.setattr(asyncpg.Connection, "_introspect_types", noted)
    async with opened(postgres_url) as stores:
        chunk = await stores.one.begin_chunk()
        await chunk.claim([key("a")], NOW)
        numbers = SequenceNumbers(stores.one)
        on = await chunk.statements()
        assert await numbers.use(Stream("ada", "phone"), 0, ["one", "two"], NOW, on)
        assert await numbers.use(Stream("ada", "phone"), 2, ["three"], NOW, on)
        record = a_record(key="a", tenant="ada", endpoint="things.create")
        await chunk.commit([record], [an_audit_event(record)])
        assert looked_up == []
        await stores.one.read("SELECT :numbers::bigint[]", {"numbers": [1]})  # an app's may
        assert looked_up
