"""``onceward migrate``, ``sweep`` and ``keys`` on SQLite and PostgreSQL."""

import asyncio
import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from onceward import open_store
from onceward.ports import Claimed
from onceward.records import Record, RecordId, RequestFingerprint
from packages.protocol.tests.cli.harness import Cli, Here, one_line, run_script

NOW = datetime.now(UTC)
KEY = "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/commands.db"
    return str(request.getfixturevalue("postgres_url"))


def record(tenant: str, key: str, *, age: timedelta, body: bytes = b'{"ok":true}') -> Record:
    created_at = NOW - age
    return Record(
        id=RecordId(tenant, "POST /things", key),
        fingerprint=RequestFingerprint("b" * 64, "f" * 64),
        status=201,
        headers={"content-type": "application/json"},
        body=body,
        created_at=created_at,
        expires_at=created_at + timedelta(hours=24),
        request_id=f"request-of-{tenant}",
        correlation_id="chain",
        client_generated_at=created_at - timedelta(hours=1),
    )


def save_records(url: str, *records: Record) -> None:
    async def save() -> None:
        store = open_store(url)
        await store.open()
        for each in records:
            claim = await store.claim(each.id, each.created_at)
            assert isinstance(claim, Claimed)
            await claim.unit.commit(each, None)
        await store.close()

    asyncio.run(save())


def test_migrate_prints_what_it_applied_and_applies_it_once(cli: Cli, database: str) -> None:
    first = cli("migrate", "--database", database, "--json")
    applied = json.loads(first.stdout)["applied"]
    assert {"namespace": "guard", "number": 1, "name": "guard"} in applied
    again = cli("migrate", ONCEWARD_DATABASE_URL=database)
    assert again.returncode == 0
    assert b"is up to date" in again.stdout


def test_commands_name_a_missing_table_and_what_to_do(here: Here, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/commands.db"
    assert here("migrate", "--database", url).returncode == 0
    with closing(sqlite3.connect(tmp_path / "commands.db")) as db:
        db.execute("DROP TABLE onceward_idempotency_records")
    for command in (["migrate"], ["keys", "ls"], ["sweep"]):
        done = here(*command, "--database", url)
        assert done.returncode == 1
        line = one_line(done.stderr)
        assert "onceward_idempotency_records is missing" in line
        assert "restore a backup" in line


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_commands_need_no_asyncpg_if_psycopg_is_installed(scheme: str, postgres_url: str) -> None:
    url = postgres_url.replace("postgresql", scheme, 1)
    commands = [["migrate"], ["migrate"], ["keys", "ls"], ["sweep"], ["jobs", "ls"]]
    script = (
        "import sys\n"
        "sys.modules['asyncpg'] = None\n"
        "from onceward_protocol.cli.main import main\n"
        f"for command in {commands!r}:\n"
        f"    sys.argv = ['onceward', *command, '--database', {url!r}]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        print(command, end.code)\n"
    )
    done = run_script(script)
    ends = [line for line in done.stdout.decode().splitlines() if line.startswith("[")]
    assert ends == [f"{command} {0}" for command in commands], done.stderr
    assert b"is up to date" in done.stdout


def test_commands_use_the_prefix_of_the_url_or_of_the_environment(
    here: Here, database: str
) -> None:
    mark = "?table_prefix=acme_"
    assert here("migrate", "--database", database + mark).returncode == 0
    save_records(database + mark, record("ada", KEY, age=timedelta(hours=1)))
    without = here("keys", "ls", "--database", database)
    assert (without.returncode, b"run onceward migrate" in without.stderr) == (1, True)
    for url, environment in (
        (database + mark, {}),
        (database, {"ONCEWARD_TABLE_PREFIX": "acme_"}),
        (database + mark, {"ONCEWARD_TABLE_PREFIX": "other_"}),
    ):
        listed = here("keys", "ls", "--database", url, "--json", **environment)
        assert [found["key"] for found in json.loads(listed.stdout)] == [KEY]


def test_keys_ls_keys_show_and_sweep(here: Here, database: str) -> None:
    old, new = timedelta(hours=25), timedelta(hours=1)
    save_records(
        database,
        record("ada", KEY, age=new, body=b"\xff\x00"),
        record("bob", KEY, age=timedelta(hours=2)),
        record("ada", "old", age=old),
    )
    listed = json.loads(here("keys", "ls", "--database", database, "--json").stdout)
    assert [(r["tenant"], r["key"], r["expired"]) for r in listed] == [
        ("ada", KEY, False),
        ("bob", KEY, False),
        ("ada", "old", True),
    ]
    plain = here("keys", "ls", "--database", database, "--tenant", "ada", "--limit", "1")
    heading, row = plain.stdout.decode().splitlines()
    assert heading.split("\t")[:4] == ["created", "tenant", "endpoint", "key"]
    assert row.split("\t")[1:5] == ["ada", "POST /things", KEY, "201"]

    several = here("keys", "show", KEY, "--database", database)
    assert several.returncode == 1
    assert "2 records have that key" in one_line(several.stderr)
    assert b"bob" in several.stdout
    show = ("keys", "show", KEY, "--database", database, "--json", "--tenant")
    text = json.loads(here(*show, "bob").stdout)
    assert (text["body"], text["headers"]) == ('{"ok":true}', {"content-type": "application/json"})
    created_at = datetime.fromisoformat(text["created_at"])
    assert datetime.fromisoformat(text["client_generated_at"]) == created_at - timedelta(hours=1)
    assert json.loads(here(*show, "ada").stdout)["body_base64"] == "/wA="

    swept = here("sweep", "--database", database, "--json")
    assert json.loads(swept.stdout) == {"deleted": 1}
    assert here("sweep", "--database", database).stdout == b"0 expired records deleted\n"
    gone = here("keys", "show", "old", "--database", database)
    assert (gone.returncode, gone.stdout) == (1, b"")
    one_line(gone.stderr)


@pytest.mark.parametrize("arguments", [["keys", "ls"], ["sweep"]])
def test_missing_sqlite_file_is_not_created(
    here: Here, tmp_path: Path, arguments: list[str]
) -> None:
    done = here(*arguments, "--database", "sqlite:///nowhere.db")
    assert done.returncode == 1
    assert "nowhere.db does not exist" in one_line(done.stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("mysql://x", 2),
        ("sqlite://", 2),
        ("sqlite:////nowhere/x.db", 1),
        ("postgresql://me:hunter2@127.0.0.1:1/x", 1),
    ],
)
def test_unusable_database_is_reported_in_one_line(here: Here, url: str, code: int) -> None:
    done = here("migrate", "--database", url)
    assert (done.returncode, done.stdout) == (code, b"")
    assert "hunter2" not in one_line(done.stderr)


def test_file_that_is_not_a_database_is_reported_in_one_line(here: Here, tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database, " * 100)
    for arguments in (["migrate"], ["keys", "ls"]):
        done = here(*arguments, "--database", "sqlite:///x.db")
        assert done.returncode == 1
        one_line(done.stderr)


def test_database_of_another_program_is_not_changed(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (a)")
    db.close()
    for command in (("keys", "ls"), ("sweep",)):
        done = cli(*command, "--database", f"sqlite:///{path}")
        assert done.returncode == 1
        assert b"onceward migrate" in done.stderr
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]
    db.close()
