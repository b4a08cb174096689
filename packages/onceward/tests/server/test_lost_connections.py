"""A connection that dies at any point of a guarded request: 503, nothing written, the key free."""

import asyncio
from typing import Annotated, Any

import asyncpg
import httpx
import psycopg
import pytest
from fastapi import Depends, FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from onceward import GuardConfig, Onceward, Principal
from onceward.fastapi import Session, Tx
from onceward.ports import Store
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore

POINTS = (
    "dependency",
    "dependency with its connection",
    "dependency that rolls back",
    "principal",
    "handler before a statement",
    "handler after a statement",
    "handler with its connection",
)
SELECT = text("SELECT 1")


class Loss:
    """Terminates the connection of a request at one point, once."""

    def __init__(self, url: str, point: str, *, is_noticed: bool) -> None:
        self._url = url
        self._point: str | None = point
        self._is_noticed = is_noticed

    async def at(self, point: str, fetch: Any) -> bool:
        if point != self._point:
            return False
        self._point = None
        pid = await fetch()
        # Blocks the event loop: the driver has not noticed it yet.
        with psycopg.connect(self._url, autocommit=True) as observer:
            observer.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        if self._is_noticed:
            await asyncio.sleep(0.05)
        return True


def session_app(url: str, driver: str, loss: Loss) -> tuple[FastAPI, Onceward[Any], Any]:
    engine = create_async_engine(url.replace("://", f"+{driver}://"))
    store = SqlAlchemyStore(async_sessionmaker(engine))

    async def pid(session: Session) -> Any:
        return await session.scalar(text("SELECT pg_backend_pid()"))

    async def first(session: Session) -> None:
        await pid(session)
        await loss.at("dependency", lambda: pid(session))
        if await loss.at("dependency with its connection", lambda: pid(session)):
            await (await session.connection()).execute(SELECT)
        if await loss.at("dependency that rolls back", lambda: pid(session)):
            await session.rollback()

    async def principal(session: Session, _first: Annotated[None, Depends(first)]) -> Principal:
        await pid(session)
        await loss.at("principal", lambda: pid(session))
        return Principal(tenant="mill", actor="ada")

    app, onceward = app_of(store, principal)

    @app.post("/orders", status_code=201)
    @onceward.guard("orders.create")
    async def create(session: Session) -> None:
        await loss.at("handler before a statement", lambda: pid(session))
        await session.execute(text("INSERT INTO orders VALUES (1)"))
        await loss.at("handler after a statement", lambda: pid(session))
        if await loss.at("handler with its connection", lambda: pid(session)):
            await (await session.connection()).execute(SELECT)

    return app, onceward, engine.dispose


def plain_app(url: str, driver: str, loss: Loss) -> tuple[FastAPI, Onceward[Any], Any]:
    async def pid(tx: Tx) -> Any:
        row = await tx.fetch_one("SELECT pg_backend_pid() AS pid")
        assert row is not None
        return row["pid"]

    async def first(tx: Tx) -> None:
        await pid(tx)
        await loss.at("dependency", lambda: pid(tx))

    async def principal(tx: Tx, _first: Annotated[None, Depends(first)]) -> Principal:
        await pid(tx)
        await loss.at("principal", lambda: pid(tx))
        return Principal(tenant="mill", actor="ada")

    app, onceward = app_of(url.replace("://", f"+{driver}://") if driver else url, principal)

    @app.post("/orders", status_code=201)
    @onceward.guard("orders.create")
    async def create(tx: Tx) -> None:
        await loss.at("handler before a statement", lambda: pid(tx))
        await tx.execute("INSERT INTO orders VALUES (1)")
        await loss.at("handler after a statement", lambda: pid(tx))

    return app, onceward, None


def app_of(store: str | Store, principal: Any) -> tuple[FastAPI, Onceward[Any]]:
    app = FastAPI()
    onceward: Onceward[Any] = Onceward(
        store, principal=principal, config=GuardConfig(sweep_every_seconds=None)
    )
    onceward.install(app)
    return app, onceward


APPS = {
    "session asyncpg": (session_app, "asyncpg"),
    "own asyncpg": (plain_app, "asyncpg"),
}


@pytest.mark.parametrize("is_noticed", [False, True], ids=["at once", "noticed"])
@pytest.mark.parametrize(
    ("kind", "point"),
    [
        (kind, point)
        for kind in APPS
        for point in POINTS
        if "session" in kind or not point.endswith(("connection", "back"))
    ],
)
async def test_lost_connection_is_a_503_and_the_retry_has_one_effect(
    postgres_url: str, kind: str, point: str, is_noticed: bool
) -> None:
    observer = await asyncpg.connect(postgres_url)
    await observer.execute("CREATE TABLE orders (id integer)")
    make, driver = APPS[kind]
    loss = Loss(postgres_url, point, is_noticed=is_noticed)
    app, onceward, dispose = make(postgres_url, driver, loss)
    await onceward.open()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            key = {"Idempotency-Key": "key-1"}
            lost = await client.post("/orders", headers=key)
            count = await observer.fetchval("SELECT count(*) FROM orders")
            assert (lost.status_code, count) in ((503, 0), (201, 1)), lost.text
            if lost.status_code == 503:
                assert "retry-after" in lost.headers
                assert "x-request-id" in lost.headers
            for _ in range(2):
                assert (await client.post("/orders", headers=key)).status_code == 201
            assert await observer.fetchval("SELECT count(*) FROM orders") == 1
    finally:
        await onceward.close()
        await observer.close()
        if dispose is not None:
            await dispose()
