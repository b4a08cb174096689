"""Onceward's tables behind a prefix or in a schema, beside other tables."""

import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from onceward import open_store
from onceward.errors import ConfigurationError
from onceward.jobs.admin import JobAdmin
from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job import AlreadyDone, Enqueued
from onceward.jobs.job_store import JobStore
from onceward.ports import Found, Store
from onceward.stores.parts import JOBS
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore, SqlAlchemySyncStore
from onceward_testing.samples import NOW, a_record, claimed, commit

UPGRADE_PAGE = Path(__file__).parents[4] / "docs/how-to/upgrade.md"
CAUSE = Cause("ada", "ada's phone", "request-1", "correlation-1")
JOB = new_job("letter.send", {"to": "bob"}, cause=CAUSE, resource_id="1")

Run = Callable[[str], Awaitable[list[tuple[Any, ...]]]]
Open = Callable[[Store], Awaitable[Store]]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/app.db"
    return str(request.getfixturevalue("clean_postgres_url"))


@pytest.fixture
async def run(url: str) -> AsyncIterator[Run]:
    """Return a function that runs a statement on a connection of the app."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as db:

            async def on_sqlite(sql: str) -> list[tuple[Any, ...]]:
                return db.execute(sql).fetchall()

            yield on_sqlite
        return
    connection = await asyncpg.connect(url)

    async def on_postgres(sql: str) -> list[tuple[Any, ...]]:
        if not sql.startswith("SELECT"):
            await connection.execute(sql)
            return []
        return [tuple(row) for row in await connection.fetch(sql)]

    yield on_postgres
    await connection.close()


async def tables(run: Run, url: str, schema: str | None = "public") -> set[str]:
    sql = f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'"
    if url.startswith("sqlite"):
        sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return {row[0] for row in await run(sql)}


def sqlalchemy_store(url: str, **options: Any) -> SqlAlchemyStore:
    engine = create_async_engine(
        url.replace("postgresql://", "postgresql+asyncpg://").replace("e:///", "e+aiosqlite:///")
    )
    return SqlAlchemyStore(async_sessionmaker(engine, expire_on_commit=False), **options)


def sync_sqlalchemy_store(url: str, **options: Any) -> SqlAlchemySyncStore:
    return SqlAlchemySyncStore(
        create_engine(url.replace("postgresql://", "postgresql+psycopg://")), **options
    )


def psycopg_store(url: str, **options: Any) -> Store:
    return open_store(url.replace("postgresql://", "postgresql+psycopg://"), **options)


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Return a function that opens a store, which is closed after the test."""
    stores: list[Store] = []

    async def opened(store: Store) -> Store:
        stores.append(store)
        store.schema.want(JOBS)
        await store.open()
        return store

    yield opened
    for store in stores:
        await store.close()
        if isinstance(store, SqlAlchemyStore):
            await store._sessions.kw["bind"].dispose()
        if isinstance(store, SqlAlchemySyncStore):
            store.engine.dispose()


async def test_app_with_a_jobs_table_starts_and_keeps_it(run: Run, url: str, opened: Open) -> None:
    await run("CREATE TABLE jobs (title text)")
    await run("INSERT INTO jobs VALUES ('gardener')")
    store = await opened(open_store(url))
    await commit(store, a_record(), audit=True)
    async with JobStore(store).transaction() as tx:
        await JobStore(store).enqueue(tx, JOB)
    assert await run("SELECT * FROM jobs") == [("gardener",)]
    if url.startswith("postgresql"):
        assert await tables(run, url) == {"jobs"}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (open_store, ({"table_prefix": "acme_"}, {"table_prefix": "bolt_"})),
        (open_store, ({}, {"table_prefix": "onceward_two_"})),
        (open_store, ({"schema": "user"}, {"schema": "order"})),
        (sqlalchemy_store, ({"schema": "user", "table_prefix": "a_"}, {"schema": "user"})),
        (sync_sqlalchemy_store, ({"schema": "user", "table_prefix": "a_"}, {"schema": "user"})),
        (psycopg_store, ({"schema": "user"}, {"schema": "order"})),
    ],
    ids=["prefixes", "default", "schemas", "sqlalchemy", "sync sqlalchemy", "psycopg"],
)
async def test_two_apps_in_one_database_share_nothing(
    run: Run,
    url: str,
    opened: Open,
    make: Callable[..., Store],
    names: tuple[dict[str, str], dict[str, str]],
) -> None:
    if "schema" in names[0]:
        if url.startswith("sqlite"):
            with pytest.raises(ConfigurationError, match="SQLite has no schemas"):
                make(url, **names[0])
            return
        await run('DROP SCHEMA IF EXISTS "user" CASCADE; DROP SCHEMA IF EXISTS "order" CASCADE')
    here, there = [await opened(make(url, **chosen)) for chosen in names]
    record, other = (a_record(body=body, audit_id="audit-1") for body in (b"here", b"there"))
    if here.name == "postgresql":  # the advisory locks differ
        held = await claimed(here, record.id)
        await (await claimed(there, record.id)).rollback()
        await held.rollback()
    await commit(here, record, audit=True)
    assert await there.find(record.id, NOW) is None
    await commit(there, other, audit=True)
    found = [await store.claim(record.id, NOW) for store in (here, there)]
    assert found == [Found(record), Found(other)]
    assert await there.sweep(NOW + timedelta(days=2), 10) == 1
    assert await here.find(record.id, NOW) == record
    assert await here.secret() != await there.secret()

    mine, theirs = JobStore(here), JobStore(there)
    async with mine.transaction() as tx:
        assert isinstance(await mine.enqueue(tx, JOB), Enqueued)
    lease: Any = {"worker": "w", "limit": 9, "lease_seconds": 30}
    assert await theirs.claim(["default"], **lease) == []
    (job,) = await mine.claim(["default"], **lease)
    await mine.complete_alone([(job.lease, None)], worker="w")
    async with theirs.transaction() as tx:
        assert isinstance(await theirs.enqueue(tx, JOB), Enqueued)
    async with mine.transaction() as tx:
        assert isinstance(await mine.enqueue(tx, JOB), AlreadyDone)
    assert await JobAdmin(there).state(JOB.id, tenant="ada") == "waiting"


async def test_workers_of_another_prefix_are_not_notified(url: str, opened: Open) -> None:
    stores = [await opened(open_store(url, table_prefix=prefix)) for prefix in ("a_", "b_", "a_")]
    notifiers = [store.notifier() for store in stores]
    for notifier in notifiers[1:]:
        await notifier.open()
        await notifier.wait(0)
    notifiers[0].notify()
    assert await notifiers[2].wait(10)
    assert not await notifiers[1].wait(0.05)
    for notifier in notifiers:
        await notifier.close()


async def test_role_that_may_not_create_tables_opens_a_migrated_schema(
    clean_postgres_url: str, opened: Open
) -> None:
    admin = await asyncpg.connect(clean_postgres_url)
    try:
        await admin.execute("DROP SCHEMA IF EXISTS own CASCADE; DROP ROLE IF EXISTS clerk")
        await opened(open_store(clean_postgres_url, schema="own"))
        await admin.execute("CREATE ROLE clerk LOGIN; GRANT USAGE ON SCHEMA own TO clerk")
        await admin.execute("GRANT ALL ON ALL TABLES IN SCHEMA own TO clerk")
        url = clean_postgres_url.replace("postgres@", "clerk@") + "?schema=own"
        store = await opened(open_store(url))
        await commit(store, a_record())
        assert await store.find(a_record().id, NOW) == a_record()
    finally:
        await admin.execute("DROP OWNED BY clerk; DROP ROLE clerk")
        await admin.close()


# -- tables that were dropped -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (open_store, {}),
        (open_store, {"table_prefix": "acme_"}),
        (sqlalchemy_store, {}),
        (sync_sqlalchemy_store, {}),
    ],
    ids=["default", "prefix", "sqlalchemy", "sync sqlalchemy"],
)
async def test_start_without_a_recorded_table_is_refused_until_all_tables_are_dropped(
    run: Run, url: str, opened: Open, make: Callable[..., Store], options: Mapping[str, str]
) -> None:
    names = (await opened(make(url, **options))).table_names
    records, migrations, jobs = (
        re.escape(names.table(name)) for name in ("idempotency_records", "migrations", "jobs")
    )
    await run(names.render("DROP TABLE onceward_idempotency_records"))
    refused = rf"{records} is missing .*{migrations} .*restore a backup"
    with pytest.raises(ConfigurationError, match=refused) as caught:
        await opened(make(url, **options))
    assert "\n" not in str(caught.value)
    await run(names.render("DROP TABLE onceward_migrations"))
    with pytest.raises(ConfigurationError, match=rf"{jobs}.* exist.* {migrations}"):
        await opened(make(url, **options))
    for table in await tables(run, url, names.schema):
        await run(
            f"DROP TABLE {table}" if names.schema is None else f"DROP TABLE {names.schema}.{table}"
        )
    store = await opened(make(url, **options))
    await commit(store, a_record())
    assert await store.find(a_record().id, NOW) == a_record()


async def test_statements_of_the_documentation_remove_everything_from_postgresql(
    clean_postgres_url: str, opened: Open
) -> None:
    await opened(open_store(clean_postgres_url))
    [script] = re.findall(r"```sql\n(.*?)```", UPGRADE_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    connection = await asyncpg.connect(clean_postgres_url)
    try:
        await connection.execute(script)
        assert not await connection.fetchval("SELECT to_regnamespace('onceward') IS NOT NULL")
    finally:
        await connection.close()
    await commit(await opened(open_store(clean_postgres_url)), a_record())
