"""The store on asyncpg: its pool, its statements and their errors, its round trips.

Outages and limits of all drivers are in test_postgres_drivers.py.
"""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from onceward.errors import StoreUnavailableError, UsageError
from onceward.ports import Claimed, Held
from onceward.stores.postgres import PostgresStore
from onceward.stores.postgres.pool import ConnectionPool
from onceward_testing.samples import NOW, a_record, an_audit_event, claimed, commit
from onceward_testing.servers import RealPostgres


@pytest.fixture
async def store(clean_postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(clean_postgres_url)
    await store.open()
    unit = await store.begin()
    await unit.transaction.execute("CREATE TABLE t (id integer PRIMARY KEY, value text)")
    await unit.commit(None, None)
    yield store
    await store.close()


async def count(store: PostgresStore) -> int:
    return int((await store.read("SELECT count(*) AS n FROM t"))[0]["n"])


async def terminate(store: PostgresStore, unit) -> None:
    """Cut a unit's connection off on the server, as an administrator or a failover would."""
    row = await unit.transaction.fetch_one("SELECT pg_backend_pid() AS pid")
    await store.read("SELECT pg_terminate_backend(:pid, 5000)", {"pid": row["pid"]})


async def test_missing_server_is_an_outage_when_opening(clean_postgres_url, postgres: RealPostgres):
    postgres.stop("fast")
    store = PostgresStore(clean_postgres_url)
    with pytest.raises(StoreUnavailableError):
        await store.open()
    await store.close()
    postgres.start()
    await store.open()
    await store.close()


async def test_broken_connection_rolls_back_and_releases_the_key(store):
    record = a_record()
    unit = await claimed(store, record.id)
    await unit.transaction.execute("INSERT INTO t VALUES (1, 'x')")
    await terminate(store, unit)
    with pytest.raises(StoreUnavailableError):
        await unit.transaction.execute("INSERT INTO t VALUES (2, 'x')")
    with pytest.raises(StoreUnavailableError):  # it does not come back on another connection
        await unit.transaction.execute("INSERT INTO t VALUES (3, 'x')")
    await unit.rollback()
    await commit(store, record)
    assert await count(store) == 0


async def test_handler_may_use_savepoints_around_failing_statements(store):
    record = a_record()
    unit = await claimed(store, record.id)
    tx = unit.transaction
    await tx.execute("INSERT INTO t VALUES (1, 'x')")
    await tx.execute("SAVEPOINT mine")
    with pytest.raises(asyncpg.UniqueViolationError):
        await tx.execute("INSERT INTO t VALUES (1, 'again')")
    await tx.execute("ROLLBACK TO mine")
    await tx.execute("INSERT INTO t VALUES (2, 'y')")
    await unit.commit(record, None)
    assert await count(store) == 2


async def test_violated_deferred_constraint_is_the_handlers_error(store):
    setup = await store.begin()
    await setup.transaction.execute(
        "CREATE TABLE child (parent integer REFERENCES t DEFERRABLE INITIALLY DEFERRED)"
    )
    await setup.commit(None, None)
    record = a_record(audit_id="audit-1")
    unit = await claimed(store, record.id)
    await unit.transaction.execute("INSERT INTO child VALUES (42)")
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await unit.commit(record, an_audit_event(record))
    assert await store.find(record.id, NOW) is None
    await commit(store, record, audit=True)


async def test_value_of_the_wrong_type_is_not_an_outage(store):
    unit = await store.begin()
    with pytest.raises(asyncpg.DataError, match="str"):
        await unit.transaction.execute("INSERT INTO t VALUES (:id, 'x')", {"id": "one"})
    with pytest.raises(UsageError, match=":id"):
        await unit.transaction.fetch_all("SELECT :id")
    await unit.rollback()
    with pytest.raises(asyncpg.DataError):
        await store.read("SELECT * FROM t WHERE id = :id", {"id": "one"})


async def test_two_statements_at_once_are_not_an_outage(store):
    unit = await store.begin()
    slow = asyncio.ensure_future(unit.transaction.fetch_all("SELECT pg_sleep(0.2)"))
    await asyncio.sleep(0.05)
    with pytest.raises(asyncpg.InterfaceError, match="another operation"):
        await unit.transaction.fetch_one("SELECT 1 AS one")
    await slow
    await unit.rollback()


async def test_a_handler_cannot_end_the_transaction(store):
    unit = await store.begin()
    await unit.transaction.execute("INSERT INTO t VALUES (1, 'x')")
    for method in ("execute", "fetch_all", "fetch_one"):
        with pytest.raises(UsageError):
            await getattr(unit.transaction, method)("COMMIT")
    await unit.rollback()
    assert await count(store) == 0


async def test_held_key_is_reported_without_waiting(store):
    unit = await claimed(store, a_record().id)
    async with asyncio.timeout(10):  # to wait for the holder would be for ever
        assert isinstance(await store.claim(a_record().id, NOW), Held)
    await unit.rollback()


async def test_guarded_request_needs_no_more_round_trips_than_a_bare_one(
    postgres_url: str,
) -> None:
    sent: list[str] = []
    store = PostgresStore(postgres_url, max_connections=1)
    await store.open()
    try:
        connection = await store.connections.acquire()
        await connection.execute("CREATE TABLE boots (id text PRIMARY KEY)")
        connection.add_query_logger(lambda query: sent.append(query.query))
        store.connections.release(connection)

        bare = await store.connections.acquire()
        async with bare.transaction():
            await bare.execute("INSERT INTO boots VALUES ($1)", "bare")
        store.connections.release(bare)
        await asyncio.sleep(0)  # the logger runs in the next iteration of the loop
        round_trips, sent[:] = len(sent), []

        record = a_record()
        claim = await store.claim(record.id, record.created_at)
        assert isinstance(claim, Claimed)
        await claim.unit.transaction.execute("INSERT INTO boots VALUES (:id)", {"id": "guarded"})
        await claim.unit.commit(record, None)
        await asyncio.sleep(0)
        assert len(sent) == round_trips == 3
        assert sent[0].startswith("BEGIN;")
        assert ";COMMIT;RESET" in sent[2]
    finally:
        await store.close()


async def test_connection_opened_while_the_pool_closes_is_closed(clean_postgres_url: str) -> None:
    opened = []
    opening = asyncio.Event()

    async def connect_slowly() -> asyncpg.Connection:
        opening.set()
        connection = await asyncpg.connect(clean_postgres_url)
        await asyncio.sleep(0.1)
        opened.append(connection)
        return connection

    pool = ConnectionPool(connect_slowly, limit=2)
    acquired = asyncio.create_task(pool.acquire(timeout_seconds=5))
    await opening.wait()
    await pool.close(timeout_seconds=5)
    with pytest.raises(ConnectionError, match="the pool is closed"):
        await acquired
    assert [connection.is_closed() for connection in opened] == [True]


async def test_connection_released_after_the_store_has_closed_is_closed(
    clean_postgres_url: str,
) -> None:
    store = PostgresStore(clean_postgres_url)
    await store.open()
    await store.close()
    connection = await asyncpg.connect(clean_postgres_url)
    store.connections.release(connection)
    assert connection.is_closed()


async def test_cancelled_query_closes_its_connection(store: PostgresStore) -> None:
    reading = asyncio.create_task(store.read("SELECT pg_sleep(30)"))
    await asyncio.sleep(0.1)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert [task for task in others if "_cancel" in repr(task.get_coro())] == []
    assert await store.read("SELECT 1 AS one") == [{"one": 1}]
