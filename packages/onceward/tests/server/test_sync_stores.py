"""Sync handlers on stores with sync connections: Flask-SQLAlchemy, and FastAPI's ``def``."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from anyio.from_thread import run as run_on_loop
from fastapi import Depends, FastAPI, HTTPException
from flask import Flask, g, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, create_engine, event, func, select, text
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from onceward import SINGLE_TENANT, Onceward, Policy, Principal
from onceward.errors import ConfigurationError, NoTransactionError, UsageError
from onceward.flask import FlaskGuard
from onceward.stores.psycopg import PsycopgSyncStore, PsycopgSyncTransaction
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore, SqlAlchemyUnit
from onceward_testing.samples import NOW, a_record, claimed, commit


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/shop.db"
    made: str = request.getfixturevalue("postgres_url")
    return made.replace("postgresql", "postgresql+psycopg", 1)


def key(number: int) -> dict[str, str]:
    return {"Idempotency-Key": f"key-{number}"}


class Shop:
    """A Flask-SQLAlchemy app with a guarded view."""

    def __init__(self, url: str, pool_size: int = 5) -> None:
        self.app = Flask(__name__)
        self.app.config["SQLALCHEMY_DATABASE_URI"] = url
        self.app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"pool_size": pool_size, "max_overflow": 0}
        self.app.testing = True  # exceptions of views are raised in the test
        self.db = SQLAlchemy(self.app, model_class=Base)
        with self.app.app_context():
            self.db.create_all()
            self.onceward = Onceward(SqlAlchemySyncStore(self.db.session), tenants=SINGLE_TENANT)
        self.guard = FlaskGuard(self.onceward, self.app)

        @self.app.post("/orders/<item>")
        @self.guard("orders.create")
        def create(item: str) -> Any:
            order = Order(item=item)
            self.db.session.add(order)
            self.db.session.flush()
            assert self.onceward.transaction is self.db.session()
            assert self.guard.transaction is self.db.session()
            return {"id": order.id}, 201

    def post(self, path: str, number: int) -> Any:
        return self.app.test_client().post(path, headers=key(number))

    def count(self) -> int:
        with self.app.app_context():
            return int(self.db.session.scalar(select(func.count()).select_from(Order)) or 0)

    def close(self) -> None:
        self.guard.close()
        with self.app.app_context():
            self.db.engine.dispose()


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    yield shop
    shop.close()


def test_session_of_flask_sqlalchemy_commits_with_the_record(shop: Shop) -> None:
    first, second = shop.post("/orders/boots", 1), shop.post("/orders/boots", 1)
    assert (first.status_code, second.status_code) == (201, 201)
    assert second.headers["Idempotency-Replayed"] == "true"
    assert second.get_json() == first.get_json()
    assert shop.count() == 1


def test_distinct_and_repeated_requests_share_a_pool_of_five(shop: Shop) -> None:
    with ThreadPoolExecutor(20) as threads:
        numbers = [*range(20), *range(20)]
        responses = list(threads.map(lambda number: shop.post("/orders/boots", number), numbers))
    assert {response.status_code for response in responses} == {201}
    assert shop.count() == 20


def test_commit_by_a_flask_view_is_refused_and_nothing_is_kept(shop: Shop) -> None:
    @shop.app.post("/mine")
    @shop.guard("mine")
    def mine() -> str:
        shop.db.session.add(Order(item="boots"))
        shop.db.session.commit()
        return "done"

    with pytest.raises(UsageError, match=r"must not commit.*flush"):
        shop.post("/mine", 1)
    assert shop.count() == 0


def test_session_that_has_only_read_before_the_view_is_used(shop: Shop) -> None:
    seen = []

    @shop.app.before_request
    def look() -> None:
        seen.append(shop.db.session.scalar(select(func.count()).select_from(Order)))

    @shop.app.after_request
    def log(response: Any) -> Any:
        shop.db.session.add(Order(item="log"))
        shop.db.session.commit()  # the session is the app's again
        return response

    assert shop.post("/orders/boots", 1).status_code == 201
    assert shop.post("/orders/boots", 1).status_code == 201
    assert seen == [0, 2]
    assert shop.count() == 3


def sign_in_with_the_session(shop: Shop) -> None:
    """Read in the app's session before each request, as Flask-Login's ``user_loader`` does."""

    @shop.app.before_request
    def sign_in() -> None:
        shop.db.session.scalar(select(func.count()).select_from(Order))


def test_first_request_opens_the_store_without_the_sign_in_s_connection(url: str) -> None:
    shop = Shop(url, pool_size=1)
    sign_in_with_the_session(shop)
    try:
        with ThreadPoolExecutor(4) as threads:
            responses = list(threads.map(lambda _: shop.post("/orders/boots", 1), range(4)))
        assert [response.status_code for response in responses] == [201] * 4
        assert shop.count() == 1
    finally:
        shop.close()


def test_waiting_duplicate_holds_no_connection_of_the_sign_in(url: str) -> None:
    shop = Shop(url, pool_size=2)
    sign_in_with_the_session(shop)
    is_running, may_end = threading.Event(), threading.Event()

    @shop.app.post("/slow")
    @shop.guard("slow", policy=Policy(wait=timedelta(seconds=60)))
    def slow() -> Any:
        shop.db.session.add(Order(item="boots"))
        shop.db.session.flush()
        is_running.set()
        assert may_end.wait(60)
        return {}, 201

    try:
        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(shop.post, "/slow", 1)
            assert is_running.wait(60)
            duplicates = [threads.submit(shop.post, "/slow", 1) for _ in range(3)]
            # All three sign in, one after another, with the one connection that is left.
            waiting = shop.onceward.runtime.idempotency.in_flight
            deadline = time.monotonic() + 30
            while waiting.waiting_count < 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert waiting.waiting_count == 3
            may_end.set()
            statuses = [one.result(60).status_code for one in (first, *duplicates)]
        assert statuses == [201] * 4
        assert shop.count() == 1
    finally:
        may_end.set()
        shop.close()


@pytest.mark.parametrize("flushed", [False, True])
def test_uncommitted_changes_from_before_the_view_are_refused(shop: Shop, *, flushed: bool) -> None:
    @shop.app.before_request
    def change() -> None:
        if request.path == "/orders/late":
            shop.db.session.add(Order(item="early"))
            if flushed:
                shop.db.session.flush()

    assert shop.post("/orders/boots", 1).status_code == 201
    with pytest.raises(UsageError, match="from before the guarded handler"):
        shop.post("/orders/late", 2)
    assert shop.count() == 1


def test_job_is_enqueued_in_the_session_s_transaction(shop: Shop) -> None:
    @shop.app.post("/jobs/<end>")
    @shop.guard("jobs")
    def job(end: str) -> tuple[str, int]:
        shop.db.session.add(Order(item="boots"))
        shop.guard.enqueue("receipt.send", {"end": end})
        return end, 201 if end == "kept" else 409

    assert shop.post("/jobs/undone", 1).status_code == 409
    assert shop.post("/jobs/kept", 2).status_code == 201
    with shop.app.app_context():
        jobs = shop.guard.onceward.store.table_names.table("jobs")
        payloads = shop.db.session.scalars(text(f"SELECT payload FROM {jobs}")).all()
    assert payloads == ['{"end":"kept"}']
    assert shop.count() == 1


def test_store_outside_an_app_context_is_refused() -> None:
    db = SQLAlchemy(model_class=Base)
    with pytest.raises(ConfigurationError, match="app_context"):
        SqlAlchemySyncStore(db.session)


def test_sync_sqlalchemy_objects_get_the_name_of_the_sync_store(shop: Shop) -> None:
    with shop.app.app_context():
        for given in (
            shop.db,
            shop.db.session,
            shop.db.session(),
            shop.db.engine,
            sessionmaker(shop.db.engine),
        ):
            with pytest.raises(ConfigurationError, match=r"Onceward\(SqlAlchemySyncStore\("):
                Onceward(given)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"pass db\.session"):
            SqlAlchemySyncStore(shop.db)  # type: ignore[arg-type]


async def test_session_bound_to_a_connection_is_refused(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    maker = sessionmaker(engine)
    store = SqlAlchemySyncStore(maker)
    await store.open()
    with engine.connect() as connection:
        outer = connection.begin()
        bound = sessionmaker(connection, join_transaction_mode="create_savepoint")
        for given in (bound, scoped_session(bound)):
            with pytest.raises(ConfigurationError, match="bound to one Connection"):
                SqlAlchemySyncStore(given)
        maker.configure(bind=connection)  # by a test, after the app has created the store
        with pytest.raises(ConfigurationError, match="bound to one Connection"):
            await store.claim(a_record().id, NOW)
        assert outer.is_active
    await store.close()
    engine.dispose()


# -- FastAPI's def handlers ---------------------------------------------------------------------


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


async def test_def_handler_of_fastapi_writes_in_a_sync_session(url: str) -> None:
    engine = create_engine(url, pool_size=2, max_overflow=0)
    Base.metadata.create_all(engine)
    app = FastAPI()
    onceward = Onceward(SqlAlchemySyncStore(engine), tenants=SINGLE_TENANT)
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard("orders.create")
    def create(item: str) -> dict[str, int]:
        session = onceward.transaction
        order = Order(item=item)
        session.add(order)
        session.flush()
        run_on_loop(onceward.enqueue, "receipt.send", {"order": order.id})
        return {"id": order.id}

    async with client_of(app) as client:
        responses = await asyncio.gather(
            *(
                client.post("/orders?item=boots", headers=key(number))
                for number in [*range(12), *range(12)]
            )
        )
    assert {response.status_code for response in responses} == {201}
    await onceward.close()
    with sessionmaker(engine)() as session:
        assert session.scalar(select(func.count()).select_from(Order)) == 12
        jobs = onceward.store.table_names.table("jobs")
        assert session.scalar(text(f"SELECT count(*) FROM {jobs}")) == 12
    engine.dispose()


def insert(tx: PsycopgSyncTransaction) -> dict[str, int]:
    tx.execute("CREATE TABLE IF NOT EXISTS rows (v text)")
    tx.connection.execute("INSERT INTO rows (v) VALUES (%s)", ("psycopg",))
    row = tx.fetch_one("SELECT count(*) AS n FROM rows WHERE v = :v", {"v": "psycopg"})
    return {"n": row["n"] if row else 0}


async def test_def_handler_of_fastapi_writes_with_psycopg(postgres_url: str) -> None:
    app = FastAPI()
    onceward = Onceward(PsycopgSyncStore(postgres_url, max_connections=2), tenants=SINGLE_TENANT)
    onceward.install(app)

    @app.post("/rows")
    @onceward.guard("rows")
    def create() -> dict[str, int]:
        return insert(onceward.transaction)

    async with client_of(app) as client:
        for number in (1, 1, 2):
            assert (await client.post("/rows", headers=key(number))).json() == {"n": number}
    await onceward.close()


def test_flask_view_writes_with_psycopg(postgres_url: str) -> None:
    app = Flask(__name__)
    onceward = Onceward(PsycopgSyncStore(postgres_url, max_connections=2), tenants=SINGLE_TENANT)
    guard = FlaskGuard(onceward, app)

    @app.post("/rows")
    @guard("rows")
    def create() -> dict[str, int]:
        assert guard.transaction is onceward.transaction
        guard.enqueue("receipt.send")
        return insert(onceward.transaction)

    try:
        for number in (1, 1, 2):
            response = app.test_client().post("/rows", headers=key(number))
            assert response.get_json() == {"n": number}
    finally:
        guard.close()


async def test_scoped_session_is_refused_in_an_async_framework(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db")
    app = FastAPI()
    onceward = Onceward(
        SqlAlchemySyncStore(scoped_session(sessionmaker(engine))), tenants=SINGLE_TENANT
    )
    onceward.install(app)

    @app.post("/orders")
    @onceward.guard("orders")
    def create() -> None:
        raise AssertionError

    async with client_of(app) as client:
        with pytest.raises(ConfigurationError, match="the engine or a sessionmaker"):
            await client.post("/orders", headers=key(1))
    await onceward.close()
    engine.dispose()


async def test_handler_cancelled_while_its_session_begins_keeps_no_lock(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path}/shop.db", connect_args={"timeout": 0.2})
    store = SqlAlchemySyncStore(engine)
    await store.open()
    first, second = a_record(), a_record(key="another-key")
    unit = await claimed(store, first.id)
    assert isinstance(unit, SqlAlchemyUnit)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def pause(*arguments: Any) -> None:
        if arguments[2] == "BEGIN IMMEDIATE" and not has_begun.is_set():
            has_begun.set()
            may_go_on.wait(60)

    event.listen(engine, "after_cursor_execute", pause)
    abandoned = asyncio.create_task(asyncio.to_thread(unit.transaction.execute, text("SELECT 1")))
    await asyncio.to_thread(has_begun.wait, 60)
    rollback = asyncio.create_task(unit.rollback())
    async with asyncio.timeout(30):
        while not unit.has_ended:
            await asyncio.sleep(0.01)
    may_go_on.set()
    await rollback
    with pytest.raises(NoTransactionError):
        await abandoned
    await commit(store, second)
    await store.close()
    assert engine.pool.status().endswith("Current Checked out connections: 0")
    engine.dispose()


# -- requests that hold a second connection of the pool -----------------------------------------


@pytest.fixture
def pool_of_five(postgres_url: str) -> Iterator[Engine]:
    engine = create_engine(
        postgres_url.replace("postgresql", "postgresql+psycopg", 1),
        pool_size=5,
        max_overflow=0,
        pool_timeout=30,
    )
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def count_orders(engine: Engine) -> int:
    with sessionmaker(engine)() as session:
        return int(session.scalar(select(func.count()).select_from(Order)) or 0)


# Items and keys of 40 parallel requests, their status, and how many orders they add.
BURSTS: list[tuple[list[tuple[str, int]], int, int]] = [
    ([("boots", number) for number in range(40)], 201, 40),
    ([("boots", 100)] * 40, 201, 1),
    ([("none", number) for number in range(200, 240)], 409, 0),  # stored after a rollback
]
# An exhausted pool ends with its time-out, 30 seconds.
SECONDS_PER_BURST = 25


@pytest.mark.parametrize("is_late", [False, True], ids=["identify", "principal"])
async def test_def_handlers_with_their_own_session_do_not_exhaust_the_pool(
    pool_of_five: Engine, *, is_late: bool
) -> None:
    app, sessions = FastAPI(), sessionmaker(pool_of_five)
    one = Principal(tenant="mill", actor="ada")
    caller: dict[str, Any] = {"principal": lambda: one} if is_late else {"identify": lambda _: one}
    onceward = Onceward(SqlAlchemySyncStore(pool_of_five), **caller)
    onceward.install(app)

    def own_session() -> Iterator[Session]:
        with sessions() as session:
            yield session

    def signed_in(session: Annotated[Session, Depends(own_session)]) -> int:
        return session.scalar(text("SELECT 1")) or 0  # and keeps its connection

    @app.post("/orders", status_code=201)
    @onceward.guard("orders.create", policy=Policy(wait=timedelta(seconds=60)))
    def create(item: str, user: Annotated[int, Depends(signed_in)]) -> dict[str, int]:
        order = Order(item=item)
        onceward.transaction.add(order)
        onceward.transaction.flush()
        if item == "none":
            raise HTTPException(409, "sold out")
        return {"id": order.id, "user": user}

    async with client_of(app) as client:
        for sent, status, orders in BURSTS:
            before, started = count_orders(pool_of_five), time.monotonic()
            responses = await asyncio.gather(
                *(client.post(f"/orders?item={item}", headers=key(number)) for item, number in sent)
            )
            assert [response.status_code for response in responses] == [status] * 40
            assert time.monotonic() - started < SECONDS_PER_BURST
            assert count_orders(pool_of_five) == before + orders
    await onceward.close()


@pytest.mark.parametrize("where", ["hook", "view"])
def test_flask_views_with_their_own_session_do_not_exhaust_the_pool(
    pool_of_five: Engine, where: str
) -> None:
    app, sessions = Flask(__name__), sessionmaker(pool_of_five)

    def read() -> None:
        g.session = sessions()
        g.session.scalar(text("SELECT 1"))  # and keeps its connection

    @app.before_request
    def sign_in() -> None:
        if where == "hook":
            read()

    @app.teardown_request
    def close(_error: object) -> None:
        if "session" in g:
            g.session.close()

    onceward = Onceward(SqlAlchemySyncStore(pool_of_five), tenants=SINGLE_TENANT)
    guard = FlaskGuard(onceward, app)  # after the hook

    @app.post("/orders/<item>")
    @guard("orders.create", policy=Policy(wait=timedelta(seconds=60)))
    def create(item: str) -> Any:
        if where == "view":
            read()
        onceward.transaction.add(Order(item=item))
        onceward.transaction.flush()
        return {}, 409 if item == "none" else 201

    def post(what: tuple[str, int]) -> int:
        return app.test_client().post(f"/orders/{what[0]}", headers=key(what[1])).status_code

    with ThreadPoolExecutor(40) as threads:
        for sent, status, orders in BURSTS:
            before, started = count_orders(pool_of_five), time.monotonic()
            assert list(threads.map(post, sent)) == [status] * 40
            assert time.monotonic() - started < SECONDS_PER_BURST
            assert count_orders(pool_of_five) == before + orders
    guard.close()


def test_request_that_gets_no_connection_in_time_is_a_503_with_retry_after(
    postgres_url: str,
) -> None:
    engine = create_engine(
        postgres_url.replace("postgresql", "postgresql+psycopg", 1),
        pool_size=1,
        max_overflow=0,
        pool_timeout=0.1,
    )
    app = Flask(__name__)
    guard = FlaskGuard(Onceward(SqlAlchemySyncStore(engine), tenants=SINGLE_TENANT), app)
    is_running, may_end = threading.Event(), threading.Event()

    @app.post("/orders")
    @guard("orders.create")
    def create() -> Any:
        is_running.set()
        assert may_end.wait(60)
        return {}, 201

    def post(number: int) -> Any:
        return app.test_client().post("/orders", headers=key(number))

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, 1)
        try:
            assert is_running.wait(60)
            refused = post(2)
        finally:
            may_end.set()
        assert first.result(60).status_code == 201
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert refused.get_json()["code"] == "idempotency.store_unavailable"
    guard.close()
    engine.dispose()
