"""A NUL in a text that a handler writes to PostgreSQL with a session of the app."""

from typing import Any

import httpx
from fastapi import FastAPI
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.fastapi import Session
from onceward.flask import FlaskGuard
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore

INSERT = "INSERT INTO tea (name) VALUES (:name)"


class Base(DeclarativeBase):
    """The tables of the apps."""


class Tea(Base):
    """A tea."""

    __tablename__ = "tea"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


def key(number: int) -> dict[str, str]:
    return {"Idempotency-Key": f"key-{number}"}


def is_refused(status: int, document: dict[str, Any]) -> None:
    assert (status, document["code"]) == (400, "request.invalid"), document
    assert "NUL (U+0000)" in document["detail"]


async def test_nul_written_by_an_async_session_is_an_error_of_the_caller(
    postgres_url: str,
) -> None:
    engine = create_async_engine(postgres_url.replace("://", "+asyncpg://"))
    app = FastAPI()
    onceward = Onceward(
        SqlAlchemyStore(engine), tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None)
    )
    onceward.install(app)

    @app.post("/statement")
    @onceward.guard()
    async def statement(name: str, session: Session) -> dict[str, str]:
        await session.execute(text(INSERT), {"name": name})
        return {"status": "ok"}

    @app.post("/commit")
    @onceward.guard()
    async def flushed_at_commit(name: str, session: Session) -> dict[str, str]:
        session.add(Tea(name=name))
        return {"status": "ok"}

    @app.post("/open")
    async def not_guarded(name: str, session: Session) -> dict[str, str]:
        await session.execute(text(INSERT), {"name": name})
        await session.commit()
        return {"status": "ok"}

    await onceward.open()
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for number, path in enumerate(("/statement", "/commit", "/open")):
            response = await client.post(path + "?name=a%00b", headers=key(number))
            is_refused(response.status_code, response.json())
            response = await client.post(path + "?name=ab", headers=key(9 + number))
            assert response.status_code == 200, response.text
    assert len(await onceward.store.read("SELECT name FROM tea")) == 3
    await onceward.close()
    await engine.dispose()


def test_nul_written_by_the_session_of_flask_is_an_error_of_the_caller(postgres_url: str) -> None:
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = postgres_url.replace("://", "+psycopg://")
    database = SQLAlchemy(app, model_class=Base)
    with app.app_context():
        database.create_all()
        store = SqlAlchemySyncStore(database.session)
        onceward = Onceward(
            store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None)
        )
    guard = FlaskGuard(onceward, app)

    @app.post("/tea")
    @guard("tea.create")
    def create() -> Any:
        database.session.add(Tea(name=request.args["name"]))
        if request.args.get("flush"):
            database.session.flush()
        return {"status": "ok"}, 201

    client = app.test_client()
    for number, query in enumerate(("name=a%00b", "name=a%00b&flush=1")):
        response = client.post(f"/tea?{query}", headers=key(number))
        is_refused(response.status_code, response.get_json())
    assert client.post("/tea?name=ab", headers=key(9)).status_code == 201
    guard.close()
    with app.app_context():
        database.engine.dispose()
