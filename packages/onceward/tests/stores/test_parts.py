"""The parts of the schema: which tables a database has, upgrades of each part, functions."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from alembic import command
from alembic.config import Config
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import Column, Integer, MetaData, Table, create_engine

from onceward import SINGLE_TENANT, Onceward, Policy, open_store
from onceward.cli.database import opened
from onceward.cli.migrate import migrate
from onceward.errors import ConfigurationError
from onceward.maintenance.retention import DEAD_LETTERS, Retention
from onceward.ports import Store
from onceward.stores import parts as migrations_module
from onceward.stores.parts import GUARD, JOBS, LIBRARY_PARTS, Part, create_within, installed_parts
from onceward.stores.table_names import TableNames
from onceward_protocol.cli.output import CommandError
from onceward_protocol.storage.migrations import Migration
from onceward_testing.samples import NOW, a_record, commit
from packages.onceward.tests.support.options import with_config

GUARD_TABLES = {"idempotency_records", "audit_events", "secret", "migrations", "audit_seals"}
JOB_TABLES = {
    *("jobs", "job_completions", "dead_letters", "job_failures", "job_steps", "job_causes"),
    "paused_queues",
}
ALL_TABLES = {
    *(*GUARD_TABLES, *JOB_TABLES, "sequences", "sequence_numbers"),
    *("request_log", "request_counts", "console_sessions"),
}
PARTS = [pytest.param(part, id=part.name) for part in installed_parts().values()]

Open = Callable[..., Awaitable[Store]]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/app.db"
    return str(request.getfixturevalue("clean_postgres_url"))


@pytest.fixture
async def open_with() -> AsyncIterator[Open]:
    """Return a function that opens a store with these parts, which is closed after the test."""
    stores: list[Store] = []

    async def open_with(url: str, *parts: Part) -> Store:
        store = open_store(url)
        store.schema.want(*parts)
        stores.append(store)
        await store.open()
        return store

    yield open_with
    for store in stores:
        await store.close()


async def tables(store: Store) -> set[str]:
    """Return the tables in the database, Onceward's without prefix and schema."""
    sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    if store.name == "postgresql":
        sql = (
            "SELECT CASE schemaname WHEN 'onceward' THEN '' ELSE schemaname || '.' END || tablename"
            " AS name FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
        )
    return {row["name"].removeprefix("onceward_") for row in await store.read(sql)}


@asynccontextmanager
async def opened_app(url: str, **options: Any) -> AsyncIterator[Onceward[Any]]:
    onceward = Onceward(url, tenants=SINGLE_TENANT, **with_config(**options))
    await onceward.open()
    try:
        yield onceward
    finally:
        await onceward.close()


# -- tables only where a part is used -------------------------------------------------------------


async def test_guard_alone_has_five_tables(url: str) -> None:
    async with opened_app(url) as onceward:
        assert await tables(onceward.store) == GUARD_TABLES
    async with opened_app(url) as onceward:  # once more, with nothing to apply
        assert await tables(onceward.store) == GUARD_TABLES


async def test_guard_without_seals_has_four_tables(url: str) -> None:
    async with opened_app(url, audit_seal_seconds=None) as onceward:
        assert await tables(onceward.store) == GUARD_TABLES - {"audit_seals"}


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"policy": Policy(ordering="strict")}, {"sequences", "sequence_numbers"}),
        ({"request_log_seconds": 60}, {"request_log", "request_counts"}),
        ({"retention": [Retention(DEAD_LETTERS, keep=timedelta(days=9))]}, JOB_TABLES),
    ],
    ids=["sequences", "request log", "retention"],
)
async def test_option_that_needs_tables_creates_them(
    url: str, options: dict[str, Any], more: set[str]
) -> None:
    async with opened_app(url, **options) as onceward:
        assert await tables(onceward.store) == GUARD_TABLES | more


async def test_handler_and_worker_create_the_tables_of_jobs(url: str) -> None:
    async with opened_app(url) as onceward:
        worker = onceward.worker()
        await worker.start()
        await worker.stop()
        assert await tables(onceward.store) == GUARD_TABLES | JOB_TABLES
    onceward = Onceward(url, tenants=SINGLE_TENANT)
    onceward.jobs.handler("letter.send")(_do_nothing)
    await onceward.open()
    assert await tables(onceward.store) == GUARD_TABLES | JOB_TABLES
    await onceward.close()


async def _do_nothing(_: object) -> None:
    return


def test_migrate_creates_all_parts_or_those_that_are_named(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def found() -> set[str]:
        async with opened(url) as store:
            return await tables(store)

    migrate(url, parts=["jobs"], as_json=True)
    assert asyncio.run(found()) == GUARD_TABLES - {"audit_seals"} | JOB_TABLES
    migrate(url, as_json=True)
    assert asyncio.run(found()) == ALL_TABLES
    migrate(url, as_json=False)
    assert "is up to date (6 migrations)" in capsys.readouterr().out
    with pytest.raises(CommandError, match="there is no part job: choose among guard, jobs, "):
        migrate(url, parts=["job"], as_json=True)


async def test_commands_of_a_part_name_what_creates_its_tables(url: str) -> None:
    async with opened(url, must_exist=False):
        pass
    async with opened(url):
        pass
    with pytest.raises(CommandError, match="run onceward migrate --database"):
        async with opened(url, JOBS):
            pass


# -- the first job of an app that was not known to have jobs --------------------------------------


def shop(url: str) -> tuple[Onceward[Any], FastAPI]:
    onceward = Onceward(url, tenants=SINGLE_TENANT)
    app = FastAPI()
    onceward.install(app)

    @app.post("/orders")
    @onceward.guard()
    async def order(status: int = 201) -> Any:
        for number in range(2):
            await onceward.enqueue("letter.send", {"to": "bob"}, resource_id=number)
        if status != 201:
            raise RuntimeError("broken handler")
        return {}

    return onceward, app


def test_first_job_creates_the_tables_in_the_transaction_of_its_request(url: str) -> None:
    onceward, app = shop(url)
    with TestClient(app, raise_server_exceptions=False) as client:

        def read(what: str) -> Any:
            store = onceward.store
            sql = f"SELECT count(*) AS n FROM onceward_{what}"
            return client.portal.call(store.read, store.table_names.render(sql))[0]["n"]  # type: ignore[union-attr]

        def send(key: str, status: int) -> int:
            answer = client.post(f"/orders?status={status}", headers={"Idempotency-Key": key})
            return int(answer.status_code)

        assert send("a", 500) == 500
        assert not onceward.store.schema.has(JOBS)
        assert client.portal is not None
        assert client.portal.call(tables, onceward.store) == GUARD_TABLES
        assert send("b", 201) == 200
        assert onceward.store.schema.has(JOBS)
        assert read("jobs") == 2
        assert send("c", 201) == 200
        assert read("idempotency_records") == 2


async def test_first_jobs_of_several_processes_create_the_tables_once(
    url: str, open_with: Open
) -> None:
    stores = [await open_with(url) for _ in range(3)]
    started = asyncio.Event()

    async def enqueue(store: Store) -> None:
        await started.wait()
        unit = await store.begin()
        created = await create_within(unit.statements, store.schema, JOBS)
        await asyncio.sleep(0.05)
        await unit.commit(None, None)
        store.schema.committed(created)

    tasks = [asyncio.create_task(enqueue(store)) for store in stores]
    started.set()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)
    rows = await stores[0].read(
        stores[0].table_names.render(
            "SELECT count(*) AS n FROM onceward_migrations WHERE namespace = 'jobs' AND number = 1"
        )
    )
    assert rows[0]["n"] == 1


# -- upgrades of each part ------------------------------------------------------------------------


def later(part: Part) -> list[Migration]:
    """Return the migrations of a later version: a table, its rows, and a column."""
    name = f"onceward_{part.name}_colours"
    number = len(part.migrations(is_sqlite=True)) + 1
    scripts = (
        (
            f"CREATE TABLE {name} (tenant text NOT NULL PRIMARY KEY);\n"
            f"INSERT INTO {name} VALUES ('ada');\n"
        ),
        f"ALTER TABLE {name} ADD COLUMN colour text NOT NULL DEFAULT 'red';\n",
    )
    return [Migration(part.name, number + n, "colours", sql) for n, sql in enumerate(scripts)]


@pytest.fixture
def upgrade(monkeypatch: pytest.MonkeyPatch) -> Callable[[Part], None]:
    """Return a function that adds the migrations of a later version to a part."""
    right = Part.migrations

    def upgrade(upgraded: Part) -> None:
        more = later(upgraded)
        monkeypatch.setattr(
            Part,
            "migrations",
            lambda part, *, is_sqlite: [
                *right(part, is_sqlite=is_sqlite),
                *(more if part == upgraded else []),
            ],
        )

    return upgrade


async def colours(store: Store, part: Part) -> Sequence[Any]:
    sql = f"SELECT tenant, colour FROM onceward_{part.name}_colours"
    return [tuple(row.values()) for row in await store.read(store.table_names.render(sql))]


@pytest.mark.parametrize("part", PARTS)
async def test_later_migrations_are_applied_once_by_processes_that_start_together(
    url: str, open_with: Open, upgrade: Callable[[Part], None], part: Part
) -> None:
    before = await open_with(url, part)
    await commit(before, a_record())
    upgrade(part)
    stores = await asyncio.gather(*(open_with(url, part) for _ in range(3)))
    for store in stores:
        assert await colours(store, part) == [("ada", "red")]
        assert await store.find(a_record().id, NOW) == a_record()


@pytest.mark.parametrize("part", PARTS)
async def test_older_process_refuses_a_newer_part(
    url: str,
    open_with: Open,
    upgrade: Callable[[Part], None],
    monkeypatch: pytest.MonkeyPatch,
    part: Part,
) -> None:
    upgrade(part)
    await open_with(url, part)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match=rf"newer version \({part.name} 0002") as raised:
        await open_with(url, part)
    assert "\n" not in str(raised.value)


async def test_present_part_is_upgraded_by_a_process_that_does_not_use_it(
    url: str, open_with: Open, upgrade: Callable[[Part], None]
) -> None:
    await open_with(url, JOBS)
    upgrade(JOBS)
    assert await colours(await open_with(url), JOBS) == [("ada", "red")]


@pytest.mark.parametrize("part", PARTS)
async def test_lost_table_of_a_part_is_refused(url: str, open_with: Open, part: Part) -> None:
    store = await open_with(url, part)
    created = migrations_module._CREATED.findall(part.migrations(is_sqlite=True)[0].sql)
    lost = store.table_names.render(created[-1])
    await store.write(f"DROP TABLE {lost}")
    with pytest.raises(ConfigurationError, match=r"is missing although .* records the migration"):
        await open_with(url, part)


KILLED = """
import asyncio, os, sys
from onceward import open_store
from onceward.stores.parts import MigrationTable
from onceward.stores.parts import installed_parts
url, part, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
right = MigrationTable.apply
def apply(self):
    steps, rows = right(self), None
    for number in range(after):
        try:
            rows = yield steps.send(rows)
        except StopIteration:
            print("all statements ran")
            os._exit(0)
    os._exit(9)
MigrationTable.apply = apply
store = open_store(url)
store.schema.want(installed_parts()[part])
asyncio.run(store.open())
"""


@pytest.mark.parametrize("part", PARTS)
async def test_process_killed_in_the_middle_of_a_migration_leaves_nothing(
    url: str, open_with: Open, part: Part
) -> None:
    for after in (4, 7, 9):
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", KILLED, url, part.name, str(after)],
            capture_output=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 9, done.stderr.decode()
    if not url.startswith("sqlite"):
        connection = await asyncpg.connect(url)
        try:
            assert not await connection.fetchval("SELECT to_regnamespace('onceward') IS NOT NULL")
        finally:
            await connection.close()
    store = await open_with(url, part)
    await commit(store, a_record())


# -- functions of PostgreSQL ----------------------------------------------------------------------


async def functions_row(store: Store, part: Part = GUARD) -> Any:
    sql = (
        "SELECT name, applied_at, (SELECT prosrc FROM pg_proc JOIN pg_namespace"
        " ON pg_namespace.oid = pronamespace WHERE nspname = 'onceward' AND proname = 'claim')"
        " AS source FROM onceward_migrations WHERE namespace = :part AND number = 0"
    )
    rows = await store.read(store.table_names.render(sql), {"part": part.name})
    return rows[0] if rows else None


@pytest.fixture
def other_functions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that has this process be another version with another function."""
    right = Part.functions

    def change(release: str, comment: str) -> None:
        def functions(part: Part, names: TableNames) -> Sequence[str]:
            return [
                text.replace("BEGIN\n", f"BEGIN /* {comment} */\n", 1)
                for text in right(part, names)
            ]

        monkeypatch.setattr(Part, "functions", functions)
        monkeypatch.setattr(migrations_module, "version", lambda _: release)

    return change


async def test_functions_are_replaced_only_if_they_differ(
    clean_postgres_url: str, open_with: Open, other_functions: Callable[..., None]
) -> None:
    first = await functions_row(await open_with(clean_postgres_url))
    stores = await asyncio.gather(*(open_with(clean_postgres_url) for _ in range(3)))
    assert await functions_row(stores[0]) == first
    other_functions("0.3.0", "newer")
    second = await functions_row(await open_with(clean_postgres_url))
    assert "newer" in second["source"]
    assert second["name"].startswith("0.3.0 ")
    assert await functions_row(await open_with(clean_postgres_url)) == second


async def test_older_version_uses_newer_functions_and_leaves_them_alone(
    clean_postgres_url: str,
    open_with: Open,
    other_functions: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other_functions("0.10.0", "newer")
    newer = await functions_row(await open_with(clean_postgres_url))
    monkeypatch.undo()
    older = await open_with(clean_postgres_url)
    assert await functions_row(older) == newer
    await commit(older, a_record())


async def test_release_replaces_the_functions_of_its_candidate(
    clean_postgres_url: str, open_with: Open, other_functions: Callable[..., None]
) -> None:
    other_functions("0.3.0rc2", "candidate")
    await open_with(clean_postgres_url)
    other_functions("0.3.0", "release")
    assert "release" in (await functions_row(await open_with(clean_postgres_url)))["source"]


def test_each_function_has_a_file_of_its_name() -> None:
    names = TableNames.chosen(None, None, is_sqlite=False)
    for is_distributed in (False, True):
        chosen = TableNames(names.prefix, names.schema, is_distributed)
        for part in LIBRARY_PARTS:
            for text in part.functions(chosen):
                assert text.startswith('CREATE OR REPLACE FUNCTION "onceward".')
                assert text.count("CREATE OR REPLACE FUNCTION") == 1
    folder = Path(migrations_module.__file__).parent / "sql"
    for file in folder.rglob("*.sql"):
        name = file.name.split(".")[0]
        assert f"CREATE OR REPLACE FUNCTION onceward_{name}(" in file.read_text(encoding="utf-8")


def test_migrations_contain_no_functions() -> None:
    for part in installed_parts().values():
        for migration in part.migrations(is_sqlite=False):
            assert "FUNCTION" not in migration.sql


# -- roles that may not create tables -------------------------------------------------------------


@asynccontextmanager
async def clerk(url: str) -> AsyncIterator[tuple[asyncpg.Connection, str]]:
    """Yield a connection of the owner, and the URL of a role without any right."""
    admin = await asyncpg.connect(url)
    try:
        await admin.execute("DROP ROLE IF EXISTS clerk; CREATE ROLE clerk LOGIN")
        yield admin, url.replace("postgres@", "clerk@")
    finally:
        await admin.execute("DROP OWNED BY clerk; DROP ROLE clerk")
        await admin.close()


async def test_role_that_may_not_create_the_schema_reads_which_statement_does(
    clean_postgres_url: str, open_with: Open
) -> None:
    async with clerk(clean_postgres_url) as (admin, url):
        for attempt in (url, url.replace("postgresql:", "postgresql+psycopg:")):
            refused = r'run CREATE SCHEMA "onceward" AUTHORIZATION role .* or use schema="public"'
            with pytest.raises(ConfigurationError, match=refused) as raised:
                await open_with(attempt)
            assert "\n" not in str(raised.value)
        await admin.execute('CREATE SCHEMA "onceward" AUTHORIZATION clerk')
        store = await open_with(url)
        await commit(store, a_record())
        await store.close()


async def test_role_that_may_not_create_tables_reads_which_command_does(
    clean_postgres_url: str, open_with: Open
) -> None:
    async with clerk(clean_postgres_url) as (admin, url):
        await open_with(clean_postgres_url)
        await admin.execute("GRANT USAGE ON SCHEMA onceward TO clerk")
        await admin.execute("GRANT ALL ON ALL TABLES IN SCHEMA onceward TO clerk")
        store = await open_with(url)
        await commit(store, a_record())
        with pytest.raises(ConfigurationError, match="run onceward migrate with a role that may"):
            await open_with(url, JOBS)
        await store.close()


# -- Alembic --------------------------------------------------------------------------------------


async def test_alembic_leaves_the_schema_alone(
    clean_postgres_url: str, open_with: Open, tmp_path: Path
) -> None:
    """With the environment that ``alembic init`` writes, which does not include other schemas."""
    await open_with(clean_postgres_url, *installed_parts().values())
    url = clean_postgres_url.replace("postgresql:", "postgresql+psycopg:")
    metadata = MetaData()
    Table("orders", metadata, Column("id", Integer, primary_key=True))
    engine = create_engine(url)
    await asyncio.to_thread(metadata.create_all, engine)
    engine.dispose()
    config = Config(str(tmp_path / "alembic.ini"))
    config.attributes["metadata"] = metadata

    def revise() -> str:
        command.init(config, str(tmp_path / "alembic"))
        config.set_main_option("script_location", str(tmp_path / "alembic"))
        config.set_main_option("sqlalchemy.url", url)
        env = tmp_path / "alembic/env.py"
        text = env.read_text().replace(
            "target_metadata = None", 'target_metadata = config.attributes["metadata"]'
        )
        env.write_text(text.replace("fileConfig(config.config_file_name)", "pass"))
        made: Any = command.revision(config, "more", autogenerate=True)
        return Path(made.path).read_text()

    text = await asyncio.to_thread(revise)
    assert "def upgrade()" in text
    assert "op." not in text.replace("import op", "")
