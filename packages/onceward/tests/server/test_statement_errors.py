"""Errors of a handler's statements that may pass are 503, in every front and store."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from flask import Flask, request
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.fastapi import Session, Tx
from onceward.flask import FlaskGuard
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore

CONFLICT, UNAVAILABLE = "transaction.conflict", "idempotency.store_unavailable"
STATES = {
    "40001": CONFLICT,
    "40P01": CONFLICT,
    "53100": UNAVAILABLE,
    "53200": UNAVAILABLE,
    "57014": UNAVAILABLE,
    "55P03": UNAVAILABLE,
    "58030": UNAVAILABLE,
    "": None,
}
CONFIG = GuardConfig(sweep_every_seconds=None)


def fail(state: str) -> str:
    return (
        f"DO $$ BEGIN RAISE EXCEPTION 'as asked' USING ERRCODE = '{state}'; END $$"
        if state
        else "SELECT 1"
    )


def key(state: str) -> dict[str, str]:
    return {"Idempotency-Key": f"key-{state}"}


def check(state: str, code: str | None, response: Any, document: dict[str, Any]) -> None:
    if code is None:
        assert response.status_code == 200
        return
    assert (response.status_code, document.get("code")) == (503, code), (state, document)
    assert response.headers["retry-after"] == ("0" if code == CONFLICT else "1")
    assert response.headers["x-request-id"]


def fastapi_app(store: Any, kind: Any, run: Callable[..., Any]) -> tuple[Any, Any]:
    onceward: Onceward[Any] = Onceward(store, tenants=SINGLE_TENANT, config=CONFIG)
    app = FastAPI()
    onceward.install(app)

    async def handle(state: str, on: kind) -> dict[str, str]:
        await run(on, fail(state))
        return {"status": "ok"}

    app.add_api_route("/", onceward.guard("fail")(handle), methods=["POST"])
    return app, onceward


@pytest.mark.parametrize("store", ["asyncpg", "session asyncpg"])
async def test_passing_errors_of_statements_are_503(postgres_url: str, store: str) -> None:
    is_session, driver = store.startswith("session"), store.rsplit(maxsplit=1)[-1]
    engine = create_async_engine(postgres_url.replace("://", f"+{driver}://"))
    if is_session:
        app, onceward = fastapi_app(
            SqlAlchemyStore(engine), Session, lambda s, q: s.execute(text(q))
        )
    else:
        app, onceward = fastapi_app(postgres_url, Tx, lambda tx, q: tx.execute(q))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for state, code in STATES.items():
            response = await client.post(f"/?state={state}", headers=key(state))
            check(state, code, response, response.json())
    await onceward.close()
    await engine.dispose()


def test_passing_errors_of_flask_views_are_503(postgres_url: str) -> None:
    engine = create_engine(postgres_url.replace("://", "+psycopg://"))
    app = Flask(__name__)
    onceward = Onceward(SqlAlchemySyncStore(engine), tenants=SINGLE_TENANT, config=CONFIG)
    guard = FlaskGuard(onceward, app)

    @app.post("/")
    @guard("fail")
    def handle() -> dict[str, str]:
        guard.transaction.execute(text(fail(request.args["state"])))
        return {"status": "ok"}

    client = app.test_client()
    for state, code in STATES.items():
        response = client.post(f"/?state={state}", headers=key(state))
        check(state, code, response, response.get_json())
    guard.close()
    engine.dispose()
