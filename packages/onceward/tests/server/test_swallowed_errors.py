"""A handler that ignores the error of a statement and returns success, on PostgreSQL."""

from contextlib import suppress
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.fastapi import Session, Tx
from onceward.stores.postgres import PostgresStore
from onceward.stores.psycopg import PsycopgStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore

INSERT = "INSERT INTO tea VALUES ('green')"
WRONG = "INSERT INTO nowhere VALUES (1)"


@pytest.mark.parametrize("kind", ["asyncpg", "psycopg", "sqlalchemy"])
async def test_swallowed_error_is_a_500_that_names_the_savepoint(
    kind: str, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url, engine = postgres_url, None
    if kind == "sqlalchemy":
        engine = create_async_engine(url.replace("://", "+asyncpg://"))
        store: Any = SqlAlchemyStore(engine)
    else:
        store = PostgresStore(url) if kind == "asyncpg" else PsycopgStore(url)
    app = FastAPI()
    onceward = Onceward(store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None))
    onceward.install(app)

    async def ignores(tx: Any, *, is_wrong: bool) -> dict[str, str]:
        convert = text if kind == "sqlalchemy" else str
        await tx.execute(convert(INSERT))
        if is_wrong:
            with suppress(Exception):
                await tx.execute(convert(WRONG))
        return {"status": "ok"}

    if kind == "sqlalchemy":

        @app.post("/tea")
        @onceward.guard()
        async def in_session(session: Session, is_wrong: bool = False) -> dict[str, str]:
            return await ignores(session, is_wrong=is_wrong)
    else:

        @app.post("/tea")
        @onceward.guard()
        async def in_transaction(tx: Tx, is_wrong: bool = False) -> dict[str, str]:
            return await ignores(tx, is_wrong=is_wrong)

        @app.post("/open")
        async def open_route(tx: Tx) -> dict[str, str]:
            return await ignores(tx, is_wrong=True)

    await onceward.open()
    await onceward.store.write("CREATE TABLE tea (name text)")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"Idempotency-Key": "key-1"}
        for path in ["/tea?is_wrong=1"] * 6 + ["/open"] * (kind != "sqlalchemy"):
            caplog.clear()
            response = await client.post(path, headers=headers)
            assert response.status_code == 500, response.text
            assert "Retry-After" not in response.headers
            assert response.headers["Content-Type"] == "application/problem+json"
            assert "savepoint" in caplog.text
            assert "a statement failed" in caplog.text
        assert await onceward.store.read("SELECT name FROM tea") == []
        assert (
            await onceward.store.read(
                onceward.store.table_names.render("SELECT * FROM onceward_idempotency_records")
            )
            == []
        )
        # The breaker is closed, and the key is free.
        assert (await client.post("/tea", headers=headers)).status_code == 200
    await onceward.close()
    if engine is not None:
        await engine.dispose()
