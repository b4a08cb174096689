"""The app's own SQLAlchemy session as the guarded transaction, alone and behind FastAPI."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import psycopg
import pytest
from fastapi import Depends, FastAPI, HTTPException
from sqlalchemy import create_engine, event, func, insert, make_url, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.util import await_only

from onceward import SINGLE_TENANT, GuardConfig, Onceward
from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    SupersededError,
    UsageError,
)
from onceward.frameworks.starlette import the_transaction
from onceward.ports import Found, Store
from onceward.stores.sessions.asyncpg_messages import SharedTransaction
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward_testing.samples import NOW, a_record, claimed, commit
from onceward_testing.servers import RealPostgres

Session = Annotated[AsyncSession, Depends(the_transaction)]


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(unique=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'app.db'}"
    return str(request.getfixturevalue("clean_postgres_url")).replace("://", "+asyncpg://")


@pytest.fixture
def postgres_only_url(clean_postgres_url: str) -> str:
    return clean_postgres_url.replace("://", "+asyncpg://")


async def opened(engine: AsyncEngine) -> SqlAlchemyStore:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    store = SqlAlchemyStore(async_sessionmaker(engine, expire_on_commit=False))
    await store.open()
    return store


@pytest.fixture
async def engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def store(engine: AsyncEngine) -> AsyncIterator[SqlAlchemyStore]:
    store = await opened(engine)
    yield store
    await store.close()


async def items(store: Store) -> list[str]:
    return [row["item"] for row in await store.read("SELECT item FROM orders ORDER BY id")]


# -- the session, and what a handler may do with it ---------------------------------------------


async def test_rows_added_but_not_flushed_commit_with_the_record(store):
    record = a_record()
    unit = await claimed(store, record.id)
    assert isinstance(unit.transaction, AsyncSession)
    unit.transaction.add(Order(item="tea"))
    await unit.commit(record, None)
    assert await items(store) == ["tea"]
    assert await store.find(record.id, NOW) == record


async def test_error_of_the_handlers_rows_reaches_the_handler(store):
    record = a_record()
    unit = await claimed(store, record.id)
    unit.transaction.add_all([Order(item="tea"), Order(item="tea")])
    with pytest.raises(IntegrityError):
        await unit.commit(record, None)
    assert await items(store) == []
    assert await store.find(record.id, NOW) is None
    await commit(store, record)


async def test_a_handler_cannot_commit_by_itself(store):
    record = a_record()
    unit = await claimed(store, record.id)
    unit.transaction.add(Order(item="tea"))
    with pytest.raises(UsageError, match="flush"):
        await unit.transaction.commit()
    await unit.rollback()
    assert await items(store) == []


async def test_handler_that_closes_the_session_gets_an_error(store):
    """``async with session`` rolls back: a response with 201 would be wrong."""
    record = a_record()
    unit = await claimed(store, record.id)
    async with unit.transaction as session:
        session.add(Order(item="tea"))
        await session.flush()
    with pytest.raises(UsageError, match="closed"):
        await unit.commit(record, None)
    assert await items(store) == []
    assert await store.find(record.id, NOW) is None


async def test_a_savepoint_does_not_commit_by_itself(store):
    """With SQLite's driver left to itself, releasing the first savepoint would commit."""
    unit = await claimed(store, a_record().id)
    async with unit.transaction.begin_nested():
        unit.transaction.add(Order(item="tea"))
    assert await items(store) == []
    await unit.rollback()
    assert await items(store) == []


async def test_savepoint_limits_a_failure(store):
    record = a_record()
    unit = await claimed(store, record.id)
    session = unit.transaction
    session.add(Order(item="tea"))
    await session.flush()
    with pytest.raises(IntegrityError):
        async with session.begin_nested():
            session.add(Order(item="tea"))
    session.add(Order(item="milk"))
    await unit.commit(record, None)
    assert await items(store) == ["tea", "milk"]


async def test_a_handler_may_roll_back_and_start_over(store):
    await commit(store, a_record("before"))
    record = a_record()
    unit = await claimed(store, record.id)
    session = unit.transaction
    session.add(Order(item="undone"))
    await session.flush()
    await session.rollback()
    session.add(Order(item="kept"))
    await unit.commit(record, None)
    assert await items(store) == ["kept"]
    assert isinstance(await store.claim(record.id, NOW), Found)


async def test_primary_key_still_decides_after_a_handlers_rollback(store):
    record = a_record()
    unit = await claimed(store, record.id)
    await unit.transaction.execute(text("SELECT 1"))
    await unit.transaction.rollback()  # on PostgreSQL this releases the lock
    if store.name == "postgresql":
        await commit(store, record)
        unit.transaction.add(Order(item="twice"))
        with pytest.raises(SupersededError):
            await unit.commit(record, None)
    else:
        await unit.rollback()
    assert await items(store) == []


async def test_swallowed_error_prevents_the_commit(store):
    record = a_record()
    unit = await claimed(store, record.id)
    session = unit.transaction
    session.add(Order(item="tea"))
    await session.flush()
    with pytest.raises(IntegrityError):
        await session.execute(insert(Order).values(item="tea"))
    if store.name == "postgresql":
        with pytest.raises(AbortedTransactionError, match="begin_nested"):
            await unit.commit(record, None)
        assert await items(store) == []
        return
    await unit.commit(record, None)  # SQLite undoes only the one statement
    assert await items(store) == ["tea"]


async def test_swallowed_error_prevents_a_commit_without_record(store):
    unit = await store.begin()
    session = unit.transaction
    session.add(Order(item="tea"))
    with pytest.raises(DBAPIError):
        await session.execute(text("SELECT * FROM nowhere"))
    if store.name == "postgresql":
        with pytest.raises(AbortedTransactionError, match="begin_nested"):
            await unit.commit(None, None)
        assert await items(store) == []
    else:
        await unit.rollback()


async def test_ended_unit_refuses_another_commit(store):
    record = a_record()
    unit = await claimed(store, record.id)
    await unit.commit(record, None)
    with pytest.raises(NoTransactionError):
        await unit.commit(record, None)


async def test_engine_is_neither_changed_nor_disposed(store, engine):
    await store.close()
    async with engine.connect() as connection:
        table = store.table_names.table("idempotency_records")
        assert await connection.scalar(text(f"SELECT count(*) FROM {table}")) == 0
    await store.open()


# -- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (create_engine("sqlite://"), "not a synchronous Engine: write create_async_engine"),
        (sessionmaker(create_engine("sqlite://")), "not a synchronous sessionmaker"),
        (AsyncSession(), "takes an async_sessionmaker or an AsyncEngine, not a AsyncSession"),
        ("postgresql+asyncpg://db/x", "takes an engine, not a URL: write create_async_engine"),
        (None, "takes an async_sessionmaker or an AsyncEngine, not a NoneType"),
    ],
)
def test_anything_but_an_asynchronous_engine_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        SqlAlchemyStore(given)


async def test_sessions_bound_to_a_connection_are_refused(engine):
    async with engine.connect() as connection:
        with pytest.raises(ConfigurationError, match="bound to one Connection"):
            SqlAlchemyStore(async_sessionmaker(connection))


@pytest.mark.parametrize("wrong", [{"database": "no_such_database"}, {"username": "no_such_user"}])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_refused_connection_is_a_configuration_error(postgres_only_url, driver, wrong):
    url = make_url(postgres_only_url).set(drivername=f"postgresql+{driver}", **wrong)
    store = (
        SqlAlchemyStore(create_async_engine(url))
        if driver == "asyncpg"
        else SqlAlchemySyncStore(create_engine(url))
    )
    with pytest.raises(ConfigurationError, match=r"cannot connect to PostgreSQL: .*no_such_"):
        await store.open()


async def test_engine_is_accepted_in_place_of_a_session_maker(engine):
    store = SqlAlchemyStore(engine)
    await store.open()
    await commit(store, a_record())
    assert await store.find(a_record().id, NOW) == a_record()
    await store.close()


async def test_static_pool_is_refused():
    engine = create_async_engine("sqlite+aiosqlite://")
    with pytest.raises(ConfigurationError, match="file"):
        SqlAlchemyStore(async_sessionmaker(engine))
    await engine.dispose()


async def test_autocommit_engine_is_refused(postgres_only_url):
    engine = create_async_engine(postgres_only_url)
    store = await opened(engine)
    careless = engine.execution_options(isolation_level="AUTOCOMMIT")
    other = SqlAlchemyStore(async_sessionmaker(careless))
    try:
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await other.open()
        other._is_open = True
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await other.claim(a_record().id, NOW)
        with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            await other.begin()
    finally:
        await store.close()
        await engine.dispose()


async def test_synchronous_below_full_logs_a_warning(tmp_path, caplog):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")

    @event.listens_for(engine.sync_engine, "connect")
    def careless(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=NORMAL")

    store = await opened(engine)
    assert "synchronous" in caplog.text
    assert [entry.levelno for entry in caplog.records] == [logging.WARNING]
    await store.close()
    await engine.dispose()


async def test_apps_begin_listener_is_tolerated(tmp_path):
    """SQLAlchemy's documentation has users emit BEGIN in a listener."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")

    @event.listens_for(engine.sync_engine, "connect")
    def no_begin_of_the_driver(connection: Any, _: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    store = await opened(engine)
    try:

        async def one(number: int) -> None:
            record = a_record(f"key-{number}")
            unit = await claimed(store, record.id)
            await unit.transaction.execute(select(func.count()).select_from(Order))
            unit.transaction.add(Order(item=str(number)))
            await unit.commit(record, None)

        await asyncio.gather(*(one(number) for number in range(20)))
        assert len(await items(store)) == 20
    finally:
        await store.close()
        await engine.dispose()


# -- failing --------------------------------------------------------------------------------------


async def test_sqlite_that_rolled_back_by_itself_cannot_commit_the_rest(tmp_path):
    """After a full disk the driver would begin anew at the next INSERT, without the first rows."""
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    store = await opened(engine)
    try:
        record = a_record()
        unit = await claimed(store, record.id)
        await unit.transaction.execute(insert(Order).values(item="first"))
        connection = await unit.transaction.connection()
        driver = (await connection.get_raw_connection()).driver_connection
        assert driver is not None
        await driver.execute("ROLLBACK")
        await unit.transaction.execute(insert(Order).values(item="second"))
        with pytest.raises(StoreUnavailableError):
            await unit.commit(record, None)
        assert await items(store) == []
        assert await store.find(record.id, NOW) is None
        await commit(store, record)
    finally:
        await store.close()
        await engine.dispose()


async def test_full_disk_is_an_outage_and_rolls_back(tmp_path):
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
    store = await opened(engine)
    try:
        record = a_record(body=b"x" * 1_000_000)
        unit = await claimed(store, record.id)
        unit.transaction.add(Order(item="tea"))
        connection = await unit.transaction.connection()
        pages = await connection.scalar(text("PRAGMA page_count"))
        await connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(StoreUnavailableError, match="full"):
            await unit.commit(record, None)
        assert await items(store) == []
        await commit(store, a_record("small"))
    finally:
        await store.close()
        await engine.dispose()


async def terminate(store: SqlAlchemyStore, session: AsyncSession) -> None:
    pid = await session.scalar(text("SELECT pg_backend_pid()"))
    await store.read("SELECT pg_terminate_backend(:pid, 5000)", {"pid": pid})


def terminate_now(url: str, pid: int) -> None:
    """Terminate a connection while the event loop waits."""
    plain_url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain_url) as other:
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))


@pytest.fixture
async def on_postgres(postgres_only_url: str) -> AsyncIterator[SqlAlchemyStore]:
    engine = create_async_engine(postgres_only_url)
    store = await opened(engine)
    yield store
    await store.close()
    await engine.dispose()


async def test_broken_connection_rolls_back_and_releases_the_key(on_postgres):
    record = a_record()
    unit = await claimed(on_postgres, record.id)
    unit.transaction.add(Order(item="tea"))
    await unit.transaction.flush()
    await terminate(on_postgres, unit.transaction)
    with pytest.raises(DBAPIError):
        await unit.transaction.execute(text("SELECT 1"))
    with pytest.raises(StoreUnavailableError):  # also if the handler continues
        await unit.commit(record, None)
    await commit(on_postgres, record)
    assert await items(on_postgres) == []


async def test_connection_broken_before_the_save_is_an_outage(on_postgres):
    record = a_record()
    unit = await claimed(on_postgres, record.id)
    unit.transaction.add(Order(item="tea"))
    await terminate(on_postgres, unit.transaction)
    with pytest.raises(StoreUnavailableError):
        await unit.commit(record, None)
    await commit(on_postgres, record)


@pytest.mark.parametrize("turns", [2, 3, 4])
async def test_commit_that_was_never_sent_is_an_outage(on_postgres, postgres_only_url, turns):
    """asyncpg sends nothing after the server's last message, which it reads in the second turn."""
    record = a_record()
    unit = await claimed(on_postgres, record.id)
    pid = await unit.transaction.scalar(text("SELECT pg_backend_pid()"))
    terminate_now(postgres_only_url, pid)
    for _ in range(turns):
        await asyncio.sleep(0)
    with pytest.raises(StoreUnavailableError):
        await unit.commit(record, None)
    await commit(on_postgres, record)


@pytest.mark.parametrize("fails_in", ["statement", "flush", "session"])
async def test_outage_has_neither_the_statement_nor_its_parameters(on_postgres, fails_in):
    """Outages are logged, and SQLAlchemy's errors contain what was sent, e.g. a caller's token."""
    record = a_record()
    unit = await claimed(on_postgres, record.id)
    await terminate(on_postgres, unit.transaction)
    outage: BaseException | None
    unit.transaction.add(Order(item="s3cr3t"))
    if fails_in == "session":
        with pytest.raises(DBAPIError) as raised:
            await unit.transaction.flush()
        outage = on_postgres.outage_of(unit.transaction, raised.value)
    else:
        sql = "INSERT INTO orders (item) VALUES (:item)"
        failing = (
            unit.commit(record, None)
            if fails_in == "flush"
            else unit.statements.execute(sql, {"item": "s3cr3t"})
        )
        with pytest.raises(StoreUnavailableError) as failed:
            await failing
        outage = failed.value
    await unit.rollback()
    chain: list[str] = []
    while outage is not None:
        chain += [repr(outage), *traceback.format_exception(outage)]
        outage = outage.__cause__ or outage.__context__
    assert chain
    shown = "".join(chain)
    assert "s3cr3t" not in shown.replace('{"item": "s3cr3t"}', "").replace('item="s3cr3t"', "")
    assert "[SQL" not in shown


@pytest.mark.parametrize("body", [b"{}", b"x" * 20_000], ids=["shares COMMIT", "sent before"])
async def test_connection_broken_in_the_commit_makes_the_outcome_unknown(
    on_postgres, postgres_only_url, monkeypatch, body
):
    record = a_record(body=body)
    unit = await claimed(on_postgres, record.id)
    unit.transaction.add(Order(item="tea"))
    save, share = on_postgres.save, SharedTransaction.commit
    cuts = []

    def save_and_cut(connection: Any, *values: Any) -> None:
        save(connection, *values)
        cuts.append("save")
        await_only(terminate(on_postgres, unit.transaction))

    async def cut_and_commit(shared: SharedTransaction) -> None:
        if shared.last_statement is not None and not cuts:
            cuts.append("commit")
            # The event loop waits, so that COMMIT is sent before asyncpg can read of the end.
            terminate_now(postgres_only_url, shared._driver.get_server_pid())
        await share(shared)

    monkeypatch.setattr(on_postgres, "save", save_and_cut)
    monkeypatch.setattr(SharedTransaction, "commit", cut_and_commit)
    with pytest.raises(CommitUnknownError):
        await unit.commit(record, None)
    assert cuts == ["commit" if len(body) == 2 else "save"]
    monkeypatch.undo()
    assert await items(on_postgres) == []
    await commit(on_postgres, record)


async def test_a_refused_commit_returns_a_clean_connection(postgres_only_url):
    """After the record's error in the message of COMMIT, the transaction must not stay open."""
    engine = create_async_engine(postgres_only_url, pool_size=1, max_overflow=0)
    store = await opened(engine)
    record = a_record()
    unit = await claimed(store, record.id)
    unit.transaction.add(Order(item="tea"))
    other = create_async_engine(postgres_only_url)
    async with other.begin() as connection:  # another process, which ignores the lock
        save = SqlAlchemyStore(async_sessionmaker(other)).save
        await connection.run_sync(save, record, None)
    with pytest.raises(SupersededError):
        await unit.commit(record, None)
    assert await items(store) == []
    assert await store.find(record.id, NOW) == record
    await store.close()
    await engine.dispose()
    await other.dispose()


async def test_stopped_postgres_is_an_outage_until_it_is_back(on_postgres, postgres: RealPostgres):
    record = a_record()
    await commit(on_postgres, record)
    postgres.stop("fast")
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            await on_postgres.find(record.id, NOW)
        with pytest.raises(StoreUnavailableError):
            await on_postgres.claim(record.id, NOW)
        with pytest.raises(StoreUnavailableError):
            await on_postgres.begin()
        with pytest.raises(StoreUnavailableError):
            await on_postgres.sweep(NOW, 1)
        with pytest.raises(StoreUnavailableError):
            await on_postgres.ping()
    postgres.start()
    assert await on_postgres.find(record.id, NOW) == record
    await commit(on_postgres, a_record("after"))


async def test_exhausted_pool_is_an_outage(postgres_only_url):
    engine = create_async_engine(postgres_only_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    store = await opened(engine)
    try:
        unit = await claimed(store, a_record().id)
        with pytest.raises(StoreUnavailableError):
            await store.claim(a_record("other").id, NOW)
        await unit.rollback()
        await commit(store, a_record("other"))
    finally:
        await store.close()
        await engine.dispose()


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_stricter_isolation_never_leads_to_a_second_effect(postgres_only_url, level):
    engine = create_async_engine(postgres_only_url, isolation_level=level)
    store = await opened(engine)
    try:
        record = a_record()
        unit = await claimed(store, record.id)
        await unit.transaction.execute(select(func.count()).select_from(Order))
        await unit.transaction.rollback()  # releases the lock: only the primary key is left
        await unit.transaction.execute(select(func.count()).select_from(Order))
        await commit(store, record)
        unit.transaction.add(Order(item="twice"))
        with pytest.raises(SupersededError):
            await unit.commit(record, None)
        assert await items(store) == []
    finally:
        await store.close()
        await engine.dispose()


async def test_waiting_for_the_write_turn_on_sqlite_holds_no_connection(tmp_path):
    """One slow handler and a pool of two: look-ups and replays go on."""
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{tmp_path / 'app.db'}", pool_size=2, max_overflow=0, pool_timeout=1
    )
    store = await opened(engine)
    try:
        slow = await claimed(store, a_record("slow").id)
        slow.transaction.add(Order(item="slow"))
        await slow.transaction.flush()

        async def one(number: int) -> None:
            record = a_record(f"key-{number}")
            unit = await claimed(store, record.id)
            unit.transaction.add(Order(item=str(number)))
            await unit.transaction.flush()
            await unit.commit(record, None)

        waiting = [asyncio.create_task(one(number)) for number in range(10)]
        await asyncio.sleep(0.1)
        assert await store.find(a_record("slow").id, NOW) is None
        await slow.commit(a_record("slow"), None)
        await asyncio.gather(*waiting)
        assert len(await items(store)) == 11
    finally:
        await store.close()
        await engine.dispose()


async def test_on_sqlite_two_processes_that_read_before_they_write_both_succeed(tmp_path):
    """A deferred transaction would fail at its first write: the file has moved on since it read."""
    engines = [create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}") for _ in range(2)]
    async with engines[0].connect() as connection:
        await connection.exec_driver_sql("PRAGMA journal_mode=WAL")
    stores = [await opened(engine) for engine in engines]

    async def one(number: int) -> None:
        record = a_record(f"key-{number}")
        unit = await claimed(stores[number % 2], record.id)
        await unit.transaction.execute(select(func.count()).select_from(Order))
        await asyncio.sleep(0.005)
        unit.transaction.add(Order(item=str(number)))
        await unit.commit(record, None)

    try:
        await asyncio.gather(*(one(number) for number in range(20)))
        assert len(await items(stores[0])) == 20
    finally:
        for store, engine in zip(stores, engines, strict=True):
            await store.close()
            await engine.dispose()


# -- behind FastAPI -------------------------------------------------------------------------------


@pytest.fixture
async def client(store: SqlAlchemyStore) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    onceward = Onceward(
        store, tenants=SINGLE_TENANT, config=GuardConfig(sweep_every_seconds=None, memory_bytes=0)
    )
    onceward.install(app)

    @app.post("/orders", status_code=201)
    @onceward.guard()
    async def create(body: dict[str, str], session: Session) -> dict[str, Any]:
        order = Order(item=body["item"])
        session.add(order)
        await session.flush()
        await asyncio.sleep(0.01)
        if body.get("then") == "fail":
            raise RuntimeError("after the write")
        if body.get("then") == "refuse":
            raise HTTPException(422, "not this one")
        return {"id": order.id, "item": order.item}

    @app.post("/careless", status_code=201)
    @onceward.guard()
    async def careless(session: Session) -> dict[str, str]:
        session.add(Order(item="careless"))
        await session.commit()
        return {}

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    await onceward.close()


async def post(client: httpx.AsyncClient, key: str, **body: str) -> httpx.Response:
    return await client.post("/orders", json=body, headers={"Idempotency-Key": key})


async def test_order_is_created_once_and_replayed(client, store):
    first = await post(client, "key-1", item="tea")
    second = await post(client, "key-1", item="tea")
    assert first.status_code == second.status_code == 201
    assert first.content == second.content
    assert "idempotency-replayed" not in first.headers
    assert second.headers["idempotency-replayed"] == "true"
    assert await items(store) == ["tea"]
    audit = await store.read(
        store.table_names.render("SELECT tenant, status FROM onceward_audit_events")
    )
    assert [row["status"] for row in audit] == [201]


async def test_another_body_with_the_same_key_is_a_conflict(client, store):
    await post(client, "key-1", item="tea")
    assert (await post(client, "key-1", item="milk")).status_code == 409
    assert await items(store) == ["tea"]


async def test_failed_handler_writes_nothing_and_may_be_retried(client, store):
    for _ in range(2):
        assert (await post(client, "key-1", item="tea", then="fail")).status_code == 500
    assert await items(store) == []
    assert (await post(client, "key-2", item="tea")).status_code == 201


async def test_refusal_rolls_back_and_is_stored_as_the_policy_says(client, store):
    first = await post(client, "key-1", item="tea", then="refuse")
    second = await post(client, "key-1", item="tea", then="refuse")
    assert first.status_code == second.status_code == 422
    assert first.content == second.content
    assert await items(store) == []


async def test_handler_that_commits_fails_and_writes_nothing(client, store):
    response = await client.post("/careless", headers={"Idempotency-Key": "key-1"})
    assert response.status_code == 500
    assert await items(store) == []


async def test_fifty_duplicates_at_once_are_one_order(client, store):
    responses = await asyncio.gather(*(post(client, "key-1", item="tea") for _ in range(50)))
    assert {response.status_code for response in responses} == {201}
    assert len({response.content for response in responses}) == 1
    assert sum("idempotency-replayed" in response.headers for response in responses) == 49
    assert await items(store) == ["tea"]


async def test_fifty_orders_at_once_are_fifty_orders(client, store):
    responses = await asyncio.gather(*(post(client, f"k{n}", item=str(n)) for n in range(50)))
    assert {response.status_code for response in responses} == {201}
    assert len(await items(store)) == 50
