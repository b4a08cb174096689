"""PostgreSQL's ways to fail, with each driver: outages, COMMIT unknown, cancellation, limits."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy import exc as sa_errors

from onceward import open_store
from onceward.errors import (
    AbortedTransactionError,
    CommitUnknownError,
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    UsageError,
)
from onceward.ports import Found, Held, Store, UnitOfWork
from onceward.stores.postgres import PostgresStore
from onceward.stores.postgres.unit_of_work import PostgresTransaction
from onceward.stores.psycopg import (
    PsycopgStore,
    PsycopgSyncStore,
    PsycopgSyncTransaction,
    PsycopgTransaction,
)
from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore
from onceward_testing.samples import NOW, a_record, claimed, commit
from onceward_testing.servers import RealPostgres
from packages.onceward.tests.support.cut_proxy import LosesTheAnswerTo

NewStore = Callable[..., Store]

ALL = ("asyncpg", "psycopg", "psycopg, sync", "SQLAlchemy, sync")
UNIQUE_VIOLATIONS = (
    asyncpg.UniqueViolationError,
    psycopg.errors.UniqueViolation,
    sa_errors.IntegrityError,
)
SIZES = pytest.mark.parametrize("size", [10, 100_000], ids=["inline", "as a parameter"])


@pytest.fixture(params=ALL)
def new_store(request: pytest.FixtureRequest) -> Iterator[NewStore]:
    """Return a function that makes stores with at most two connections."""
    engines = []

    def new(url: str, *, connections: int = 2, acquire_seconds: float = 3) -> Store:
        options: Any = {"max_connections": connections, "acquire_seconds": acquire_seconds}
        match request.param:
            case "asyncpg":
                return PostgresStore(url, **options)
            case "psycopg":
                return PsycopgStore(url, **options)
            case "psycopg, sync":
                return PsycopgSyncStore(url, **options)
        engines.append(
            create_engine(
                url.replace("postgresql", "postgresql+psycopg", 1),
                pool_size=connections,
                max_overflow=0,
                pool_timeout=acquire_seconds,
            )
        )
        return SqlAlchemySyncStore(engines[-1])

    yield new
    for engine in engines:
        engine.dispose()


@pytest.fixture
async def store(new_store: NewStore, clean_postgres_url: str) -> AsyncIterator[Store]:
    store = new_store(clean_postgres_url)
    await store.open()
    await store.write("CREATE TABLE t (id integer PRIMARY KEY, value text)")
    yield store
    await store.close()


async def write(unit: UnitOfWork, number: int) -> None:
    """Insert a row as a handler would."""
    sql, params = "INSERT INTO t (id) VALUES (:id)", {"id": number}
    match unit.transaction:
        case PostgresTransaction() | PsycopgTransaction() as tx:
            await tx.execute(sql, params)
        case PsycopgSyncTransaction() as tx:
            await asyncio.to_thread(tx.execute, sql, params)
        case session:
            await asyncio.to_thread(session.execute, text(sql), params)


async def count(store: Store) -> int:
    return int((await store.read("SELECT count(*) AS n FROM t"))[0]["n"])


async def terminate(store: Store, unit: UnitOfWork) -> None:
    """Cut a unit's connection off on the server, as an administrator or a failover would."""
    row = await unit.statements.fetch_one("SELECT pg_backend_pid() AS pid")
    assert row is not None
    await store.read("SELECT pg_terminate_backend(:pid, 5000)", {"pid": row["pid"]})


# -- outages ------------------------------------------------------------------------------------


async def test_stopped_server_is_an_outage_until_it_is_back(
    store: Store, postgres: RealPostgres
) -> None:
    record = a_record()
    await commit(store, record)
    unit = await claimed(store, a_record("running").id)
    await write(unit, 1)
    postgres.stop("fast")
    started = time.monotonic()
    lost = sa_errors.OperationalError if isinstance(store, SqlAlchemySyncStore) else None
    with pytest.raises(lost or StoreUnavailableError):
        await write(unit, 2)
    await unit.rollback()
    for call in (
        lambda: store.find(record.id, NOW),
        lambda: store.claim(record.id, NOW),
        store.begin,
        lambda: store.sweep(NOW, 1),
        store.ping,
    ):
        with pytest.raises(StoreUnavailableError):
            await call()
    assert time.monotonic() - started < 10
    postgres.start()
    claim = await store.claim(record.id, NOW)
    assert isinstance(claim, Found)
    assert claim.record == record
    await commit(store, a_record("running"))
    assert await count(store) == 0


@pytest.mark.parametrize("kind", [PostgresStore, PsycopgStore, PsycopgSyncStore])
async def test_missing_database_is_a_configuration_error(
    postgres: RealPostgres, kind: type[PostgresStore]
) -> None:
    postgres.start()
    with pytest.raises(ConfigurationError, match="nowhere"):
        await kind(postgres.url("nowhere")).open()


@SIZES
async def test_connection_broken_before_the_commit_makes_the_outcome_unknown(
    store: Store, size: int
) -> None:
    record = a_record(body=b"x" * size)
    unit = await claimed(store, record.id)
    await write(unit, 1)
    await terminate(store, unit)
    unknown: Any = CommitUnknownError
    if isinstance(store, SqlAlchemySyncStore):  # the flush finds out first
        unknown = (CommitUnknownError, StoreUnavailableError)
    with pytest.raises(unknown):
        await unit.commit(record, None)
    assert await count(store) == 0
    await commit(store, record)


@SIZES
async def test_commit_with_a_lost_response_is_unknown_and_then_found(
    store: Store, new_store: NewStore, clean_postgres_url: str, size: int
) -> None:
    """The one case that a retry must not decide by itself."""
    record = a_record(body=b"x" * size)
    async with LosesTheAnswerTo(b"COMMIT", clean_postgres_url) as url:
        cut = new_store(url, connections=1)
        await cut.open()
        unit = await claimed(cut, record.id)
        await write(unit, 1)
        with pytest.raises(CommitUnknownError):
            await unit.commit(record, None)
        await unit.rollback()
        await cut.close()
    claim = await store.claim(record.id, NOW)
    assert isinstance(claim, Found)
    assert await count(store) == 1


@pytest.mark.parametrize("with_record", [True, False])
async def test_swallowed_statement_error_prevents_the_commit(
    store: Store, with_record: bool
) -> None:
    record = a_record()
    unit = await claimed(store, record.id)
    await write(unit, 1)
    with pytest.raises(UNIQUE_VIOLATIONS):
        await write(unit, 1)
    with pytest.raises(AbortedTransactionError, match=r"rolled everything back.*savepoint"):
        await unit.commit(record if with_record else None, None)
    assert await count(store) == 0
    assert await store.find(record.id, NOW) is None
    await commit(store, record)


async def test_claim_shares_a_message_with_begin_on_a_connection_that_was_read_on(
    store: Store, clean_postgres_url: str
) -> None:
    await asyncio.gather(store.ping(), store.ping())  # SQLAlchemy's connections change their level
    unit = await claimed(store, a_record().id)
    async with await psycopg.AsyncConnection.connect(clean_postgres_url) as observer:
        found = await observer.execute(
            "SELECT query FROM pg_stat_activity WHERE state = 'idle in transaction'"
        )
        messages = [query async for (query,) in found]
    await unit.rollback()
    assert len(messages) == 1
    assert messages[0].startswith("BEGIN")
    assert '"onceward".claim(' in messages[0]


# -- limits and cancellation --------------------------------------------------------------------


async def test_no_connection_leaks_on_any_outcome(store: Store) -> None:
    """Two connections, many ends: were one kept, the rest would wait in vain."""
    for number in range(5):
        record = a_record(f"key-{number}")
        unit = await claimed(store, record.id)
        assert isinstance(await store.claim(record.id, NOW), Held)
        await unit.commit(record, None)
        assert isinstance(await store.claim(record.id, NOW), Found)
        await terminate(store, lost := await store.begin())
        await lost.rollback()
        waiting = asyncio.ensure_future(claimed(store, a_record("cancelled").id))
        await asyncio.sleep(0.001 * number)
        waiting.cancel()
        done = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if not isinstance(done, BaseException):
            await done.rollback()
    await asyncio.gather(*(commit(store, a_record(f"last-{number}")) for number in range(10)))


async def test_caller_without_a_free_connection_is_refused_in_time(
    new_store: NewStore, clean_postgres_url: str
) -> None:
    store = new_store(clean_postgres_url, connections=1, acquire_seconds=0.2)
    await store.open()
    try:
        unit = await store.begin()
        with pytest.raises(StoreUnavailableError, match=r"free|unavailable"):
            await asyncio.wait_for(store.begin(), 5)
        await unit.rollback()
        await store.ping()
    finally:
        await store.close()


# SQLAlchemy's statements run to their end.
@pytest.mark.parametrize("new_store", ["psycopg", "psycopg, sync"], indirect=True)
async def test_cancelled_statement_ends_on_the_server(store: Store) -> None:
    unit = await store.begin()
    started = time.monotonic()
    sleeping = asyncio.ensure_future(unit.statements.fetch_all("SELECT pg_sleep(30)"))
    await asyncio.sleep(0.1)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    await unit.rollback()
    assert time.monotonic() - started < 10
    await commit(store, a_record())


@pytest.mark.parametrize("new_store", ["psycopg, sync", "SQLAlchemy, sync"], indirect=True)
async def test_statement_of_an_abandoned_thread_is_not_committed(store: Store) -> None:
    """A handler may be cancelled while its thread goes on; its connection is used by others."""
    unit = await store.begin()
    await write(unit, 0)
    go_on = threading.Event()
    refused: list[Exception] = []

    def write_late() -> None:
        go_on.wait(10)
        for number in range(1, 20):
            try:
                asyncio.run(write(unit, number))
            except Exception as error:  # noqa: BLE001 - of SQLAlchemy or Onceward
                refused.append(error)

    late = threading.Thread(target=write_late)
    late.start()
    ending = asyncio.ensure_future(unit.rollback())
    go_on.set()
    await ending
    for number in range(5):
        await commit(store, a_record(f"other-{number}"))
    await asyncio.to_thread(late.join)
    await commit(store, a_record("last"))
    assert refused
    assert await count(store) == 0


# -- what a handler may do ----------------------------------------------------------------------


async def test_handler_cannot_end_the_transaction(store: Store) -> None:
    unit = await store.begin()
    await write(unit, 1)
    for method in ("commit", "rollback"):
        connection = getattr(unit.transaction, "connection", None)
        if isinstance(connection, psycopg.AsyncConnection):
            with pytest.raises(UsageError, match="must not"):
                await getattr(connection, method)()
        elif isinstance(connection, psycopg.Connection):
            with pytest.raises(UsageError, match="must not"):
                getattr(connection, method)()
    if isinstance(store, SqlAlchemySyncStore):
        with pytest.raises(UsageError, match="flush"):
            unit.transaction.commit()
    with pytest.raises(UsageError):
        await unit.statements.execute("COMMIT")
    await unit.rollback()
    assert await count(store) == 0


async def test_ended_transaction_raises(store: Store) -> None:
    record = a_record()
    unit = await claimed(store, record.id)
    await unit.commit(record, None)
    with pytest.raises(NoTransactionError):
        await write(unit, 1)
    assert await count(store) == 0


async def test_driver_s_connection_shares_the_transaction_and_has_savepoints(
    clean_postgres_url: str,
) -> None:
    store = open_store(clean_postgres_url.replace("postgresql", "postgresql+psycopg", 1))
    assert isinstance(store, PsycopgStore)
    await store.open()
    try:
        await store.write("CREATE TABLE t (id integer PRIMARY KEY)")
        unit = await store.begin()
        connection = unit.transaction.connection
        await connection.execute("INSERT INTO t VALUES (%s)", (1,))
        with pytest.raises(psycopg.errors.UniqueViolation):
            async with connection.transaction():
                await connection.execute("INSERT INTO t VALUES (%s)", (1,))
        await unit.transaction.execute("INSERT INTO t VALUES (:id)", {"id": 2})
        await unit.commit(None, None)
        assert await count(store) == 2
    finally:
        await store.close()


@pytest.mark.parametrize("make", [PostgresStore, PsycopgStore, PsycopgSyncStore])
async def test_locks_of_a_process_that_was_stopped_are_released(
    make: Callable[..., Any], postgres_url: str
) -> None:
    record = a_record()
    stopped, other = (make(postgres_url, idle_seconds=seconds) for seconds in (0.5, 60))
    await stopped.open()
    await other.open()
    try:
        unit = await claimed(stopped, record.id)  # and no further statement
        await unit.statements.execute("SELECT 1")
        assert isinstance(await other.claim(record.id, NOW), Held)
        async with asyncio.timeout(5):
            while isinstance(found := await other.claim(record.id, NOW), Held):
                await asyncio.sleep(0.05)
        await found.unit.rollback()
        with pytest.raises(StoreUnavailableError):
            await unit.statements.execute("SELECT 1")
        await unit.rollback()
        # It is not reset with what a handler has set.
        row = (await other.read("SHOW idle_in_transaction_session_timeout"))[0]
        assert row["idle_in_transaction_session_timeout"] == "1min"
    finally:
        await stopped.close()
        await other.close()
