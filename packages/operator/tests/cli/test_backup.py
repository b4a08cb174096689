"""``onceward backup`` and ``restore``: consistent while the server writes, never half a file."""

import asyncio
import json
import sqlite3
import stat
import threading
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from onceward import open_store
from onceward.records import RecordId
from packages.onceward.tests.cli.test_database_commands import (
    KEY,
    NOW,
    record,
    save_records,
)
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.shop import CREATE, make_app
from packages.protocol.tests.cli.harness import Here, one_line

URL = "sqlite:///shop.db"


@pytest.fixture
def shop(here: Here, tmp_path: Path) -> Path:
    """Return a database with one record, in the working directory of the commands."""
    del here  # it changes the directory
    save_records(URL, record("ada", KEY, age=timedelta(0)))
    return tmp_path / "shop.db"


def epoch(path: Path) -> str:
    with closing(sqlite3.connect(path)) as db:
        return str(db.execute("SELECT cache_epoch FROM onceward_secret").fetchone()[0])


def test_backup_is_consistent_while_another_connection_writes(
    here: Here, shop: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(shop)) as db:
        db.execute("CREATE TABLE debit (n INTEGER, filler BLOB)")
        db.execute("CREATE TABLE credit (n INTEGER, filler BLOB)")
        # Enough pages for several steps of the copy.
        db.execute("INSERT INTO debit VALUES (0, zeroblob(20000000))")
        db.execute("INSERT INTO credit VALUES (0, x'')")
        db.commit()
    stop = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        with closing(sqlite3.connect(shop, timeout=30)) as db:
            while not stop.is_set():
                written += 1
                db.execute("INSERT INTO debit VALUES (?, randomblob(2000))", (written,))
                db.execute("INSERT INTO credit VALUES (?, randomblob(2000))", (written,))
                db.commit()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        counts = []
        for number in range(3):
            while written < 5 * (number + 1):
                stop.wait(0.001)
            done = here("backup", f"copy{number}.db", "--database", URL)
            assert done.returncode == 0, done
            with closing(sqlite3.connect(tmp_path / f"copy{number}.db")) as db:
                debit, credit = (
                    db.execute(f"SELECT count(*), max(n) FROM {table}").fetchone()
                    for table in ("debit", "credit")
                )
                assert debit == credit
                assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
                counts.append(debit[0])
    finally:
        stop.set()
        writer.join()
    assert counts == sorted(counts)
    assert counts[0] > 1
    mode = (tmp_path / "copy0.db").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    assert not list(tmp_path.glob(".*partial*"))


def test_restore_brings_records_back_and_renews_the_cache_epoch(
    here: Here, shop: Path, tmp_path: Path
) -> None:
    assert here("backup", "copy.db", "--database", URL, "--json").returncode == 0
    again = here("backup", "copy.db", "--database", URL)
    assert again.returncode == 2
    assert "copy.db exists" in one_line(again.stderr)
    assert here("backup", "copy.db", "--database", URL, "--force").returncode == 0
    save_records(URL, record("ada", "later", age=timedelta(0)))

    refused = here("restore", "copy.db", "--database", URL)
    assert refused.returncode == 2
    assert "shop.db exists" in one_line(refused.stderr)
    with closing(sqlite3.connect(shop)) as in_use:
        in_use.execute("SELECT count(*) FROM onceward_secret").fetchone()
        refused = here("restore", "copy.db", "--database", URL, "--force")
        assert refused.returncode == 2
        assert "is open in another process" in one_line(refused.stderr)
    before = epoch(tmp_path / "copy.db")
    done = here("restore", "copy.db", "--database", URL, "--force", "--json")
    assert (done.returncode, json.loads(done.stdout)["database"]) == (0, "shop.db")
    found = json.loads(here("keys", "ls", "--database", URL, "--json").stdout)
    assert [each["key"] for each in found] == [KEY]
    assert epoch(shop) != before

    # A write-ahead log of another database must not be applied to the restored one.
    shop.unlink()
    shop.with_name("shop.db-wal").write_bytes(b"left over")
    assert here("restore", "copy.db", "--database", URL).returncode == 0
    assert not shop.with_name("shop.db-wal").exists()
    assert not list(tmp_path.glob(".*partial*"))


def test_damaged_and_foreign_files_are_not_restored(here: Here, shop: Path, tmp_path: Path) -> None:
    assert here("backup", "copy.db", "--database", URL).returncode == 0
    raw = bytearray((tmp_path / "copy.db").read_bytes())
    raw[8192:12288] = b"\x5a" * 4096
    (tmp_path / "damaged.db").write_bytes(raw)
    (tmp_path / "text.db").write_text("no database")
    with closing(sqlite3.connect(tmp_path / "other.db")) as db:
        db.execute("CREATE TABLE t (x)")
    before = shop.read_bytes()
    for file, expected in [
        ("damaged.db", "is not a usable backup"),
        ("text.db", "is not a usable backup"),
        ("other.db", "is not a backup of Onceward"),
        ("missing.db", "does not exist"),
        ("shop.db", "are the same file"),
    ]:
        done = here("restore", file, "--database", URL, "--force")
        assert (done.returncode, done.stdout) == (2, b""), file
        assert expected in one_line(done.stderr)
    assert shop.read_bytes() == before
    # A damaged database can be replaced.
    shop.write_bytes(raw)
    assert here("restore", "copy.db", "--database", URL, "--force").returncode == 0
    assert here("keys", "show", KEY, "--database", URL).returncode == 0


def test_backup_of_a_missing_database_or_to_a_bad_place_writes_nothing(
    here: Here, shop: Path, tmp_path: Path
) -> None:
    before = sorted(tmp_path.iterdir())
    for arguments, expected in [
        (["copy.db", "--database", "sqlite:///gone.db"], "gone.db does not exist"),
        (["nowhere/copy.db", "--database", URL], "directory nowhere does not exist"),
        (["shop.db", "--database", URL, "--force"], "would overwrite the database"),
    ]:
        done = here("backup", *arguments)
        assert (done.returncode, done.stdout) == (2, b"")
        assert expected in one_line(done.stderr)
    assert sorted(tmp_path.iterdir()) == before
    assert shop.exists()


def test_postgresql_gets_the_command_of_its_own_tool(here: Here) -> None:
    url = "postgresql+asyncpg://me:hunter2@db.example:5433/shop?schema=acme"
    done = here("backup", "URL copy.dump", "--database", url)
    assert done.returncode == 2
    assert one_line(done.stderr).endswith(
        "pg_dump --format=custom --file='URL copy.dump' postgresql://me@db.example:5433/shop"
    )
    done = here("restore", "copy.dump", "--database", url)
    assert one_line(done.stderr).endswith(
        "pg_restore --clean --if-exists --single-transaction"
        " --dbname=postgresql://me@db.example:5433/shop copy.dump"
    )


@pytest.mark.parametrize(
    "store",
    [
        '"sqlite:///shop.db"',
        'SqlAlchemyStore(create_async_engine("sqlite+aiosqlite:///shop.db"))',
        'SqlAlchemySyncStore(create_engine("sqlite:///shop.db"))',
    ],
)
def test_backup_and_restore_use_the_database_of_the_app(
    here: Here, shop: Path, tmp_path: Path, store: str
) -> None:
    module = f"app_{uuid4().hex}"
    (tmp_path / f"{module}.py").write_text(
        "from sqlalchemy import create_engine\n"
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "from onceward import Onceward\n"
        "from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore\n"
        "from onceward.stores.sessions.sqlalchemy import SqlAlchemySyncStore\n"
        f"onceward = Onceward({store})\n"
        'postgres = Onceward("postgresql://me:hunter2@db.example/shop")\n'
    )
    app = f"{module}:onceward"
    assert here("backup", "copy.db", ONCEWARD_APP=app).returncode == 0
    shop.unlink()
    restored = here("restore", "copy.db", "--app", app)
    assert (restored.returncode, b"shop.db restored" in restored.stdout) == (0, True), restored
    assert here("keys", "show", KEY, "--database", URL).returncode == 0
    assert not (tmp_path / "onceward.db").exists()
    both = here("backup", "second.db", "--app", app, "--database", URL)
    assert "give --app or --database, not both" in one_line(both.stderr)
    refused = here("backup", "copy.dump", ONCEWARD_APP=f"{module}:postgres")
    assert refused.returncode == 2
    assert one_line(refused.stderr).endswith(
        'pg_dump --format=custom --file=copy.dump "$DATABASE_URL" '
        "(DATABASE_URL is the address of the app's database)"
    )


async def test_restored_database_replays(here: Here, shop: Path) -> None:
    assert here("backup", "copy.db", "--database", URL).returncode == 0
    assert here("restore", "copy.db", "--database", "sqlite:///second.db").returncode == 0
    store = open_store("sqlite:///second.db")
    await store.open()
    found = await store.find(RecordId("ada", "POST /things", KEY), NOW)
    await store.close()
    assert found is not None
    assert found.body == b'{"ok":true}'


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_restored_ends_replays_from_memory_and_redis(
    here: Here, tmp_path: Path, postgres_url: str, redis_url: str, kind: str
) -> None:
    url = postgres_url if kind == "postgresql" else f"sqlite:///{tmp_path}/restored.db"
    clock = HeldClock()
    app, onceward = make_app(url, redis=redis_url, clock=clock)
    await onceward.open()
    await onceward.store.write(CREATE)

    async def order() -> bool:
        """Return whether the response was a replay."""
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            headers = {"Idempotency-Key": KEY, "X-Tenant": "ada"}
            response = await client.post("/orders", json={"item": "boots"}, headers=headers)
        await onceward.runtime.idempotency.close()
        return "idempotency-replayed" in response.headers

    assert [await order(), await order()] == [False, True]
    # A restore that leaves no trace: the rows are gone, the tables and the server are the same.
    for table in ("orders", "onceward_idempotency_records"):
        await onceward.store.write(onceward.store.table_names.render(f"DELETE FROM {table}"))
    clock.pass_by(seconds=1.001)
    assert await order(), "or the next assertion proves nothing"
    done = await asyncio.to_thread(here, "restored", "--database", url, "--json")
    assert (done.returncode, json.loads(done.stdout)["renewed"]) == (0, True), done
    clock.pass_by(seconds=1.001)
    assert [await order(), await order()] == [False, True]
    await onceward.close()


def test_restored_needs_a_database_with_tables_of_this_version(
    here: Here, shop: Path, tmp_path: Path
) -> None:
    before = epoch(shop)
    assert here("restored", "--database", URL).returncode == 0
    assert epoch(shop) != before
    missing = here("restored", "--database", "sqlite:///gone.db")
    assert (missing.returncode, missing.stdout) == (1, b"")
    assert "gone.db does not exist" in one_line(missing.stderr)
    both = here("restored", "--database", URL, "--app", "shop:onceward")
    assert "give --app or --database, not both" in one_line(both.stderr)
    assert not (tmp_path / "gone.db").exists()
