"""One Onceward in several event loops, one after another: a test client without ``with``."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import NullPool
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import SINGLE_TENANT, Onceward
from onceward.errors import ConfigurationError
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore

CREATED = 201


def _sqlalchemy(url: str) -> SqlAlchemyStore:
    url = url.replace("postgresql:", "postgresql+asyncpg:").replace("sqlite:", "sqlite+aiosqlite:")
    return SqlAlchemyStore(create_async_engine(url, poolclass=NullPool))


def _app(onceward: Onceward[Any]) -> FastAPI:
    app = FastAPI()
    onceward.install(app)

    @app.post("/things", status_code=CREATED)
    @onceward.guard()
    async def create(name: str) -> dict[str, str]:
        await onceward.enqueue("things.created", {"name": name})
        return {"name": name}

    return app


@pytest.mark.parametrize(
    ("database", "store"),
    [
        ("sqlite", str),
        ("postgresql", str),
        ("postgresql", PsycopgStore),
        ("postgresql", PsycopgSyncStore),
        ("sqlite", _sqlalchemy),
        ("postgresql", _sqlalchemy),
    ],
)
def test_client_without_with_serves_every_request(
    request: pytest.FixtureRequest, tmp_path: Path, database: str, store: Callable[[str], Any]
) -> None:
    others = set(_own_threads())  # of fixtures that other tests share
    is_sqlite = database == "sqlite"
    url = f"sqlite:///{tmp_path}/app.db" if is_sqlite else request.getfixturevalue("postgres_url")
    onceward = Onceward(store(url), tenants=SINGLE_TENANT)
    client = TestClient(_app(onceward))
    for key, replayed in (("one", None), ("two", None), ("one", "true")):
        response = client.post("/things?name=mill", headers={"Idempotency-Key": key})
        assert response.status_code == CREATED, response.text
        assert response.headers.get("Idempotency-Replayed") == replayed
    with TestClient(client.app) as again:  # with a lifespan after that
        response = again.post("/things?name=mill", headers={"Idempotency-Key": "three"})
        assert response.status_code == CREATED
    deadline = time.monotonic() + 10  # stopped threads may still be ending
    while set(_own_threads()) - others and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(_own_threads()) - others


def _own_threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("onceward")]


def test_pool_of_a_loop_that_has_ended_is_refused_in_one_line(postgres_url: str) -> None:
    engine = create_async_engine(postgres_url.replace("postgresql:", "postgresql+asyncpg:"))
    store = SqlAlchemyStore(engine)
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(store.open())
        first.run(store.close())
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="NullPool"):
                second.run(store.open())
        first.run(engine.dispose())
        second.run(store.open())
        second.run(store.close())
        second.run(engine.dispose())


def test_onceward_that_is_open_in_another_loop_is_refused_at_once(tmp_path: Path) -> None:
    onceward = Onceward(f"sqlite:///{tmp_path}/app.db", tenants=SINGLE_TENANT)
    app = _app(onceward)

    async def post() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            await client.post("/things?name=mill", headers={"Idempotency-Key": "one"})

    with TestClient(app), pytest.raises(ConfigurationError, match="with TestClient"):
        asyncio.run(post())
