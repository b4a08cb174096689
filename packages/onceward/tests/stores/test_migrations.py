"""The migration runner: loading, planning, splitting, and databases of version 0.1."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from onceward.cli.database import opened
from onceward.cli.migrate import migrate
from onceward.errors import ConfigurationError
from onceward.stores.parts import MigrationTable
from onceward.stores.sql_loader import load_queries
from onceward.stores.table_names import TableNames
from onceward_protocol.cli.output import CommandError
from onceward_protocol.storage.migrations import (
    Migration,
    pending_migrations,
    run_steps,
    split_statements,
)
from onceward_protocol.storage.sql_files import Queries

FIRST = Migration("shop", 1, "first", "CREATE TABLE a (x);\nCREATE TABLE b (x);\n")
SECOND = Migration("shop", 2, "second", "ALTER TABLE a ADD COLUMN y;\n")
OTHER = Migration("books", 1, "orders", "CREATE TABLE orders (x);\n")

TRIGGER = """\
-- A comment; with a semicolon.
CREATE TRIGGER t AFTER UPDATE ON a
BEGIN
    INSERT INTO b VALUES (1);
    INSERT INTO b VALUES (2);
END;

CREATE INDEX i ON a (x)"""

OPEN_WITH_DJANGO = """
import ast, asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from django.conf import settings
settings.configure(USE_TZ=True, DATABASES={"default": ast.literal_eval(sys.argv[1])})
import django
django.setup()
from onceward.ports import Claimed
from onceward.stores.sessions.django import DjangoStore
from onceward_testing.samples import NOW, a_record
thread = ThreadPoolExecutor(1)
async def main():
    loop = asyncio.get_running_loop()
    names = ast.literal_eval(sys.argv[2])
    store = DjangoStore(lambda work: loop.run_in_executor(thread, work), **names)
    await store.open()
    table = store.table_names.table("migrations")
    rows = await store.read(f"SELECT namespace, number FROM {table} ORDER BY 1, 2")
    print([(row["namespace"], row["number"]) for row in rows])
    claim = await store.claim(a_record().id, NOW)
    if isinstance(claim, Claimed):
        await claim.unit.commit(a_record(), None)
    assert await store.find(a_record().id, NOW) == a_record()
asyncio.run(main())
"""


def run(db: sqlite3.Connection, *known: Migration) -> None:
    run_steps(
        MigrationTable(TableNames(), is_sqlite=True, others=known).apply(),
        lambda sql, values: db.execute(sql, values).fetchall(),
    )


def tables(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def test_pending_migrations_are_those_not_applied() -> None:
    known = [FIRST, SECOND, OTHER]
    assert pending_migrations(set(), known) == known
    assert pending_migrations({("shop", 1)}, known) == [SECOND, OTHER]
    assert pending_migrations({m.id for m in known}, known) == []


def test_newer_migrations_of_a_known_namespace_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="shop 0002, shop 0003"):
        pending_migrations({("shop", 1), ("shop", 3), ("shop", 2)}, [FIRST])


def test_migrations_of_an_unknown_namespace_are_ignored() -> None:
    assert pending_migrations({("shop", 1), ("other", 7)}, [FIRST]) == []


def test_triggers_are_not_split() -> None:
    trigger, index = split_statements(TRIGGER)
    assert trigger.startswith("CREATE TRIGGER")
    assert trigger.endswith("END;")
    assert index == "CREATE INDEX i ON a (x)"


def test_a_script_of_comments_has_no_statements() -> None:
    assert split_statements("-- nothing;\n\n  -- to do\n") == []


def test_each_migration_is_applied_once() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        run(db, FIRST)
        assert {"a", "b"} <= tables(db)
        run(db, FIRST, SECOND, OTHER)
        run(db, FIRST, SECOND, OTHER)
        rows = db.execute("SELECT namespace, number, name FROM onceward_migrations").fetchall()
    assert rows == [("shop", 1, "first"), ("shop", 2, "second"), ("books", 1, "orders")]


# -- databases of 0.1 -----------------------------------------------------------------------------

OF_0_1 = """
CREATE TABLE {prefix}migrations ({column} text NOT NULL, number integer NOT NULL,
    name text NOT NULL, applied_at text NOT NULL, PRIMARY KEY ({column}, number));
INSERT INTO {prefix}migrations VALUES ('core', 1, 'records', '2026-01-01'),
    ('core', 2, 'jobs', '2026-01-01');
CREATE TABLE idempotency_records (tenant text);
INSERT INTO idempotency_records VALUES ('ada');
"""

REFUSED = (
    r'this is a database of version 0\.1 \(table "?(\w+\.)?\w+_migrations"?\), .* another database'
)


@pytest.mark.parametrize("column", ["space", "namespace"])
@pytest.mark.parametrize("prefix", ["onceward_", "acme_"])
def test_file_of_version_0_1_is_refused_and_not_changed(
    tmp_path: Path, prefix: str, column: str
) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(OF_0_1.format(prefix=prefix, column=column))
        before = list(db.iterdump())
    for _ in range(2):
        with pytest.raises(CommandError, match=REFUSED) as raised:
            migrate(f"sqlite:///{path}", as_json=True)
        assert "\n" not in str(raised.value)
    with closing(sqlite3.connect(path)) as db:
        assert list(db.iterdump()) == before


async def test_commands_refuse_a_file_of_version_0_1(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(OF_0_1.format(prefix="onceward_", column="namespace"))
    with pytest.raises(CommandError, match=REFUSED):
        async with opened(f"sqlite:///{path}"):
            pass


@pytest.mark.parametrize("schema", ["public", "old"])
async def test_database_of_version_0_1_is_refused_on_postgresql(
    clean_postgres_url: str, schema: str
) -> None:
    connection = await asyncpg.connect(clean_postgres_url)
    try:
        await connection.execute(
            f"CREATE SCHEMA IF NOT EXISTS {schema}; SET search_path = {schema}"
        )
        await connection.execute(OF_0_1.format(prefix="acme_", column="space"))
        with pytest.raises(CommandError, match=REFUSED):
            async with opened(clean_postgres_url, must_exist=False):
                pass
        assert await connection.fetchval("SELECT count(*) FROM idempotency_records") == 1
        assert not await connection.fetchval("SELECT to_regnamespace('onceward') IS NOT NULL")
    finally:
        await connection.close()


def test_migrations_of_other_tools_are_not_taken_for_those_of_0_1(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(
            "CREATE TABLE django_migrations (id, app, name, applied);"
            "INSERT INTO django_migrations VALUES (1, 'core', 'records', '');"
            'CREATE TABLE "my ""own_migrations" (number, name, applied_at);'
            "INSERT INTO \"my \"\"own_migrations\" VALUES (1, 'first', '');"
        )
    migrate(f"sqlite:///{path}", as_json=True)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM onceward_idempotency_records").fetchone() == (0,)


# -- Django ---------------------------------------------------------------------------------------


def test_django_store_refuses_a_database_with_a_missing_table(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    assert open_with_django(database) == "[('guard', 1)]\n"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE onceward_secret")
    with pytest.raises(AssertionError, match=r"ConfigurationError: onceward_secret is missing"):
        open_with_django(database)


async def test_django_store_creates_a_schema(clean_postgres_url: str) -> None:
    connection = await asyncpg.connect(clean_postgres_url)
    try:
        host, port = await connection.fetchrow(
            "SELECT inet_server_addr()::text, inet_server_port()"
        )
        name, user = await connection.fetchrow("SELECT current_database(), current_user")
        database = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "USER": user,
            "HOST": (host or "127.0.0.1").partition("/")[0],
            "PORT": port,
        }
        for names, table in (
            ({}, "onceward.idempotency_records"),
            ({"table_prefix": "acme_", "schema": "own"}, "own.acme_idempotency_records"),
        ):
            first = open_with_django(database, **names)
            assert open_with_django(database, **names) == first
            assert await connection.fetchval(f"SELECT count(*) FROM {table}") == 1
    finally:
        await connection.close()


def open_with_django(database: Mapping[str, object], **names: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OPEN_WITH_DJANGO, repr(database), repr(names)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_queries_are_read_by_name_without_comments() -> None:
    queries = load_queries("onceward.stores.sqlite")
    assert queries["read_secret"] == "SELECT secret FROM onceward_secret"
    assert not any(line.startswith("--") for sql in queries.values() for line in sql.splitlines())


def test_an_unknown_query_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="no query 'nothing' in here"):
        Queries("here", {})["nothing"]
