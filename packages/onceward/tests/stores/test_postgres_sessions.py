"""What a handler leaves in a session of PostgreSQL is gone before another request uses it."""

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from psycopg.rows import dict_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.errors import BodyInvalidError, CommitUnknownError, ConfigurationError
from onceward.ports import Row, Store, UnitOfWork
from onceward.stores.postgres import PostgresStore
from onceward.stores.postgres.unit_of_work import PostgresUnit
from onceward.stores.psycopg import PsycopgStore, PsycopgSyncStore
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward_testing.samples import NOW, a_record, claimed
from onceward_testing.servers import RealPostgres

RECIPE_PAGE = Path(__file__).parents[4] / "docs/how-to/bring-your-own-sqlalchemy-session.md"

STORES = {"asyncpg": PostgresStore, "psycopg": PsycopgStore, "psycopg, sync": PsycopgSyncStore}

# What ends with the transaction if it is rolled back, and what never does.
UNDONE_BY_ROLLBACK = (
    "SELECT set_config('app.tenant', 'acme', false)",
    "SET search_path TO acme, public",
    "SET TIME ZONE 'Asia/Kathmandu'",
    "SET standard_conforming_strings = off",
    "SET client_encoding = 'LATIN1'",
    "SET statement_timeout = '1h'",
    "SET ROLE hf_guest",
    "SET SESSION AUTHORIZATION hf_guest",
    "CREATE TEMP TABLE scratch (secret text)",
    "LISTEN acme_only",
    "DECLARE kept CURSOR WITH HOLD FOR SELECT 'acme'",
)
PERMANENT = ("SELECT pg_advisory_lock(424242)", "PREPARE plan AS SELECT 'acme'")

STATE = """
    SELECT pg_backend_pid() AS pid, session_user AS session, current_user AS role,
           coalesce(current_setting('app.tenant', true), '') AS tenant,
           current_setting('search_path') AS path, current_setting('timezone') AS zone,
           current_setting('standard_conforming_strings') AS strings,
           current_setting('client_encoding') AS encoding,
           current_setting('statement_timeout') AS timeout,
           to_regclass('pg_temp.scratch')::text AS temporary,
           (SELECT count(*) FROM pg_listening_channels()) AS channels,
           (SELECT count(*) FROM pg_cursors WHERE is_holdable) AS cursors,
           (SELECT count(*) FROM pg_prepared_statements WHERE from_sql) AS prepared,
           (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 424242
               AND pid = pg_backend_pid()) AS locks
"""

# What an idle connection holds, before any request uses it again.
IDLE = """
    SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory') AS locks,
           (SELECT count(*) FROM pg_listening_channels()) AS channels, current_user AS role
"""


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, clean_postgres_url: str) -> AsyncIterator[Store]:
    """Return a store with one connection, so that the next request gets the same one."""
    store: Store = STORES[request.param](clean_postgres_url, max_connections=1)
    await store.open()
    await store.write(
        "DO $$ BEGIN CREATE ROLE hf_guest SUPERUSER; EXCEPTION WHEN duplicate_object THEN END $$"
    )
    yield store
    await store.close()


async def run(unit: UnitOfWork[Any], sql: str, *params: Any, raw: bool = False) -> None:
    """Run a statement as a handler would: in its transaction, or on the driver's connection."""
    on: Any = unit.transaction.connection if raw else unit.transaction
    if isinstance(unit, PostgresUnit) and unit.is_sync:
        await asyncio.to_thread(on.execute, sql, *params)
    else:
        await on.execute(sql, *params)


async def fetch(unit: UnitOfWork[Any], sql: str) -> Row:
    row = await unit.statements.fetch_one(sql)
    assert row is not None
    return row


async def state(store: Store) -> Row:
    """Return what a handler of the next request sees."""
    unit = await claimed(store, a_record("next").id)
    found = await fetch(unit, STATE)
    await unit.rollback()
    return found


async def end(unit: UnitOfWork[Any], how: str) -> None:
    match how:
        case "record":
            await unit.commit(a_record(how), None)
        case "large record":
            await unit.commit(a_record(how, body=b"x" * 20_000), None)
        case "no record":
            await unit.commit(None, None)
        case _:
            await unit.rollback()


@pytest.mark.parametrize("raw", [False, True], ids=["transaction", "driver's connection"])
async def test_session_state_of_a_handler_is_not_seen_by_the_next(store: Store, raw: bool) -> None:
    before = await state(store)
    assert (before["strings"], before["encoding"]) == ("on", "UTF8")
    for how in ("record", "large record", "no record", "rollback"):
        unit = await claimed(store, a_record(how).id)
        for sql in (*UNDONE_BY_ROLLBACK, *PERMANENT):
            await run(unit, sql, raw=raw)
        assert await fetch(unit, STATE) != before
        await end(unit, how)
        idle = await store.read(IDLE)
        assert idle == [{"locks": 0, "channels": 0, "role": "postgres"}], how
        assert await state(store) == before, how


async def test_statement_outside_a_transaction_leaves_nothing(store: Store) -> None:
    before = await state(store)
    for sql in (*UNDONE_BY_ROLLBACK[:-1], *PERMANENT):
        await store.write(sql)
        assert await state(store) == before, sql


async def test_statement_caches_of_the_driver_survive_the_cleaning(store: Store) -> None:
    for number in range(8):  # psycopg prepares a statement when it has seen it five times
        unit = await claimed(store, a_record(f"key-{number}").id)
        await run(unit, "PREPARE plan AS SELECT 1", raw=True)
        row = await unit.statements.fetch_one("SELECT :n + 1 AS n", {"n": number})
        assert row == {"n": number + 1}
        prepared = "SELECT count(*) FILTER (WHERE NOT from_sql) AS n FROM pg_prepared_statements"
        assert (await fetch(unit, prepared))["n"] > 0 or number < 6
        await unit.commit(a_record(f"key-{number}"), None)


async def test_settings_of_url_role_and_database_come_back(
    store: Store, clean_postgres_url: str
) -> None:
    name = clean_postgres_url.rpartition("/")[2]
    await store.write(
        "DO $$ BEGIN CREATE ROLE hf_login SUPERUSER LOGIN;"
        " EXCEPTION WHEN duplicate_object THEN END $$"
    )
    await store.write("ALTER ROLE hf_login SET role = 'hf_guest'")
    await store.write(f'ALTER DATABASE "{name}" SET search_path = public, extensions')
    await store.write("ALTER ROLE hf_login SET standard_conforming_strings = off")
    url = clean_postgres_url.replace("postgres@", "hf_login@")
    again = type(store)(f"{url}?options=-c%20lock_timeout%3D7s", max_connections=1)  # type: ignore[call-arg]
    await again.open()
    try:
        before = await state(again)
        assert (before["session"], before["role"]) == ("hf_login", "hf_guest")
        assert (before["path"], before["strings"]) == ("public, extensions", "on")
        unit = await claimed(again, a_record("first").id)
        for sql in (*UNDONE_BY_ROLLBACK, "SET lock_timeout = 0", "SET ROLE NONE"):
            await run(unit, sql)
        await unit.commit(a_record("first"), None)
        assert await state(again) == before
        assert (await again.read("SHOW lock_timeout"))[0]["lock_timeout"] == "7s"
    finally:
        await again.close()
        await store.write(f'ALTER DATABASE "{name}" RESET search_path')


async def test_connection_with_callbacks_of_a_handler_is_closed(store: Store) -> None:
    before = await state(store)
    unit = await claimed(store, a_record("first").id)
    connection = unit.transaction.connection
    if isinstance(store, PostgresStore):
        connection.add_log_listener(lambda *_: None)
    else:
        connection.row_factory = dict_row
        connection.add_notice_handler(lambda _: None)
    await unit.commit(a_record("first"), None)
    assert (await state(store))["pid"] != before["pid"]


@pytest.mark.parametrize("store", ["psycopg", "psycopg, sync"], indirect=True)
async def test_row_factory_of_a_handler_is_not_used_by_the_next(store: Store) -> None:
    unit = await claimed(store, a_record("first").id)
    default = unit.transaction.connection.row_factory
    unit.transaction.connection.row_factory = dict_row
    await unit.commit(a_record("first"), None)
    unit = await claimed(store, a_record("next").id)
    assert unit.transaction.connection.row_factory is default
    await unit.rollback()


async def test_error_of_the_cleaning_leaves_the_outcome_unknown_and_the_commit_done(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = "DO $$ BEGIN RAISE query_canceled; END $$"
    monkeypatch.setattr("onceward.stores.postgres.session._CLEAN", cancelled)
    unused = await claimed(store, a_record("unused").id)
    await unused.commit(a_record("unused"), None)  # is not cleaned
    unit = await claimed(store, a_record("first").id)
    await run(unit, "SELECT 1")
    with pytest.raises(CommitUnknownError):
        await unit.commit(a_record("first"), None)
    assert await store.find(a_record("first").id, NOW) == a_record("first")


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
async def test_database_that_is_not_utf_8_is_refused_at_start(
    postgres: RealPostgres, encoding: str
) -> None:
    name = f"sessions_{encoding.lower()}"
    admin = await asyncpg.connect(postgres.url())
    await admin.execute(f"DROP DATABASE IF EXISTS {name}")
    await admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
    url = postgres.url(name)
    async_engine = create_async_engine(url.replace("postgresql", "postgresql+asyncpg"))
    engine = create_engine(url.replace("postgresql", "postgresql+psycopg"))
    stores: list[Store] = [store(url) for store in STORES.values()]
    stores.append(SqlAlchemyStore(async_engine))
    if encoding != "SQL_ASCII":  # SQLAlchemy itself cannot use psycopg there
        stores.append(SqlAlchemySyncStore(engine))
    try:
        for store in stores:
            with pytest.raises(ConfigurationError, match=f"{encoding}.*ENCODING 'UTF8'"):
                await store.open()
        connection = await asyncpg.connect(url)
        tables = await connection.fetchval(
            "SELECT count(*) FROM pg_tables WHERE schemaname='public'"
        )
        await connection.close()
        assert tables == 0, "nothing is changed"
    finally:
        await async_engine.dispose()
        engine.dispose()
        # Not dropped, which would wait for a checkpoint: the server is removed after the tests.
        await admin.close()


async def test_value_that_cannot_be_stored_is_an_error_of_the_caller(store: Store) -> None:
    await store.write("CREATE TABLE notes (text text, data jsonb)")
    for column, kind, value in (("text", "text", "a\x00b"), ("data", "jsonb", '{"a":"\\u0000"}')):
        unit = await claimed(store, a_record("first").id)
        sql = f"INSERT INTO notes ({column}) VALUES (CAST(:value AS text)::{kind})"
        with pytest.raises(BodyInvalidError, match="cannot store"):
            await run(unit, sql, {"value": value})
        await unit.rollback()


async def test_recipe_of_the_documentation_cleans_connections_of_an_engine(
    clean_postgres_url: str,
) -> None:
    page = RECIPE_PAGE.read_text(encoding="utf-8")
    [recipe] = [
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "RESET" in block
    ]
    names: dict[str, Any] = {}
    exec(recipe, names)
    url = clean_postgres_url.replace("postgresql", "postgresql+asyncpg", 1)
    engine = create_async_engine(url, pool_size=1, max_overflow=0)
    names["clean_returned_connections"](engine)
    store = SqlAlchemyStore(engine)
    await store.open()
    try:
        before = await state(store)
        unit = await claimed(store, a_record("first").id)
        for sql in (*UNDONE_BY_ROLLBACK, *PERMANENT[:1]):
            if "hf_guest" not in sql:  # a role of the other tests
                await unit.statements.execute(sql)
        await unit.commit(a_record("first"), None)
        assert await state(store) == before
    finally:
        await store.close()
        await engine.dispose()


async def test_activity_view_shows_keys_unless_the_role_hides_them(
    clean_postgres_url: str,
) -> None:
    admin = await asyncpg.connect(clean_postgres_url)
    shown = "SELECT string_agg(query, '') FROM pg_stat_activity WHERE application_name = 'onceward'"
    await admin.execute("DROP ROLE IF EXISTS hf_hidden; CREATE ROLE hf_hidden SUPERUSER LOGIN")
    try:
        for hidden in (False, True):
            if hidden:
                await admin.execute("ALTER ROLE hf_hidden SET track_activities = off")
            store = PostgresStore(clean_postgres_url.replace("postgres@", "hf_hidden@"))
            await store.open()
            unit = await claimed(store, a_record("key-of-acme").id)
            await run(unit, "SELECT 1")
            await unit.commit(a_record("key-of-acme", life=timedelta(seconds=-1)), None)
            assert ("key-of-acme" in (await admin.fetchval(shown) or "")) is not hidden
            await store.close()
    finally:
        await admin.execute("DROP OWNED BY hf_hidden CASCADE; DROP ROLE hf_hidden")
        await admin.close()
