"""Redirects: which are stored, what a sign-in redirect does to the key, and what is never doubled.

On every store, because each one knows in its own way whether a handler has written.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy, open_store
from onceward.errors import ConfigurationError
from onceward.guard.unstored_responses import leads_to_sign_in
from onceward.records import Response
from onceward.stores.psycopg import PsycopgStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from packages.onceward.tests.support.harness import CREATE, fresh_database, open_lab

STORES = [
    "sqlite",
    "postgresql",
    "psycopg",
    "sqlalchemy sqlite",
    "sqlalchemy postgresql",
    "sync sqlalchemy sqlite",
    "sync sqlalchemy postgresql",
]
INSERT = "INSERT INTO effects (id, name) VALUES (:id, 'effect')"


class Shop:
    """An app that writes, or not, and responds with a redirect."""

    def __init__(self, onceward: Onceward[Any]) -> None:
        self.onceward = onceward
        self.runs = 0
        self.status = 302
        self.location = "/login?next=/orders"
        self.writes = False
        self.reads = True
        onceward.guard_path("POST", "/orders")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        execution = scope["onceward"]
        if self.reads:
            await execution.statements.fetch_all("SELECT count(*) AS n FROM effects")
        if self.writes:
            await execution.statements.execute(INSERT, {"id": f"effect {self.runs}"})
        headers = [(b"location", self.location.encode())]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    async def effects(self) -> int:
        rows = await self.onceward.store.read("SELECT count(*) AS n FROM effects")
        return int(rows[0]["n"])


@asynccontextmanager
async def opened(kind: str, url: str) -> AsyncIterator[Any]:
    if kind.startswith("sync"):
        engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        yield SqlAlchemySyncStore(engine)
        engine.dispose()
    elif kind.startswith("sqlalchemy"):
        url = url.replace("sqlite:", "sqlite+aiosqlite:").replace(
            "postgresql:", "postgresql+asyncpg:"
        )
        async_engine = create_async_engine(url)
        yield SqlAlchemyStore(async_engine)
        await async_engine.dispose()
    else:
        yield PsycopgStore(url) if kind == "psycopg" else open_store(url)


@asynccontextmanager
async def open_shop(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, policy: Policy
) -> AsyncIterator[tuple[Shop, httpx.AsyncClient]]:
    database = "sqlite" if kind.endswith("sqlite") else "postgresql"
    url = await fresh_database(request, tmp_path, database)
    async with opened(kind, url) as store:
        onceward = Onceward(
            store,
            policy=policy,
            tenants=SINGLE_TENANT,
            config=GuardConfig(sweep_every_seconds=None, memory_bytes=0),
        )
        shop = Shop(onceward)
        app = onceward.wrap(shop)
        await onceward.open()
        await onceward.store.write(CREATE)
        try:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
                yield shop, client
        finally:
            await onceward.close()


async def post(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/orders", json={"item": "boots"}, headers={"Idempotency-Key": "k"})


@pytest.mark.parametrize("kind", STORES)
async def test_redirects_on_every_store(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = Policy(redirects_stored={303})
    async with open_shop(request, tmp_path, kind, policy) as (shop, client):
        # Sign-in is needed: 302 is not stored, and 303 to a sign-in page is not, either.
        for shop.status in (302, 303):
            first = await post(client)
            assert (first.status_code, first.headers["location"]) == (shop.status, shop.location)
            assert "idempotency-replayed" not in (await post(client)).headers
        assert shop.runs == 4
        # A redirect that is not stored, after a write: nothing is kept, and nothing is doubled.
        shop.status, shop.writes, shop.location = 302, True, "/orders/7"
        refused = await post(client)
        assert refused.json()["code"] == "server.internal"
        assert await shop.effects() == 0
        assert "Policy(redirects_stored={302})" in caplog.text
        # Post/Redirect/Get: the policy stores 303, and a write makes it a success anywhere.
        shop.status, shop.location, before = 303, "/login", shop.runs
        done, again = await post(client), await post(client)
        assert [done.status_code, again.status_code] == [303, 303]
        assert again.headers["idempotency-replayed"] == "true"
        assert again.headers["location"] == "/login"
        assert (shop.runs - before, await shop.effects()) == (1, 1)
        # A damaged record is an error of each request with its key, and holds no connection.
        await shop.onceward.store.write(
            shop.onceward.store.table_names.render(
                "UPDATE onceward_idempotency_records SET response_headers = '{\"etag\": 5}'"
            )
        )
        for _ in range(20):
            assert (await post(client)).json()["code"] == "idempotency.record_unreadable"
        other = await client.post("/orders", headers={"Idempotency-Key": "k2"})
        assert (other.status_code, await shop.effects()) == (303, 2)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_stored_by_default(tmp_path: Path, status: int) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        for _ in range(2):
            response = await lab.send(do=f"quiet {status}")
            assert response.status_code == status
            assert "idempotency-replayed" not in response.headers
        assert (await lab.records(), len(lab.runs)) == ([], 2)
        # After the sign-in, the same key works.
        assert (await lab.send()).status_code == 201
        assert await lab.effects() == 1


@pytest.mark.parametrize("status", [301, 303, 307, 308])
async def test_a_write_before_an_unstored_redirect_is_a_500_and_frees_the_key(
    tmp_path: Path, status: int
) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        for _ in range(2):
            assert (await lab.send(do=str(status))).status_code == 500
        assert (await lab.effects(), await lab.records(), lab.background) == (0, [], [])
        assert (await lab.send()).status_code == 201


async def test_unstored_redirect_elsewhere_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_lab(f"sqlite:///{tmp_path}/lab.db") as lab:
        with caplog.at_level(logging.WARNING, "onceward.request"):
            for key in ("a", "b"):
                await lab.send(key, do="quiet 303")
    assert caplog.text.count("which is not stored: a retry runs the handler again") == 1


async def test_a_redirect_without_a_key_commits(tmp_path: Path) -> None:
    policy = Policy(key_required=False)
    async with open_lab(f"sqlite:///{tmp_path}/lab.db", policy) as lab:
        assert (await lab.send(None, do="303")).status_code == 303
        assert await lab.effects() == 1


@pytest.mark.parametrize(
    ("location", "is_sign_in"),
    [
        ("/login", True),
        ("/login/", True),
        ("https://shop.example/accounts/login/?next=/orders/", True),
        ("/enter?next=%2Forders", True),
        ("/enter?return_to=https%3A%2F%2Fshop.example%2Fapi%2Forders%3Fa%3D1", True),
        ("https://id.example/authorize?redirect_uri=https://shop.example/orders", True),
        ("/orders/7", False),
        ("/orders/7?tab=/settings", False),
        ("/blogin", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_what_leads_to_a_sign_in_page(location: str, is_sign_in: bool) -> None:
    response = Response(302, ((b"location", location.encode()),), b"")
    assert leads_to_sign_in(response, Policy(), "/orders") == is_sign_in


@pytest.mark.parametrize("wrong", [{301}, {302, 308}, {200}])
def test_only_302_and_303_can_be_stored(wrong: set[int]) -> None:
    with pytest.raises(ConfigurationError, match="redirects_stored may have 302 and 303"):
        Policy(redirects_stored=wrong)
