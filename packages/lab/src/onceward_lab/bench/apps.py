"""The apps under load: the same handler bare, guarded by Onceward, and guarded by idemkit.

Each handler does one insert and one commit. Each app runs in one uvicorn worker with 16 database
connections. The bare handler is what a FastAPI user writes with the same driver.
"""

import asyncio
import os
import sqlite3
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from onceward import SINGLE_TENANT, GuardConfig, Onceward, Policy, Principal, open_store
from onceward.fastapi import Session
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore
from onceward.stores.sqlite.group_commit import ConnectionThread

CONNECTIONS = 16
INSERT = "INSERT INTO orders (id, item, quantity) VALUES (:id, :item, :quantity)"
INSERT_NUMBERED = "INSERT INTO orders (id, item, quantity) VALUES ($1, $2, $3)"


class Order(BaseModel):
    item: str
    quantity: int


def _url() -> str:
    return os.environ["BENCH_DATABASE"]


async def _nothing(_connection: Any) -> None:
    return


def _postgres_pool(**options: Any) -> Any:
    import asyncpg

    return asyncpg.create_pool(_url(), min_size=CONNECTIONS, max_size=CONNECTIONS, **options)


def bare_postgres(**options: Any) -> FastAPI:
    """The bare handler with asyncpg, as in its documentation: pool, transaction, insert."""

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        async with _postgres_pool(**options) as app.state.pool:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def create(order: Order):
        new = str(uuid.uuid4())
        async with app.state.pool.acquire() as connection, connection.transaction():
            await connection.execute(INSERT_NUMBERED, new, order.item, order.quantity)
        return {"id": new, "item": order.item}

    return app


def tuned_postgres() -> FastAPI:
    """The bare handler without the reset query of asyncpg's pool: one round trip less."""
    return bare_postgres(reset=_nothing)


def bare_sqlite() -> FastAPI:
    """The bare handler with aiosqlite, as in its documentation: connection, insert, commit.

    Without the lock, concurrent requests would share one transaction.
    """
    import aiosqlite

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        app.state.lock = asyncio.Lock()
        async with aiosqlite.connect(_url().removeprefix("sqlite:///")) as app.state.db:
            await app.state.db.execute("PRAGMA journal_mode=WAL")
            await app.state.db.execute("PRAGMA synchronous=FULL")
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def create(order: Order):
        new = str(uuid.uuid4())
        values = {"id": new, "item": order.item, "quantity": order.quantity}
        async with app.state.lock:
            await app.state.db.execute(INSERT, values)
            await app.state.db.commit()
        return {"id": new, "item": order.item}

    return app


def tuned_sqlite() -> FastAPI:
    """The bare handler with one thread hop per request: the fastest bare version we know."""
    path = _url().removeprefix("sqlite:///")

    def connect() -> sqlite3.Connection:
        db = sqlite3.connect(path, isolation_level=None, timeout=60)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        return db

    writer = ConnectionThread("bare", connect)

    @asynccontextmanager
    async def lifespan(_app: FastAPI):
        await writer.start()
        yield
        await writer.stop()

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def create(order: Order):
        new = str(uuid.uuid4())
        values = {"id": new, "item": order.item, "quantity": order.quantity}

        def insert(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            db.execute(INSERT, values)
            db.execute("COMMIT")

        await writer.run(insert)
        return {"id": new, "item": order.item}

    return app


def guarded(
    *, memory_bytes: int = 32 * 1024 * 1024, audit: bool = True, enqueues: bool = False
) -> FastAPI:
    options: dict[str, Any] = {}
    if _url().startswith("postgresql"):
        options = {"min_connections": CONNECTIONS, "max_connections": CONNECTIONS}
    onceward = Onceward(
        open_store(_url(), **options),
        tenants=SINGLE_TENANT,
        policy=Policy(audit=audit),
        config=GuardConfig(memory_bytes=memory_bytes),
    )
    app = FastAPI()
    app.state.onceward = onceward
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(order: Order):
        new = str(uuid.uuid4())
        await onceward.transaction.execute(
            INSERT, {"id": new, "item": order.item, "quantity": order.quantity}
        )
        if enqueues:
            await onceward.enqueue("ship", {"order": new}, resource_id=new)
        return {"id": new, "item": order.item}

    return app


def guarded_with_console() -> FastAPI:
    """The guarded handler of an app that has the console, for the suite about it.

    It enqueues a job: live pages get an event for it.
    """
    from onceward.sign_in.jwt_auth import JwtIdentify
    from onceward_lab.bench.console import OPERATOR, SECRET
    from onceward_operator.console import TokenAccess, console

    app = guarded(enqueues=True)
    access = TokenAccess(JwtIdentify(secret=SECRET), operators={OPERATOR})
    app.mount("/console", console(app.state.onceward, access=access))
    return app


def guarded_without_memory() -> FastAPI:
    return guarded(memory_bytes=0)


def guarded_without_audit() -> FastAPI:
    return guarded(audit=False)


class Base(DeclarativeBase):
    pass


class OrderRow(Base):
    __tablename__ = "orders"

    id: Mapped[str] = mapped_column(primary_key=True)
    item: Mapped[str]
    quantity: Mapped[int]


def _sessions() -> async_sessionmaker[AsyncSession]:
    engine = create_async_engine(
        _url().replace("postgresql://", "postgresql+asyncpg://"), pool_size=CONNECTIONS
    )
    return async_sessionmaker(engine, expire_on_commit=False)


def bare_sqlalchemy() -> FastAPI:
    """The bare handler with SQLAlchemy's async session, one per request, as FastAPI users write."""
    sessions = _sessions()
    app = FastAPI()

    async def get_session() -> AsyncIterator[AsyncSession]:
        async with sessions() as session:
            yield session

    @app.post("/orders", status_code=201)
    async def create(order: Order, session: Annotated[AsyncSession, Depends(get_session)]):
        row = OrderRow(id=str(uuid.uuid4()), item=order.item, quantity=order.quantity)
        session.add(row)
        await session.commit()
        return {"id": row.id, "item": order.item}

    return app


def _guarded_sqlalchemy(**options: Any) -> FastAPI:
    onceward = Onceward(SqlAlchemyStore(_sessions()), **options)
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(order: Order, session: Session):
        row = OrderRow(id=str(uuid.uuid4()), item=order.item, quantity=order.quantity)
        session.add(row)
        return {"id": row.id, "item": order.item}

    return app


def guarded_sqlalchemy() -> FastAPI:
    return _guarded_sqlalchemy(tenants=SINGLE_TENANT)


def guarded_sqlalchemy_after_dependencies() -> FastAPI:
    async def principal() -> Principal:
        return Principal(tenant="everyone", actor="anonymous")

    return _guarded_sqlalchemy(principal=principal)


def idemkit_postgres() -> FastAPI:
    import asyncpg
    from idemkit import HttpConfig, IdempotencyMiddleware, PostgresBackend

    backend = PostgresBackend.from_url(_url())

    @asynccontextmanager
    async def lifespan(app: FastAPI):
        async with _postgres_pool() as app.state.pool:
            yield

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(
        IdempotencyMiddleware,
        backend=backend,
        config=HttpConfig(scope=lambda _request: "all"),
    )

    @app.post("/orders", status_code=201)
    async def create(order: Order):
        new = str(uuid.uuid4())
        async with app.state.pool.acquire() as connection, connection.transaction():
            await connection.execute(INSERT_NUMBERED, new, order.item, order.quantity)
        return {"id": new, "item": order.item}

    assert asyncpg
    return app
