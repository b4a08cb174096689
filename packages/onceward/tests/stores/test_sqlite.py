"""SQLite's own ways to fail: other processes, a full disk, and the driver's transactions."""

import asyncio
import gc
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from onceward.errors import (
    ConfigurationError,
    NoTransactionError,
    StoreUnavailableError,
    UsageError,
)
from onceward.stores.sessions.sqlalchemy import SqlAlchemyStore
from onceward.stores.sqlite import SqliteStore
from onceward.stores.sqlite.unit_of_work import SqliteUnit
from onceward_testing.samples import NOW, a_record, an_audit_event, claimed, commit

OPENERS = 6
TURNS_OF_OPENING = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "test.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    await store.open()
    unit = await store.begin()
    await unit.transaction.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, value BLOB NOT NULL)")
    await unit.commit(None, None)
    yield store
    await store.close()


async def count(store: SqliteStore) -> int:
    return int((await store.read("SELECT count(*) AS n FROM t"))[0]["n"])


async def test_commits_are_durable(store):
    unit = await store.begin()
    assert await unit.transaction.fetch_one("PRAGMA synchronous") == {"synchronous": 2}
    assert await unit.transaction.fetch_one("PRAGMA journal_mode") == {"journal_mode": "wal"}
    assert await unit.transaction.fetch_one("PRAGMA foreign_keys") == {"foreign_keys": 1}
    await unit.rollback()


def _private(directory: Path) -> dict[str, bool]:
    return {file.name: file.stat().st_mode & 0o777 == 0o600 for file in directory.iterdir()}


async def test_new_file_and_its_log_are_private_from_the_first_byte(path, monkeypatch):
    previous = os.umask(0)
    try:
        real = sqlite3.connect
        created = []

        def connect(database, *args, **options):
            created.append(path.stat().st_mode & 0o777)
            return real(database, *args, **options)

        monkeypatch.setattr(sqlite3, "connect", connect)
        link = path.with_name("link.db")
        link.symlink_to(path)
        store = SqliteStore(link)
        await store.open()
        await commit(store, a_record("key"))
        assert set(created) == {0o600}
        files = _private(path.parent)
        assert {"test.db", "test.db-wal", "test.db-shm"} <= set(files)
        assert all(files.values())
        await store.close()
    finally:
        os.umask(previous)


async def test_file_of_the_app_engine_is_created_private(tmp_path):
    previous = os.umask(0)
    try:
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'app.db'}")
        store = SqlAlchemyStore(engine)
        await store.open()
        assert all(_private(tmp_path).values())
        await store.close()
        await engine.dispose()
    finally:
        os.umask(previous)


async def test_file_that_every_user_can_open_is_reported_and_kept(path, caplog):
    path.touch()
    path.chmod(0o644)
    store = SqliteStore(path)
    await store.open()
    await store.close()
    assert "can be opened by every user of this machine" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_new_file_may_be_opened_by_several_at_once(tmp_path):
    # SQLite itself refuses one in a hundred: switching to WAL does not heed the busy time-out.
    def open_at_once(path: Path, start: threading.Barrier) -> None:
        async def opened_and_closed() -> None:
            store = SqliteStore(path)
            start.wait()
            await store.open()
            await store.close()

        asyncio.run(opened_and_closed())

    with ThreadPoolExecutor(OPENERS) as pool:
        for turn in range(TURNS_OF_OPENING):
            start = threading.Barrier(OPENERS)
            path = tmp_path / f"{turn}.db"
            opened = [pool.submit(open_at_once, path, start) for _ in range(OPENERS)]
            assert [one.exception() for one in opened] == [None] * OPENERS


async def test_new_file_that_stays_locked_is_an_outage(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        store = SqliteStore(path, busy_seconds=0.1)
        with pytest.raises(StoreUnavailableError, match="locked"):
            await store.open()
        other.execute("ROLLBACK")
        await store.open()
        await store.close()


async def test_savepoints_write_no_temporary_files(store):
    unit = await store.begin()
    in_memory = 2
    assert await unit.transaction.fetch_one("PRAGMA temp_store") == {"temp_store": in_memory}
    await unit.rollback()


async def test_finished_unit_is_freed_without_garbage_collection(store):
    def units() -> int:
        # Not isinstance: it reads __class__, which evaluates lazy objects of other tests.
        return sum(type(kept) is SqliteUnit for kept in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = units()
        unit = await store.begin()
        await unit.transaction.execute("INSERT INTO t (value) VALUES ('first')")
        await unit.commit(None, None)
        del unit
        assert units() == before
    finally:
        gc.enable()


def test_a_database_in_memory_is_refused():
    with pytest.raises(ConfigurationError, match="file"):
        SqliteStore(":memory:")


async def test_a_file_that_is_no_database_is_refused(path):
    path.write_bytes(b"this is not a database, whatever its name says" * 100)
    store = SqliteStore(path)
    with pytest.raises(StoreUnavailableError, match="cannot open"):
        await store.open()
    await store.close()


async def test_missing_directory_is_an_outage(tmp_path):
    store = SqliteStore(tmp_path / "missing" / "test.db")
    with pytest.raises(StoreUnavailableError):
        await store.open()
    await store.close()


async def test_another_process_that_writes_makes_commits_wait(store, path):
    code = (
        "import sqlite3, sys, time\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('BEGIN IMMEDIATE')\n"
        "db.execute(\"INSERT INTO t (value) VALUES ('theirs')\")\n"
        "print('locked', flush=True)\n"
        "sys.stdin.readline()\n"
        "db.execute('COMMIT')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"locked\n"

        async def one(number: int) -> None:
            record = a_record(f"key-{number}")
            unit = await claimed(store, record.id)
            await unit.transaction.execute("INSERT INTO t (value) VALUES ('first')")
            await unit.commit(record, None)

        waiting = asyncio.gather(*(one(number) for number in range(5)))
        # Reads continue: a replay does not wait for a writer.
        assert await store.find(a_record().id, NOW) is None
        await asyncio.sleep(0.3)
        assert not waiting.done()
        process.stdin.close()
        await waiting
    assert await count(store) == 6


async def test_process_that_never_releases_the_lock_is_an_outage(path):
    store = SqliteStore(path, busy_seconds=0.2)
    await store.open()
    other = sqlite3.connect(path, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        record = a_record()
        unit = await claimed(store, record.id)
        with pytest.raises(StoreUnavailableError, match="locked"):
            await unit.commit(record, None)
        other.execute("ROLLBACK")
        await commit(store, record)
    finally:
        other.close()
        await store.close()


async def test_one_timed_out_wait_fails_all_queued_requests(path):
    """Each in turn would wait for the same stuck process: the last of eight for eight waits."""
    wait, many = 1.5, 8
    store = SqliteStore(path, busy_seconds=wait)
    await store.open()
    loop = asyncio.get_running_loop()

    async def refused_after(name: str) -> float:
        record = a_record(name)
        started = loop.time()
        unit = await claimed(store, record.id)
        with pytest.raises(StoreUnavailableError, match="locked"):
            await unit.commit(record, None)
        return loop.time() - started

    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        waits = await asyncio.gather(*(refused_after(f"early-{n}") for n in range(many)))
        assert wait * 0.9 <= min(waits)
        assert max(waits) < wait * many / 2
        late = await asyncio.gather(*(refused_after(f"late-{n}") for n in range(many)))
        assert max(late) < wait * 0.9
        other.execute("ROLLBACK")
        started = loop.time()
        await asyncio.gather(
            *(
                commit(store, a_record(f"{when}-{n}"))
                for n in range(many)
                for when in ("early", "late")
            )
        )
        assert loop.time() - started < wait
        # From here on, waits are long again.
        other.execute("BEGIN IMMEDIATE")
        assert await refused_after("another") >= wait * 0.9
        other.execute("ROLLBACK")
    await store.close()


async def test_cancellation_while_the_queue_is_refused_passes_no_turn(path, monkeypatch):
    store = SqliteStore(path, busy_seconds=0.1)
    await store.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        async def one(name: str) -> None:
            unit = await claimed(store, a_record(name).id)
            await unit.commit(a_record(name), None)

        first = asyncio.create_task(one("first"))
        await asyncio.sleep(0)
        second = asyncio.create_task(one("second"))
        while not store._writer._waiting:
            await asyncio.sleep(0)
        refuse, pass_turn = store._writer._refuse_waiting, store._writer._pass_turn
        passed: list[None] = []

        def refuse_and_cancel() -> None:
            refuse()
            second.cancel()  # already refused, but not running yet

        monkeypatch.setattr(store._writer, "_refuse_waiting", refuse_and_cancel)
        monkeypatch.setattr(store._writer, "_pass_turn", lambda: passed.append(pass_turn()))
        for task, error in ((first, StoreUnavailableError), (second, asyncio.CancelledError)):
            with pytest.raises(error):
                await task
        assert len(passed) == 1  # by the first: the second never had it
        other.execute("ROLLBACK")
    await asyncio.wait_for(commit(store, a_record("third")), 5)
    await store.close()


async def fill_up(store: SqliteStore, unit, spare_pages: int) -> None:
    """Limit the file to a few more pages, as on a disk that is nearly full."""
    row = await unit.transaction.fetch_one("PRAGMA page_count")
    await unit.transaction.execute(f"PRAGMA max_page_count = {row['page_count'] + spare_pages}")


async def test_full_disk_rolls_back(store):
    record = a_record(audit_id="audit-1")
    unit = await claimed(store, record.id)
    await fill_up(store, unit, 3)
    await unit.transaction.execute("INSERT INTO t (value) VALUES ('first')")
    with pytest.raises(StoreUnavailableError, match="full"):
        await unit.transaction.execute("INSERT INTO t (value) VALUES (zeroblob(1000000))")
    await unit.rollback()
    assert await count(store) == 0
    await commit(store, a_record("small"))


async def test_after_a_full_disk_nothing_commits_by_itself(store, path):
    """SQLite may have ended the transaction: a handler that continues must not commit."""
    record = a_record()
    unit = await claimed(store, record.id)
    await fill_up(store, unit, 3)
    await unit.transaction.execute("INSERT INTO t (value) VALUES ('first')")
    with pytest.raises(StoreUnavailableError):
        await unit.transaction.execute("INSERT INTO t (value) VALUES (zeroblob(1000000))")
    # As when SQLite rolls back by itself, which it may or may not do for a full disk.
    await store._writing.run(lambda db: db.rollback())
    with pytest.raises(StoreUnavailableError):
        await unit.transaction.execute("INSERT INTO t (value) VALUES ('second')")
    with pytest.raises(StoreUnavailableError):
        await unit.commit(record, None)
    assert await count(store) == 0
    assert await store.find(record.id, NOW) is None
    await commit(store, record)


async def test_disk_full_at_the_commit_rolls_back(store):
    record = a_record(body=b"x" * 1_000_000)
    unit = await claimed(store, record.id)
    await fill_up(store, unit, 3)
    await unit.transaction.execute("INSERT INTO t (value) VALUES ('first')")
    with pytest.raises(StoreUnavailableError, match="full"):
        await unit.commit(record, None)
    assert await count(store) == 0
    assert await store.find(record.id, NOW) is None
    await commit(store, a_record("small"))


async def test_full_disk_fails_all_members_of_the_group(store):
    """Each request has both its record and its row, or neither."""
    unit = await store.begin()
    await fill_up(store, unit, 12)
    await unit.rollback()

    async def one(number: int) -> bool:
        record = a_record(f"key-{number}")
        unit = await claimed(store, record.id)
        try:
            await unit.transaction.execute("INSERT INTO t (value) VALUES (zeroblob(2000))")
            await unit.commit(record, None)
        except StoreUnavailableError:
            await unit.rollback()
            return False
        return True

    ends = await asyncio.gather(*(one(number) for number in range(40)))
    assert any(ends)
    assert not all(ends)
    kept = [await store.find(a_record(f"key-{number}").id, NOW) for number in range(40)]
    assert [record is not None for record in kept] == ends
    assert await count(store) == sum(ends)


async def test_failed_member_does_not_affect_the_group(store):
    """A constraint, bad SQL or a rollback is one request's own affair."""

    async def one(number: int) -> bool:
        record = a_record(f"key-{number}")
        unit = await claimed(store, record.id)
        try:
            await unit.transaction.execute(
                "INSERT INTO t (id, value) VALUES (:id, 'x')", {"id": number // 2}
            )
        except sqlite3.IntegrityError:
            await unit.rollback()
            return False
        if number % 10 == 0:  # the handler fails
            await unit.rollback()
            return False
        await unit.commit(record, None)
        return True

    ends = await asyncio.gather(*(one(number) for number in range(60)))
    kept = [await store.find(a_record(f"key-{number}").id, NOW) for number in range(60)]
    assert [record is not None for record in kept] == ends
    assert await count(store) == sum(ends) == 30


async def test_violated_deferred_constraint_fails_at_the_commit(store):
    setup = await store.begin()
    await setup.transaction.execute(
        "CREATE TABLE child (parent INTEGER REFERENCES t (id) DEFERRABLE INITIALLY DEFERRED)"
    )
    await setup.commit(None, None)
    record = a_record(audit_id="audit-1")
    unit = await claimed(store, record.id)
    await unit.transaction.execute("INSERT INTO child VALUES (42)")
    with pytest.raises(StoreUnavailableError, match="FOREIGN KEY"):
        await unit.commit(record, an_audit_event(record))
    assert await store.find(record.id, NOW) is None
    await commit(store, record, audit=True)


@pytest.mark.parametrize("ending", ["COMMIT", "-- x\nROLLBACK", ";end", "BEGIN"])
@pytest.mark.parametrize("method", ["execute", "fetch_all", "fetch_one"])
async def test_a_handler_cannot_end_the_transaction(store, ending, method):
    unit = await store.begin()
    await unit.transaction.execute("INSERT INTO t (value) VALUES ('x')")
    with pytest.raises(UsageError):
        await getattr(unit.transaction, method)(ending)
    await unit.rollback()
    assert await count(store) == 0


async def test_a_handler_may_use_savepoints(store):
    record = a_record()
    unit = await claimed(store, record.id)
    tx = unit.transaction
    await tx.execute("SAVEPOINT mine")
    await tx.execute("INSERT INTO t (value) VALUES ('undone')")
    await tx.execute("ROLLBACK TO mine")
    await tx.execute("RELEASE mine")
    await tx.execute("INSERT INTO t (value) VALUES ('kept')")
    await unit.commit(record, None)
    assert [row["value"] for row in await store.read("SELECT value FROM t")] == ["kept"]


async def test_ended_transaction_raises(store):
    record = a_record()
    unit = await claimed(store, record.id)
    await unit.commit(record, None)
    with pytest.raises(NoTransactionError):
        await unit.transaction.execute("INSERT INTO t (value) VALUES ('late')")
    assert await count(store) == 0


async def test_bad_sql_is_not_an_outage(store):
    unit = await store.begin()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await unit.transaction.execute("INSERT INTO nowhere VALUES (1)")
    await unit.rollback()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        await store.read("SELECT * FROM nowhere")


async def test_handler_that_computes_before_it_writes_blocks_no_other(store):
    slow = await claimed(store, a_record("slow").id)
    await asyncio.wait_for(commit(store, a_record("quick")), 30)
    await slow.commit(a_record("slow"), None)
    assert await store.find(a_record("quick").id, NOW) is not None
    assert await store.find(a_record("slow").id, NOW) is not None


async def test_processes_that_open_a_new_file_at_once_all_succeed(path):
    code = (
        "import asyncio, sys\n"
        "from onceward.stores.sqlite import SqliteStore\n"
        "async def main():\n"
        "    store = SqliteStore(sys.argv[1])\n"
        "    sys.stdin.readline()\n"
        "    await store.open()\n"
        "    print((await store.secret()).hex())\n"
        "    await store.close()\n"
        "asyncio.run(main())\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    outputs = await asyncio.gather(
        *(asyncio.to_thread(process.communicate, "go\n", 30) for process in processes)
    )
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert len({out for out, _ in outputs}) == 1


async def test_single_request_is_served_before_waiting_chunks(store):
    """A chunk that has run a few requests ends; those that wait come after single requests."""
    begun: list[str] = []

    async def chunk(name: str) -> None:
        waiting = await store.begin_chunk()
        await waiting.claim([a_record(name).id], NOW)
        begun.append(name)
        await waiting.rollback()

    async def single(name: str) -> None:
        unit = await store.begin()
        await unit.transaction.execute("INSERT INTO t (value) VALUES ('x')")
        begun.append(name)
        await unit.rollback()

    first = await store.begin_chunk()
    await first.claim([a_record("first").id], NOW)
    others = [asyncio.create_task(chunk(name)) for name in ("second", "third")]
    await asyncio.sleep(0.05)
    for _ in range(6):  # only chunks wait
        await (await first.begin_item()).commit(None, None)
        assert not first.must_end
    others.append(asyncio.create_task(single("single")))
    await asyncio.sleep(0.05)
    assert first.must_end
    await first.rollback()
    await asyncio.gather(*others)
    assert begun == ["single", "second", "third"]


async def test_chunk_runs_some_requests_before_it_ends_early(store):
    chunk = await store.begin_chunk()
    await chunk.claim([a_record("key").id], NOW)
    unit = await store.begin()
    waiting = asyncio.create_task(unit.transaction.execute("INSERT INTO t (value) VALUES ('x')"))
    await asyncio.sleep(0.05)
    ends = []
    for _ in range(5):
        await (await chunk.begin_item()).commit(None, None)
        ends.append(chunk.must_end)
    assert ends == [False, False, False, True, True]
    await chunk.rollback()
    await waiting
    await unit.rollback()


async def test_single_request_in_a_group_does_not_wait_for_a_chunk(store):
    """Its commit comes before the next chunk begins, however long that takes."""
    unit = await store.begin()
    await unit.transaction.execute("INSERT INTO t (value) VALUES ('x')")
    chunk = await store.begin_chunk()
    claiming = asyncio.create_task(chunk.claim([a_record("key").id], NOW))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(30):
        await unit.commit(None, None)  # the chunk does not end before
        await claiming
    await chunk.rollback()
    assert await count(store) == 1


async def test_chunk_gets_its_turn_among_many_single_requests(store):
    begun: list[str] = []

    async def single(number: int) -> None:
        unit = await store.begin()
        await unit.transaction.execute("INSERT INTO t (value) VALUES ('x')")
        begun.append(str(number))
        await unit.rollback()

    async def run_chunk() -> None:
        chunk = await store.begin_chunk()
        await chunk.claim([a_record("key").id], NOW)
        begun.append("chunk")
        await chunk.rollback()

    first = await store.begin()
    await first.transaction.execute("INSERT INTO t (value) VALUES ('x')")
    waiting = [asyncio.create_task(run_chunk())]
    waiting += [asyncio.create_task(single(number)) for number in range(40)]
    await asyncio.sleep(0.05)
    await first.rollback()
    await asyncio.gather(*waiting)
    assert begun.index("chunk") == 16


async def test_refused_item_that_only_the_next_one_follows_is_undone(store):
    """The savepoint of an item is released with the first statement of the next one."""
    insert = "INSERT INTO t (value) VALUES (:value)"
    chunk = await store.begin_chunk()
    await chunk.claim([a_record("key").id], NOW)
    for value, is_kept in (("a", True), (None, False), ("b", False), ("c", True), (None, False)):
        unit = await chunk.begin_item()
        if value is not None:
            await unit.transaction.execute(insert, {"value": value})
        await (unit.commit(None, None) if is_kept else unit.rollback())
    await chunk.commit([], [])
    rows = await store.read("SELECT value FROM t ORDER BY id")
    assert [row["value"] for row in rows] == ["a", "c"]
