"""The Django store on PostgreSQL: claims and commits, in one message each or one by one."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import psycopg
import psycopg.sql
import pytest
from django.db import connections, transaction
from django.http import HttpRequest

from onceward.errors import (
    BodyInvalidError,
    CommitUnknownError,
    StoreUnavailableError,
    UsageError,
)
from onceward.frameworks.django import _response_of
from onceward.guard.request_thread import DirectThread, run_in_request_thread
from onceward.ports import Claimed, EpochReading, Held
from onceward.records import RecordId
from onceward.stores.sessions.django import DjangoStore, DjangoUnit
from onceward_operator.sqlite_backup import back_up
from onceward_testing.samples import NOW, a_record, an_audit_event
from packages.onceward.tests.support.citus import ON_CITUS, empty_citus
from packages.onceward.tests.support.django_project import add_django_database

T = TypeVar("T")
LATER = NOW + timedelta(seconds=1)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the store in this thread, as the bridge does."""
    return DirectThread(threading.RLock()).wait(work)


def in_another_thread(work: Any) -> Any:
    """Run a function in a thread with its own connection."""
    found: list[Any] = []

    def call() -> None:
        found.append(work())
        connections.close_all()

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return found[0]


@pytest.fixture(scope="module", params=["one message", "one by one", *ON_CITUS])
def database(request: pytest.FixtureRequest, postgres: Any) -> Iterator[DjangoStore]:
    if request.param == "citus":
        url = asyncio.run(empty_citus())
    else:
        postgres.start()
        url = postgres.create_database("django_store")
    # An isolation level makes psycopg's BEGIN differ, so that no message can begin.
    level = {"isolation_level": psycopg.IsolationLevel.READ_COMMITTED}
    alias = add_django_database(url, **(level if request.param == "one by one" else {}))
    store = DjangoStore(run_in_request_thread, using=alias)
    run(store.open())
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE TABLE orders (item text)")
    yield store
    connections[alias].close()
    del connections[alias], connections.databases[alias]
    if request.param != "citus":
        postgres.drop_database(url)


@pytest.fixture
def store(database: DjangoStore) -> Iterator[DjangoStore]:
    yield database
    connections[database.using].close()
    del connections[database.using]  # of a test that failed, it may be in a transaction
    with connections[database.using].cursor() as cursor:
        cursor.execute("TRUNCATE orders, onceward.idempotency_records, onceward.audit_events")


def claimed(store: DjangoStore, record_id: RecordId) -> DjangoUnit:
    claim = run(store.claim(record_id, LATER))
    assert isinstance(claim, Claimed)
    assert isinstance(claim.unit, DjangoUnit)
    return claim.unit


def orders(store: DjangoStore) -> int:
    return int(fetch(store, "SELECT count(*) AS n FROM orders")[0]["n"])


def fetch(store: DjangoStore, sql: str) -> Any:
    return store.fetch(connections[store.using], sql, None)


def insert(store: DjangoStore) -> None:
    with connections[store.using].cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES ('boots')")


def test_only_outages_count_for_the_breaker(store: DjangoStore) -> None:
    timeout = "SELECT set_config('statement_timeout', '1ms', false)"
    run(store.read(timeout))
    with pytest.raises(StoreUnavailableError) as cancelled:
        run(store.read("SELECT pg_sleep(1)"))
    assert not cancelled.value.is_outage
    with pytest.raises(StoreUnavailableError) as lost:
        run(store.read("SELECT pg_terminate_backend(pg_backend_pid())"))
    assert lost.value.is_outage


def test_path_of_a_sqlite_file_is_that_of_the_settings(store: DjangoStore, tmp_path: Path) -> None:
    assert store.sqlite_path is None
    connections.databases["file"] = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": tmp_path / "shop.db",
    }
    try:
        on_file = DjangoStore(run_in_request_thread, using="file")
        assert on_file.sqlite_path == str(tmp_path / "shop.db")
    finally:
        del connections["file"], connections.databases["file"]


def test_writes_record_and_hooks_commit_together(store: DjangoStore) -> None:
    first, hooks = a_record(audit_id="audit-1"), list[str]()
    unit = claimed(store, first.id)
    insert(store)
    transaction.on_commit(lambda: hooks.append("ran"), using=store.using)
    held = in_another_thread(lambda: run(store.claim(first.id, LATER)))
    assert isinstance(held, Held)  # at once: it does not wait for the lock
    run(unit.commit(first, an_audit_event(first)))
    assert (hooks, orders(store)) == (["ran"], 1)
    assert connections[store.using].get_autocommit()
    after = run(store.claim(first.id, first.expires_at))
    assert isinstance(after, Claimed)
    assert after.after_expiry
    run(after.unit.rollback())


def test_views_cannot_end_the_transaction(store: DjangoStore) -> None:
    record = a_record()
    unit = claimed(store, record.id)
    with connections[store.using].cursor() as cursor:
        for sql in ("/* x */ commit", "ROLLBACK", "SELECT 1; COMMIT", psycopg.sql.SQL("END")):
            with pytest.raises(UsageError, match="must not begin or end the transaction"):
                cursor.execute(sql)
    with pytest.raises(transaction.TransactionManagementError):
        transaction.commit(using=store.using)
    with suppress(RuntimeError), transaction.atomic(using=store.using):
        insert(store)
        raise RuntimeError
    insert(store)
    run(unit.commit(record, None))
    assert orders(store) == 1
    with connections[store.using].cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("COMMIT")  # outside a guarded view


def test_statement_that_failed_and_was_ignored_rolls_everything_back(store: DjangoStore) -> None:
    first = a_record()
    unit = claimed(store, first.id)
    insert(store)
    with pytest.raises(Exception, match="does_not_exist"):
        fetch(store, "SELECT * FROM does_not_exist")
    with pytest.raises(UsageError, match="a statement failed"):
        run(unit.commit(first, None))
    assert orders(store) == 0
    assert run(store.find(first.id, LATER)) is None


def test_statement_that_failed_and_was_ignored_without_a_key_is_an_error(
    store: DjangoStore,
) -> None:
    """Django sends COMMIT all the same, which PostgreSQL turns into a rollback."""
    unit = run(store.begin())
    insert(store)
    with pytest.raises(Exception, match="does_not_exist"):
        fetch(store, "SELECT * FROM does_not_exist")
    with pytest.raises(UsageError, match="a statement failed"):
        run(unit.commit(None, None))
    assert orders(store) == 0


def test_text_with_a_nul_is_an_error_of_the_caller(store: DjangoStore) -> None:
    def view() -> None:
        with connections[store.using].cursor() as cursor:
            cursor.execute("INSERT INTO orders VALUES (%s)", ["a\x00b"])

    with pytest.raises(BodyInvalidError, match="cannot store"):
        _response_of(view, HttpRequest(), (), {})


def test_connection_lost_at_commit_is_reported_and_replaced(store: DjangoStore) -> None:
    first = a_record()
    unit = claimed(store, first.id)
    insert(store)
    pid = fetch(store, "SELECT pg_backend_pid() AS pid")[0]["pid"]
    in_another_thread(
        lambda: fetch(store, f"SELECT pg_terminate_backend({pid}, 5000)")  # waits for its end
    )
    # With COMMIT in the message, its outcome is not known; before it, nothing was committed.
    is_unknown = "isolation_level" not in connections[store.using].settings_dict["OPTIONS"]
    with pytest.raises(CommitUnknownError if is_unknown else StoreUnavailableError):
        run(unit.commit(first, None))
    run(claimed(store, first.id).commit(first, None))
    assert orders(store) == 0


def test_each_new_connection_reports_the_epoch(store: DjangoStore) -> None:
    readings: list[EpochReading] = []
    store.report_epochs(readings.append)
    first = run(store.read_epoch())
    with connections[store.using].cursor() as cursor:
        cursor.execute("TRUNCATE onceward.idempotency_records")
    connections[store.using].close()
    readings.clear()
    run(store.ping())
    (second,) = readings
    assert None not in {first.identity, second.identity}
    assert first.identity != second.identity


def test_connection_to_a_replaced_sqlite_file_is_closed(tmp_path: Path) -> None:
    file, record = tmp_path / "shop.db", a_record()
    connections.databases["replaced"] = {
        **connections.settings["default"],
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": str(file),
        "CONN_MAX_AGE": None,
    }
    store = DjangoStore(run_in_request_thread, using="replaced")
    try:
        run(store.open())
        before = run(store.read_epoch())
        back_up(str(file), tmp_path / "backup.db")
        run(claimed(store, record.id).commit(record, None))
        for suffix in ("-wal", "-shm"):
            file.with_name(file.name + suffix).unlink(missing_ok=True)
        (tmp_path / "backup.db").replace(file)
        assert run(store.read_epoch()).identity != before.identity
        run(claimed(store, record.id).rollback())
        run(store.close())
    finally:
        connections["replaced"].close()
        del connections["replaced"], connections.databases["replaced"]


def test_processes_that_start_together_create_the_tables_of_a_new_file_once(tmp_path: Path) -> None:
    for number in range(10):
        alias = add_django_database(f"sqlite:///{tmp_path}/new-{number}.db")
        gate = threading.Barrier(6)

        def start(alias: str = alias, gate: threading.Barrier = gate) -> None:
            store = DjangoStore(run_in_request_thread, using=alias)
            connections[alias].ensure_connection()
            gate.wait()
            try:
                run(store.open())
                run(store.ping())
            finally:
                connections[alias].close()

        with ThreadPoolExecutor(6) as pool:
            for each in [pool.submit(start) for _ in range(6)]:
                each.result()
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM onceward_migrations WHERE number = 1")
            assert cursor.fetchone() == (1,)
        connections[alias].close()
