"""``onceward move``: SQLite to PostgreSQL, killed at every step, verified, replayed afterwards."""

import asyncio
import json
import re
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from onceward import JobContext, open_store
from onceward.errors import ConfigurationError
from onceward.ports import Claimed
from onceward.records import AuditEvent, Record, RecordId, RequestFingerprint
from onceward.stores.parts import installed_parts
from onceward_operator.audit_trail import AuditTrail
from onceward_operator.move import FAULT_POINTS, DatabaseMove
from onceward_operator.move.source import CORE_TABLES
from onceward_operator.move.values import converter_for
from onceward_testing.fork_server import ForkServer
from packages.onceward.tests.support.audit_chain import seal, verify
from packages.onceward.tests.support.harness import HeldClock
from packages.onceward.tests.support.jobs_harness import JobsLab
from packages.onceward.tests.support.shop import CREATE, make_app
from packages.protocol.tests.cli.harness import Here, one_line

NOW = datetime.now(UTC)
KEY = {"Idempotency-Key": "order-1", "X-Tenant": "ada"}


@pytest.fixture
def source(tmp_path: Path) -> str:
    return str(tmp_path / "shop.db")


@asynccontextmanager
async def lab_on(url: str) -> AsyncIterator[JobsLab]:
    store = open_store(url)
    store.schema.want(*installed_parts().values())
    await store.open()
    try:
        lab = JobsLab(store)

        @lab.jobs.handler("effect")
        async def effect(job: JobContext) -> dict[str, str]:
            await job.transaction.execute(
                "INSERT INTO orders (id, item, note) VALUES (:id, 'job', :note)",
                {"id": job.id, "note": json.dumps(job.payload)},
            )
            return {"done": job.id}

        yield lab
        await lab.stop_workers()
    finally:
        await store.close()


async def create_orders(url: str) -> None:
    store = open_store(url)
    await store.open()
    await store.write(CREATE)
    await store.close()


async def ordered(url: str, item: str = "boots") -> httpx.Response:
    app, onceward = make_app(url)
    await onceward.open()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        response = await client.post("/orders", json={"item": item}, headers=KEY)
    await onceward.close()
    return response


async def rows(url: str, sql: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(sql)]
    finally:
        await connection.close()


async def test_replays_and_waiting_jobs_continue_on_postgresql(
    here: Here, source: str, postgres_url: str
) -> None:
    url = f"sqlite:///{source}"
    await create_orders(url)
    first = await ordered(url)
    async with lab_on(url) as lab:
        await lab.enqueued(payload={"n": "done é"}, resource_id="done")
        await lab.start_worker()
        while not await lab.store.read(
            lab.store.table_names.render("SELECT 1 FROM onceward_job_completions")
        ):
            await asyncio.sleep(0.01)
        await lab.stop_workers()
        began = datetime.now(UTC)
        scheduled = await lab.enqueued(resource_id="later", delay_seconds=3600)
        waiting = [
            await lab.enqueued(payload=n, resource_id=f"r{n}", order="line") for n in range(3)
        ]
        # A job that a worker had leased when it died.
        (leased,) = await lab.claim(lease_seconds=0.01)

    await rows(postgres_url, CREATE)
    refused = await asyncio.to_thread(here, "move", "--from", url, "--to", postgres_url)
    assert refused.returncode == 2
    assert "tables of your app: orders" in one_line(refused.stderr)
    moved = await asyncio.to_thread(
        here, "move", "--from", url, "--to", postgres_url, "--tables", "orders", "--json"
    )
    assert moved.returncode == 0, moved
    report = json.loads(moved.stdout)
    assert (report["verified"], report["not_moved"]) == (True, [])
    counts = {table["table"]: table["rows"] for table in report["tables"]}
    assert counts["onceward_idempotency_records"] == 1
    assert (counts["onceward_jobs"], counts["onceward_job_completions"]) == (4, 1)
    assert counts["orders"] == 2

    again = await ordered(postgres_url)
    assert again.headers["idempotency-replayed"] == "true"
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["content-type"] == first.headers["content-type"]
    async with lab_on(postgres_url) as lab:
        # The same key is known, too: the job has been completed on SQLite.
        assert await lab.enqueue(payload={"n": "done é"}, resource_id="done")
        await lab.start_worker()
        while (
            len(
                await lab.store.read(
                    lab.store.table_names.render("SELECT 1 FROM onceward_job_completions")
                )
            )
            < 4
        ):
            await asyncio.sleep(0.01)
        later = await lab.admin.find(scheduled, tenant="ada")
        assert later is not None
        assert later.view.state == "waiting"
        assert later.view.due_at is not None
        assert timedelta(minutes=50) < later.view.due_at - began < timedelta(minutes=70)
        failed = await lab.admin.find(leased.lease.job_id, tenant="ada")
        assert failed is not None
        assert [failure.reason for failure in failed.failures] == ["worker_lost"]
        # The numbers of new jobs continue after the old ones.
        await lab.enqueued(resource_id="new", delay_seconds=3600)
        assert (
            await lab.store.read(
                lab.store.table_names.render("SELECT max(seq) AS seq FROM onceward_jobs")
            )
        )[0]["seq"] == 6
    effects = await rows(postgres_url, "SELECT id FROM orders WHERE item = 'job'")
    assert len(effects) == len(set(effects)) == 4
    assert {(job,) for job in waiting} < set(effects)
    await check_the_source_is_marked(here, url, postgres_url)


async def check_the_source_is_marked(here: Here, url: str, postgres_url: str) -> None:
    with pytest.raises(ConfigurationError, match="was moved with onceward move"):
        await open_store(url).open()
    undone = await asyncio.to_thread(here, "move", "--from", url, "--undo")
    assert (undone.returncode, b"can be used again" in undone.stdout) == (0, True)
    assert "do not use both" in one_line(undone.stderr)
    await (store := open_store(url)).open()
    await store.close()
    refused = await asyncio.to_thread(
        here, "move", "--from", url, "--to", postgres_url, "--tables", "orders", "--restart"
    )
    assert "holds the result of an earlier move" in one_line(refused.stderr)


async def fill(url: str) -> None:
    """Write 30 records with audit events, and 25 jobs, and seal the events."""
    async with lab_on(url) as lab:
        for number in range(30):
            record = Record(
                id=RecordId(f"tenant {number % 3}", "POST /é", f"key-{number}"),
                fingerprint=RequestFingerprint("b" * 64, "f" * 64),
                status=201,
                headers={"content-type": "application/json", "etag": '"1"'},
                body=bytes(range(number)),
                created_at=NOW + timedelta(microseconds=number),
                expires_at=NOW + timedelta(hours=24, microseconds=number),
                request_id="r",
                correlation_id="c",
                audit_id=f"audit-{number}",
                client_generated_at=NOW - timedelta(days=2, microseconds=number),
            )
            audit = AuditEvent(
                id=f"audit-{number}",
                tenant=record.id.tenant,
                actor="ada",
                endpoint="POST /é",
                payload_hash="b" * 64,
                status=201,
                request_id="r",
                correlation_id="c",
                created_at=record.created_at,
                version=number or None,
            )
            claim = await lab.store.claim(record.id, record.created_at)
            assert isinstance(claim, Claimed)
            await claim.unit.commit(record, audit)
        async with lab.transaction() as tx:
            for number in range(25):
                await lab.enqueue_in(tx, "effect", {"n": number}, resource_id=str(number))
        assert await seal(lab.store, HeldClock(NOW)) == 55


@pytest.fixture
def forks() -> Iterator[ForkServer]:
    with ForkServer("packages.operator.tests.moving") as server:
        yield server


async def test_move_killed_at_every_step_continues(
    source: str, postgres_url: str, forks: ForkServer
) -> None:
    await fill(f"sqlite:///{source}")
    kills = [(point, 1) for point in FAULT_POINTS[:3]]
    kills += [("after_batch", 1), ("before_batch_commit", 2), ("after_batch", 4)]
    kills += [(point, 1) for point in FAULT_POINTS[5:]]
    assert {point for point, _ in kills} == set(FAULT_POINTS)
    for point, nth in kills:
        options = {"source": source, "target": postgres_url, "point": point, "nth": nth}
        (code,) = forks.run(("move", options | {"batch": 7}))
        assert code == -signal.SIGKILL, point
        # In between, no server starts on either database.
        if point not in ("after_migration", "after_target_marked"):
            with pytest.raises(ConfigurationError, match="move is not finished"):
                await open_store(f"sqlite:///{source}").open()
        if point not in ("after_migration", "after_target_finished"):
            with pytest.raises(ConfigurationError, match="move is not finished"):
                await open_store(postgres_url).open()
    report = await DatabaseMove(source, postgres_url, tables=[]).run()
    assert report.was_finished
    assert report.is_verified
    assert {table.table: table.rows for table in report.tables} == {
        "onceward_secret": 1,
        "onceward_idempotency_records": 30,
        "onceward_sequences": 0,
        "onceward_sequence_numbers": 0,
        "onceward_audit_events": 55,
        "onceward_audit_seals": 4,
        "onceward_jobs": 25,
        "onceward_job_completions": 0,
        "onceward_dead_letters": 0,
        "onceward_job_failures": 0,
        "onceward_job_steps": 0,
        "onceward_job_causes": 0,
        "onceward_request_log": 0,
        "onceward_request_counts": 0,
        "onceward_paused_queues": 0,
        "onceward_console_sessions": 0,
    }
    store = open_store(postgres_url)
    await store.open()
    found = await store.find(RecordId("tenant 2", "POST /é", "key-29"), NOW)
    assert found is not None
    assert (found.body, found.created_at, found.client_generated_at) == (
        bytes(range(29)),
        NOW + timedelta(microseconds=29),
        NOW - timedelta(days=2, microseconds=29),
    )
    chains = [await verify(store, tenant) async for tenant in AuditTrail(store).tenants()]
    assert [(chain.findings, chain.unsealed) for chain in chains] == [([], 0)] * 4
    assert sum(chain.events for chain in chains) == 55
    await store.close()


async def test_table_list_is_complete(source: str) -> None:
    await fill(f"sqlite:///{source}")
    with closing(sqlite3.connect(source)) as db:
        found = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    ours = {name.removeprefix("onceward_") for (name,) in found if name.startswith("onceward_")}
    assert ours - {"migrations"} == set(CORE_TABLES)


async def test_only_tables_of_parts_that_the_source_has_are_created(
    source: str, postgres_url: str
) -> None:
    await (store := open_store(f"sqlite:///{source}")).open()
    await store.close()
    report = await DatabaseMove(source, postgres_url, tables=[]).run()
    assert {table.table for table in report.tables} == {
        "onceward_secret",
        "onceward_idempotency_records",
        "onceward_audit_events",
    }
    found = await rows(
        postgres_url, "SELECT tablename FROM pg_tables WHERE schemaname = 'onceward'"
    )
    assert {name for (name,) in found} == {
        *("secret", "idempotency_records", "audit_events", "migrations", "move")
    }


APP_TABLES = """
CREATE TABLE people (id INTEGER PRIMARY KEY AUTOINCREMENT, boss INTEGER, is_admin INTEGER,
  born TEXT, pay DECIMAL, notes TEXT, token TEXT, photo BLOB, seen TEXT, "Nick" TEXT);
CREATE TABLE visits (person INTEGER, at TEXT, PRIMARY KEY (person, at)) WITHOUT ROWID;
INSERT INTO people VALUES
 (1, 2, 1, '1815-12-10', 0.1 + 0.2, '{"a": [1.0, {"b": 1e2}]}', '7f0f5bd04c0a4b2e9b0e0d6d3f9c9a10',
  x'00ff', '2026-01-31 09:30:00.5', 'Ada'),
 (2, NULL, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
DELETE FROM people WHERE id = 9;
INSERT INTO people (id) VALUES (9); DELETE FROM people WHERE id = 9;
INSERT INTO visits VALUES (1, '2026-01-31T09:30:00+02:00'), (2, '2026-02-01T00:00:00Z');
CREATE TABLE alembic_version (version_num TEXT); INSERT INTO alembic_version VALUES ('x');
"""
TARGET_TABLES = """
CREATE DOMAIN nickname AS varchar(20);
CREATE TABLE people (id integer GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
  boss integer REFERENCES people, is_admin boolean, born date, pay numeric(10, 2), notes jsonb,
  token uuid, photo bytea, seen timestamptz, nick nickname);
CREATE TABLE visits (person integer REFERENCES people, at timestamptz, PRIMARY KEY (person, at));
"""


async def make_app_tables(source: str, target: str) -> None:
    store = open_store(f"sqlite:///{source}")
    await store.open()
    await store.close()
    with closing(sqlite3.connect(source)) as db:
        db.executescript(APP_TABLES)
    connection = await asyncpg.connect(target)
    await connection.execute(TARGET_TABLES)
    await connection.close()


async def test_tables_of_the_app_are_converted_to_the_types_of_the_target(
    source: str, postgres_url: str
) -> None:
    await make_app_tables(source, postgres_url)
    report = await DatabaseMove(source, postgres_url, tables=["all"], batch=1).run()
    assert report.is_verified
    # The table that the other one refers to comes first.
    assert [table.table for table in report.tables][-2:] == ["people", "visits"]
    ada, boss = await rows(postgres_url, "SELECT * FROM people ORDER BY id")
    assert ada[2:5] == (True, date(1815, 12, 10), Decimal("0.30"))
    assert json.loads(ada[5]) == {"a": [1.0, {"b": 100}]}
    assert str(ada[6]) == "7f0f5bd0-4c0a-4b2e-9b0e-0d6d3f9c9a10"
    assert ada[7:] == (b"\x00\xff", datetime(2026, 1, 31, 9, 30, 0, 500_000, UTC), "Ada")
    assert boss == (2, None, False, None, None, None, None, None, None, None)
    ((at,), _) = await rows(postgres_url, "SELECT at FROM visits ORDER BY at")
    assert at == datetime(2026, 1, 31, 7, 30, tzinfo=UTC)
    # Ids that were used before are not used again.
    insert = "INSERT INTO people (boss) VALUES (1) RETURNING id"
    assert await rows(postgres_url, insert) == [(10,)]


async def test_values_that_do_not_fit_and_rows_that_differ_are_found(
    here: Here, source: str, postgres_url: str
) -> None:
    await make_app_tables(source, postgres_url)
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "CREATE FUNCTION change() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN new.nick := upper(new.nick); RETURN new; END $$;"
        "CREATE TRIGGER change BEFORE INSERT ON people FOR EACH ROW EXECUTE FUNCTION change();"
        "ALTER TABLE people ADD UNIQUE (token)"
    )
    move = ("move", "--from", f"sqlite:///{source}", "--to", postgres_url, "--tables", "all")
    for change, expected in [
        (
            "born = 'soon'",
            "column born, row id = 2: the value does not fit the type date of the target: 'soon'",
        ),
        ("nick = 'more than twenty characters'", "column nick, row id = 2: the value does not fit"),
        ("pay = 0.125", "column pay, row id = 2: the value does not fit the type numeric(10,2)"),
        ("boss = 1 << 40", "column boss, row id = 2: the value does not fit the type integer"),
        ("boss = 3", 'PostgreSQL refuses a row: insert or update on table "people" violates'),
        ("token = '7f0f5bd04c0a4b2e9b0e0d6d3f9c9a10'", "table people, row id = 2: PostgreSQL ref"),
        ("born = NULL", ""),
    ]:
        with closing(sqlite3.connect(source)) as db:
            db.execute(
                "UPDATE people SET born = NULL, nick = NULL, boss = NULL, token = NULL, pay = NULL"
                " WHERE id = 2"
            )
            db.execute(f"UPDATE people SET {change} WHERE id = 2")
            db.commit()
        if expected:
            done = await asyncio.to_thread(here, *move)
            assert done.returncode == 2
            assert expected in one_line(done.stderr)
    done = await asyncio.to_thread(here, *move)
    assert done.returncode == 1
    assert "the copy differs in people: a trigger in the target" in one_line(done.stderr)
    assert b"\tNO\n" in done.stdout
    await connection.execute("DROP TRIGGER change ON people")
    await connection.close()
    assert (await asyncio.to_thread(here, *move)).returncode == 1  # what was copied is still wrong
    restarted = await asyncio.to_thread(here, *move, "--restart")
    assert restarted.returncode == 0, restarted
    shown = re.sub(r"(?<=:)[^:/@]+(?=@)", "***", postgres_url)
    ending = f"rows moved and verified. Use {shown} as the database URL from now on\n"
    assert restarted.stdout.decode().endswith(ending)


async def onceward_tables(url: str) -> list[tuple[Any, ...]]:
    return await rows(url, "SELECT relname FROM pg_class WHERE relname LIKE 'onceward%'")


async def test_rows_in_the_tables_of_the_app_are_never_deleted(
    here: Here, source: str, postgres_url: str
) -> None:
    url = f"sqlite:///{source}"
    await (store := open_store(url)).open()
    await store.write("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT)")
    await store.write("CREATE TABLE my_secret (id INTEGER PRIMARY KEY)")
    await store.write("INSERT INTO customers VALUES (1, 'q')")
    await store.close()
    before = Path(source).read_bytes()

    async def refused(*options: str) -> str:
        done = await asyncio.to_thread(here, "move", "--from", url, "--to", postgres_url, *options)
        assert (done.returncode, done.stdout) == (2, b""), options
        return one_line(done.stderr)

    # Nothing is created for a move that is refused.
    for options in [(), ("--dry-run",)]:
        assert "the target has no table customers" in await refused("--tables", "all", *options)
    assert await onceward_tables(postgres_url) == []

    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "CREATE TABLE customers (id integer PRIMARY KEY, name text);"
        "INSERT INTO customers VALUES (7, 'precious');"
        "CREATE TABLE my_secret (id integer PRIMARY KEY);"
        "CREATE TABLE bills (customer integer REFERENCES customers ON DELETE CASCADE);"
        "INSERT INTO bills VALUES (7);"
    )
    full = "the target is not empty, it has rows in customers: choose an empty database"
    for options in [("all",), ("customers,customers",), ("all", "--dry-run"), ("all", "--restart")]:
        assert full in await refused("--tables", *options)
    assert await connection.fetch("SELECT * FROM customers") == [(7, "precious")]
    assert await onceward_tables(postgres_url) == []
    assert Path(source).read_bytes() == before

    # In a database that Onceward has migrated, only its own secret is replaced.
    await connection.execute("TRUNCATE customers, bills; INSERT INTO my_secret VALUES (3)")
    await (store := open_store(postgres_url)).open()
    await store.close()
    secret = await connection.fetch("SELECT * FROM onceward.secret")
    assert "it has rows in my_secret" in await refused("--tables", "all")
    await connection.execute("TRUNCATE my_secret")
    planned = await asyncio.to_thread(
        here, "move", "--from", url, "--to", postgres_url, "--tables", "all", "--dry-run"
    )
    assert planned.returncode == 0, planned
    assert await connection.fetch("SELECT * FROM onceward.secret") == secret
    await connection.close()


async def test_restart_deletes_only_what_the_move_has_copied(
    source: str, postgres_url: str
) -> None:
    await make_app_tables(source, postgres_url)
    connection = await asyncpg.connect(postgres_url)
    await connection.execute(
        "CREATE TABLE badges (person integer REFERENCES people ON DELETE CASCADE);"
        "ALTER TABLE visits ADD CHECK (person < 2)"
    )

    async def failing(expected: str, *, restart: bool = True) -> None:
        move = DatabaseMove(source, postgres_url, tables=["all"], restart=restart)
        with pytest.raises(ConfigurationError, match=expected):
            await move.run()

    # The people are copied, then a visit is refused.
    await failing("table visits, row person = 2, at = .*PostgreSQL refuses a row", restart=False)
    await failing("table visits, row person = 2, at = .*PostgreSQL refuses a row")
    await connection.execute("INSERT INTO people (id) VALUES (70)")
    await failing("it has rows in people")
    await connection.execute("DELETE FROM people WHERE id = 70; INSERT INTO badges VALUES (2)")
    await failing("it has rows in badges")
    assert await connection.fetch("SELECT person FROM badges") == [(2,)]
    assert len(await connection.fetch("SELECT 1 FROM people")) == 2
    await connection.execute(
        "DELETE FROM badges; ALTER TABLE visits DROP CONSTRAINT visits_person_check"
    )
    await connection.close()
    first = await DatabaseMove(source, postgres_url, tables=["all"], restart=True).run()
    assert first.is_verified
    again = await DatabaseMove(source, postgres_url, tables=["all"]).run()
    assert again.was_finished
    assert again.tables == first.tables


@pytest.mark.parametrize(
    ("type_name", "stored_type", "value", "reason"),
    [
        ("numeric", "numeric(10,2)", 0.125, "more digits than 10, of which 2"),
        ("numeric", "numeric(10,2)", "0.125", "more digits than 10, of which 2"),
        ("numeric", "numeric(10,1)", 1e300, "more digits"),
        ("numeric", "numeric(10,1)", float("inf"), "not a finite number"),
        ("numeric", "numeric(3,0)", 1000, "more digits"),
        ("numeric", "numeric", "1_000", "not a number"),
        ("int4", "integer", 1 << 31, "too large"),
        ("int4", "integer", "abc", "'abc' is not an integer"),
        ("int8", "bigint", 1.5, "not an integer"),
        ("int8", "bigint", 1e300, "too large"),
        ("float4", "real", 0.1, "would be rounded"),
        ("float4", "real", 1e300, "too large"),
        ("float8", "double precision", (1 << 53) + 1, "more digits"),
        ("float8", "double precision", "x", "not a number"),
        ("varchar", "character varying(3)", "abc ", "4 characters, more than 3"),
        ("bpchar", "character(3)", "a ", "ends with spaces"),
        ("bpchar", "character(3)", "abcd", "4 characters"),
        ("timestamptz", "timestamp with time zone", "2026-01-31 09:30:00.1234567", "microseconds"),
        ("timestamptz", "timestamp with time zone", "tomorrow", "'tomorrow' is not of the form"),
        ("timestamptz", "timestamp with time zone", 1769851800, "its unit is unknown"),
        ("timestamp", "timestamp(3) without time zone", "2026-01-31 09:30:00.1234", "3 digits"),
        ("date", "date", "2026-01-31 09:30", "has a time of day"),
        ("date", "date", 20260131, "its unit is unknown"),
        ("time", "time without time zone", "09:30:00+02:00", "has a zone"),
        ("bytea", "bytea", 5, "is a number in a column of bytes"),
        ("uuid", "uuid", 5, "is not a UUID"),
        ("json", "json", "{", "is not JSON"),
        ("json", "json", "NaN", "is not JSON"),
        ("jsonb", "jsonb", '{"a": 1, "a": 2}', "the key 'a' is twice"),
        ("bool", "boolean", "maybe", "is not a boolean"),
    ],
)
def test_value_that_would_be_changed_is_refused(
    type_name: str, stored_type: str, value: object, reason: str
) -> None:
    convert = converter_for(type_name, stored_type)
    assert convert is not None
    with pytest.raises(ValueError, match=reason):
        convert(value)


@pytest.mark.parametrize(
    ("type_name", "stored_type", "value", "expected"),
    [
        ("numeric", "numeric(10,2)", 0.1 + 0.7, Decimal("0.8")),
        ("numeric", "numeric(10,2)", 0.5, Decimal("0.5")),
        ("numeric", "numeric(30,20)", 0.1 + 0.2, Decimal("0.30000000000000004")),
        ("numeric", "numeric(3,-2)", 12300, Decimal(12300)),
        ("numeric", "numeric(1000,0)", "9" * 1000, Decimal("9" * 1000)),
        ("float4", "real", 0.25, 0.25),
        ("float8", "double precision", 0.1, 0.1),
        ("varchar", "character varying(3)", "ab ", "ab "),
        ("bpchar", "character(3)", "ab ", "ab "),
        ("date", "date", "2026-01-31T00:00:00Z", date(2026, 1, 31)),
        (
            "timestamp",
            "timestamp(3) without time zone",
            "2026-01-31 09:30:00.120000000",
            datetime(2026, 1, 31, 9, 30, 0, 120_000),  # noqa: DTZ001
        ),
    ],
)
def test_value_that_fits_is_converted_exactly(
    type_name: str, stored_type: str, value: object, expected: object
) -> None:
    convert = converter_for(type_name, stored_type)
    assert convert is not None
    assert convert(value) == expected


async def test_names_of_tables_may_differ_between_source_and_target(
    source: str, postgres_url: str
) -> None:
    await fill(f"sqlite:///{source}?table_prefix=shop_")
    report = await DatabaseMove(
        source,
        postgres_url,
        tables=[],
        table_prefix="shop_",
        target_prefix="acme_",
        target_schema="holding",
    ).run()
    assert report.is_verified
    assert await rows(postgres_url, "SELECT count(*) FROM holding.acme_jobs") == [(25,)]
    store = open_store(postgres_url, table_prefix="acme_", schema="holding")
    await store.open()
    assert await store.find(RecordId("tenant 0", "POST /é", "key-0"), NOW) is not None
    await store.close()


async def test_move_is_refused_without_changes(here: Here, source: str, postgres_url: str) -> None:
    url = f"sqlite:///{source}"
    await fill(url)
    move = ("move", "--from", url, "--to", postgres_url)

    async def refused(*arguments: str, code: int = 2) -> str:
        done = await asyncio.to_thread(here, *arguments)
        assert (done.returncode, done.stdout) == (code, b"")
        return one_line(done.stderr)

    assert "--to should be PostgreSQL" in await refused("move", "--from", url, "--to", url)
    assert "--to is missing" in await refused("move", "--from", url)
    gone = await refused("move", "--from", "sqlite:///gone.db", "--to", postgres_url)
    assert "gone.db does not exist" in gone
    assert "--from should be" in await refused("move", "--from", postgres_url, "--to", postgres_url)
    assert "has no table x of your app" in await refused(*move, "--tables", "x")

    store = open_store(url)
    await store.open()
    assert "is open in another process" in await refused(*move)
    await store.close()

    store = open_store(postgres_url)
    await store.open()
    assert "Onceward is connected to the target" in await refused(*move)
    await store.close()

    planned = await asyncio.to_thread(here, *move, "--dry-run", "--json")
    assert json.loads(planned.stdout)["tables"]["onceward_jobs"] == 25
    await create_orders(postgres_url)
    assert (await ordered(postgres_url)).status_code == 201
    assert "it has rows in idempotency_records" in await refused(*move)
    # Nothing has marked the source.
    await (store := open_store(url)).open()
    await store.close()
