"""The examples start, and a request that is sent twice has one effect."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from onceward.jobs.admin import JobAdmin
from onceward.sign_in.jwt_auth import mint_token

KEY = {"Idempotency-Key": "one-key", "X-Token": "token-1"}

CASES = [
    ("shop", "/orders?item=boots", "SELECT item FROM orders"),
    ("sqlalchemy_shop", "/orders?item=boots", "SELECT item FROM orders"),
    ("bare_asgi", "/notes", "SELECT text FROM notes"),
    ("jobs_shop", "/orders?item=boots", "SELECT item FROM orders"),
]


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # the example creates its database there
    name = f"examples.{request.param}"
    module = importlib.import_module(name)
    yield module
    del sys.modules[name]


@asynccontextmanager
async def started(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run an app within its ASGI lifespan, as a server does."""
    inbox: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    outbox: asyncio.Queue[Any] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    life = asyncio.create_task(app(scope, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://example") as client:
        yield client
    await inbox.put({"type": "lifespan.shutdown"})
    assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
    await life


@pytest.mark.parametrize(("example", "path", "sql"), CASES, indirect=["example"])
async def test_request_sent_twice_has_one_effect(example: Any, path: str, sql: str) -> None:
    async with started(example.app) as client:
        first = await client.post(path, content=b"milk", headers=KEY)
        second = await client.post(path, content=b"milk", headers=KEY)
        other = await client.post(path, content=b"bread", headers=KEY)
        stranger = await client.post(path, content=b"milk", headers=KEY | {"X-Token": "guessed"})
        rows_of_one = await example.onceward.store.read(sql)
        bob = await client.post(path, content=b"milk", headers=KEY | {"X-Token": "token-2"})
        rows = await example.onceward.store.read(sql)
    assert first.status_code == second.status_code == 201
    assert first.content == second.content
    assert "Idempotency-Replayed" not in first.headers
    assert second.headers["Idempotency-Replayed"] == "true"
    assert other.status_code == 409
    assert stranger.status_code == 401
    assert (bob.status_code, "Idempotency-Replayed" in bob.headers) == (201, False)
    assert (len(rows_of_one), len(rows)) == (1, 2)


@pytest.mark.parametrize("example", ["jobs_shop"], indirect=True)
async def test_order_sent_twice_is_packed_once(example: Any) -> None:
    async with started(example.app) as client:
        for _ in "12":
            response = await client.post("/orders?item=boots", headers=KEY)
        async with asyncio.timeout(30):
            while not (packed := (await client.get("/parcels")).json()):
                await asyncio.sleep(0.01)
        jobs = await JobAdmin(example.onceward.store).jobs(tenant="ada")
    assert [parcel["order_id"] for parcel in packed] == [response.json()["id"]]
    assert [job.state for job in jobs] == ["done"]


@pytest.mark.parametrize("example", ["console_shop"], indirect=True)
async def test_console_of_the_shop_has_its_own_page_by_tenant(example: Any) -> None:
    def token(sub: str, *roles: str) -> str:
        now = datetime.now(UTC)
        return mint_token(
            example.SECRET, sub=sub, roles=roles, lifetime=timedelta(hours=1), now=now
        )

    async with started(example.app) as client:
        for item in ("boots", "<hats>"):
            headers = {"authorization": f"Bearer {token('bob')}", "idempotency-key": f"key-{item}"}
            for _ in range(2):
                sent = await client.post("/parcels", params={"item": item}, headers=headers)
                assert sent.status_code == 201, sent.text
        seen = {}
        for sub in ("ada", "bob", "eve"):
            await client.post("/console/sign-in", data={"token": token(sub, "viewer")})
            page = await client.get("/console/parcels")
            assert page.status_code == 200, page.text
            seen[sub] = (
                page.text.count("<li>boots for bob"),
                page.text.count("&lt;hats&gt; for bob"),
            )
        assert seen == {"ada": (1, 1), "bob": (1, 1), "eve": (0, 0)}
