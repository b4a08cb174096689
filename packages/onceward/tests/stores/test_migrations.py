"""The migration runner: loading, planning, splitting, and databases of older versions."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import asyncpg
import pytest

from onceward.cli.database import migrate, opened
from onceward.errors import ConfigurationError
from onceward.stores.migrations import MigrationTable
from onceward.stores.sql_loader import load_queries
from onceward_protocol.cli.output import CommandError
from onceward_protocol.storage.migrations import (
    Migration,
    apply_migrations,
    load_migrations,
    pending_migrations,
    run_steps,
    split_statements,
)
from onceward_protocol.storage.sql_files import Queries

FIRST = Migration("core", 1, "first", "CREATE TABLE a (x);\nCREATE TABLE b (x);\n")
SECOND = Migration("core", 2, "second", "ALTER TABLE a ADD COLUMN y;\n")
SERVICE = Migration("shop", 1, "orders", "CREATE TABLE orders (x);\n")

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
from onceward.stores.django import DjangoStore
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
        apply_migrations(known, MigrationTable(is_sqlite=True)),
        lambda sql, values: db.execute(sql, values).fetchall(),
    )


def tables(db: sqlite3.Connection) -> set[str]:
    return {row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}


def test_migrations_are_sorted_by_number() -> None:
    for database in ("sqlite", "postgres"):
        found = load_migrations("core", f"onceward.stores.{database}.migrations")
        assert [migration.number for migration in found] == [*range(1, len(found) + 1)]
        assert found[0].id == ("core", 1)
        assert found[0].name == "records"


def test_pending_migrations_are_those_not_applied() -> None:
    known = [FIRST, SECOND, SERVICE]
    assert pending_migrations(set(), known) == known
    assert pending_migrations({("core", 1)}, known) == [SECOND, SERVICE]
    assert pending_migrations({m.id for m in known}, known) == []


def test_newer_migrations_of_a_known_namespace_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="core 0002, core 0003"):
        pending_migrations({("core", 1), ("core", 3), ("core", 2)}, [FIRST])


def test_migrations_of_an_unknown_namespace_are_ignored() -> None:
    assert pending_migrations({("core", 1), ("other", 7)}, [FIRST]) == []


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
        run(db, FIRST, SECOND, SERVICE)
        run(db, FIRST, SECOND, SERVICE)
        rows = db.execute("SELECT namespace, number, name FROM onceward_migrations").fetchall()
    assert rows[0] == ("core", 0, "table_names")
    assert rows[1:] == [("core", 1, "first"), ("core", 2, "second"), ("shop", 1, "orders")]


def test_old_namespace_column_is_renamed_and_its_rows_count_as_applied() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        make_old_table(db)
        run(db, FIRST, SECOND)
        rows = db.execute("SELECT namespace, number FROM onceward_migrations").fetchall()
        assert rows == [("core", 1), ("core", 2)]
        run(db, FIRST, SECOND)


def test_newer_migrations_in_the_old_column_are_refused() -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        make_old_table(db, 1, 9)
        with pytest.raises(ConfigurationError, match="core 0009"):
            run(db, FIRST)


def make_old_table(db: sqlite3.Connection, *numbers: int) -> None:
    """Make what version 0.1.0 made, with the first migration applied."""
    db.execute(
        "CREATE TABLE onceward_migrations (room TEXT NOT NULL, number INTEGER NOT NULL,"
        " name TEXT NOT NULL, applied_at TEXT NOT NULL, PRIMARY KEY (room, number))"
    )
    for statement in split_statements(FIRST.sql):
        db.execute(statement)
    db.executemany(
        "INSERT INTO onceward_migrations VALUES ('core', ?, 'old', '2026-01-01')",
        [(number,) for number in numbers or (1,)],
    )


def test_django_store_renames_the_column_on_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    before = open_with_django(database)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE onceward_migrations RENAME COLUMN namespace TO room")
    assert open_with_django(database) == before
    assert "('core', 1)" in before


def test_django_store_refuses_a_database_with_a_missing_table(tmp_path: Path) -> None:
    path = tmp_path / "app.db"
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(path)}
    open_with_django(database)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("DROP TABLE onceward_job_steps")
    with pytest.raises(AssertionError, match=r"ConfigurationError: onceward_job_steps is missing"):
        open_with_django(database)


async def test_django_store_renames_the_column_on_postgres_in_a_schema(
    clean_postgres_url: str,
) -> None:
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
        names = {"table_prefix": "acme_", "schema": "own"}
        await connection.execute("DROP SCHEMA IF EXISTS own CASCADE")
        before = open_with_django(database, **names)
        await connection.execute("ALTER TABLE own.acme_migrations RENAME COLUMN namespace TO room")
        assert open_with_django(database, **names) == before
        assert await connection.fetchval("SELECT count(*) FROM own.acme_idempotency_records") == 1
    finally:
        await connection.close()
    assert "('core', 1)" in before


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


async def test_commands_refuse_a_database_whose_column_is_not_renamed_yet(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    async with opened(f"sqlite:///{path}", must_exist=False):
        pass
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE onceward_migrations RENAME COLUMN namespace TO room")
    with pytest.raises(CommandError, match="run onceward migrate"):
        async with opened(f"sqlite:///{path}"):
            pass


def test_migrate_command_renames_the_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.db"
    url = f"sqlite:///{path}"
    migrate(url, as_json=True)
    first = json.loads(capsys.readouterr().out)
    assert {"namespace": "core", "number": 1, "name": "records"} in first["applied"]
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("ALTER TABLE onceward_migrations RENAME COLUMN namespace TO room")
    migrate(url, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"applied": [], "present": first["present"]}
    migrate(url, as_json=False)
    assert "is up to date" in capsys.readouterr().out


async def test_scripts_for_postgresql_are_split_into_single_statements(postgres_url: str) -> None:
    """Citus needs them one by one. A prepared statement, as here, has one command."""
    connection = await asyncpg.connect(postgres_url)
    try:
        for migration in load_migrations("core", "onceward.stores.postgres.migrations"):
            if "CREATE TRIGGER" in migration.sql:  # before tables could be distributed
                await connection.execute(migration.sql)
                continue
            for statement in split_statements(migration.sql):
                await connection.fetch(statement)
    finally:
        await connection.close()
