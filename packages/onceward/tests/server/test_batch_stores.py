"""Batches on every store: in chunks where its transactions can be shared, else one by one."""

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.errors import CommitUnknownError
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.batch_lab import BatchLab, item, open_batch_lab
from packages.onceward.tests.support.harness import fresh_database

STORES = (
    "psycopg",
    "psycopg, sync",
    "SQLAlchemy, asyncpg",
    "SQLAlchemy, aiosqlite",
    "SQLAlchemy, sync",
)


@pytest.fixture(scope="module")
def module_database(postgres: RealPostgres) -> Iterator[str]:
    url = postgres.create_database("batch_stores")
    yield url
    postgres.start()
    postgres.drop_database(url)


@pytest.fixture(params=STORES)
async def lab(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BatchLab]:
    kind: str = request.param
    is_sqlite = kind in ("SQLAlchemy, aiosqlite", "SQLAlchemy, sync")
    url = await fresh_database(request, tmp_path, "sqlite" if is_sqlite else "postgresql")
    engine: Any = None
    new_store: Callable[[], Any]
    match kind:
        case "psycopg":
            new_store = lambda: PsycopgStore(url)  # noqa: E731
        case "psycopg, sync":
            new_store = lambda: PsycopgSyncStore(url)  # noqa: E731
        case "SQLAlchemy, asyncpg":
            engine = create_async_engine(url.replace("postgresql", "postgresql+asyncpg", 1))
            new_store = lambda: SqlAlchemyStore(engine)  # noqa: E731
        case "SQLAlchemy, aiosqlite":
            engine = create_async_engine(url.replace("sqlite", "sqlite+aiosqlite", 1))
            new_store = lambda: SqlAlchemyStore(engine)  # noqa: E731
        case _:
            engine = create_engine(url)
            new_store = lambda: SqlAlchemySyncStore(engine)  # noqa: E731
    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(open_batch_lab(url, around=lambda _: new_store()))
        assert bool(opened.onceward.store.chunk_items) == (kind == "psycopg")
        yield opened
    if engine is not None:
        disposed = engine.dispose()
        if disposed is not None:
            await disposed


async def test_batch_is_the_same_on_every_store(lab: BatchLab) -> None:
    local = str(uuid.uuid4())
    edit = {
        "method": "PATCH",
        "path": f"/things/{{local:{local}}}",
        "headers": {"If-Match": f"{{version:{local}}}"},
        "body": {"was": f"{{version:{local}}}"},
        "local_id": local,
    }
    alone = await lab.single(item("k1"))
    batch = [
        item("k0", local_id=local, lane="a"),
        item("k1"),
        {**edit, "key": "e0"},
        {**edit, "key": "e1"},
        item("k2", "422"),
        item("k3", "raise", lane="a"),
        item("k4", lane="a"),
        item("k5", body={"name": "k5", "parent": f"{{local:{local}}}"}),
        item("k0", local_id=local),
        item("k5", body={"name": "other"}),
        item("k6", path="/open"),
    ]
    first = await lab.results(batch)
    statuses = [result["status"] for result in first]
    assert statuses == [201, 201, 200, 200, 422, 500, 424, 201, 201, 409, 400]
    assert [place for place, result in enumerate(first) if result["replayed"]] == [1, 8]
    assert first[1]["body"] == alone.json()
    assert first[3]["headers"]["etag"] == '"3"'
    assert first[7]["body"]["got"] == first[0]["body"]["id"]
    assert await lab.names() == ["k0", "k1", "k5"]
    assert sorted(lab.background) == ["k0", "k1", "k2", "k5"]
    again = await lab.results(batch)
    kept = [place for place, status in enumerate(statuses) if status not in (500, 424, 409, 400)]
    assert [place for place, result in enumerate(again) if result["replayed"]] == kept
    assert [again[place]["body"] for place in kept] == [first[place]["body"] for place in kept]
    assert await lab.names() == ["k0", "k1", "k5"]
    assert await lab.count("onceward_audit_events") == 5
    replayed = await lab.single(item("k0"))
    assert replayed.json() == first[0]["body"]


async def test_unknown_commit_of_an_item_is_looked_up(lab: BatchLab) -> None:
    """The connection is lost during the second commit, after the server has committed it."""
    store: Any = lab.onceward.store
    is_chunk = bool(store.chunk_items)
    name = "begin_chunk" if is_chunk else "claim"
    begin = getattr(store, name)
    begun: list[Any] = []

    async def begin_and_lose(*args: Any, **options: Any) -> Any:
        found = await begin(*args, **options)
        unit = found if is_chunk else getattr(found, "unit", None)
        if unit is not None:
            begun.append(unit)
            if len(begun) == (1 if is_chunk else 2):
                commit = unit.commit

                async def lose(*values: Any) -> None:
                    await commit(*values)
                    raise CommitUnknownError("the connection was lost during COMMIT")

                unit.commit = lose
        return found

    setattr(store, name, begin_and_lose)
    results = await lab.results([item("k0"), item("k1"), item("k2")])
    assert [result["status"] for result in results] == [201] * 3
    assert await lab.names() == ["k0", "k1", "k2"]
    assert lab.runs == ["k0", "k1", "k2"]
