"""The file: created, migrated, read-only, damaged, too new, on a full disk."""

import dataclasses
import os
import resource
import shutil
import signal
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path

import pytest

from onceward.errors import ConfigurationError, UsageError
from onceward_outbox import OutboxQueue, QueueSettings, Status, database
from onceward_outbox.errors import (
    DiskFullError,
    FileBusyError,
    FileDamagedError,
    FileReadOnlyError,
    NewerFileError,
    OutboxFileError,
    WrongPassphraseError,
)
from onceward_protocol.storage.migrations import Migration, load_migrations
from packages.outbox.tests.queue_harness import KEY, Lab, new

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Do without the rights of root, for whom no file is read-only."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        file.name: file.read_bytes()
        for file in directory.iterdir()
        if not file.name.endswith("-shm")
    }


def test_a_read_only_file_is_refused_and_not_changed(lab: Lab) -> None:
    lab.add()
    lab.queue.close()
    lab.path.chmod(0o444)
    lab.path.parent.chmod(0o777)
    before = snapshot(lab.path.parent)
    with as_nobody(), pytest.raises(FileReadOnlyError, match="cannot be written"):
        OutboxQueue.open(lab.path)
    assert snapshot(lab.path.parent) == before


def test_a_read_only_directory_is_refused(lab: Lab) -> None:
    lab.queue.close()
    lab.path.chmod(0o666)
    lab.path.parent.chmod(0o555)
    with as_nobody():
        with pytest.raises(FileReadOnlyError):
            OutboxQueue.open(lab.path)
        with pytest.raises(FileReadOnlyError, match="cannot be created"):
            OutboxQueue.open(lab.path.with_name("other.db"))
    lab.path.parent.chmod(0o755)


def test_a_missing_directory_is_named(quick_path: Path) -> None:
    with pytest.raises(OutboxFileError, match="no directory"):
        OutboxQueue.open(quick_path / "missing" / "q.db")


def test_a_directory_is_refused_as_file(quick_path: Path) -> None:
    (quick_path / "q.db").mkdir()
    with pytest.raises(OutboxFileError):
        OutboxQueue.open(quick_path / "q.db")


@pytest.mark.parametrize(
    "junk", [b"this is not a database\n" * 500, os.urandom(8192)], ids=["text", "random"]
)
def test_a_file_that_is_no_database_is_refused_and_not_changed(
    quick_path: Path, junk: bytes
) -> None:
    path = quick_path / "q.db"
    path.write_bytes(junk)
    for passphrase in (None, KEY):
        with pytest.raises(WrongPassphraseError):
            OutboxQueue.open(path, passphrase=passphrase)
    assert snapshot(quick_path) == {"q.db": junk}


def test_opening_waits_for_another_process_that_writes_a_new_file(quick_path: Path) -> None:
    # An app that makes a table of its own in the file, or another process that opens the outbox:
    # SQLite by itself refuses to switch to WAL at once, whatever the busy time-out.
    path = quick_path / "q.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(FileBusyError):
            OutboxQueue.open(path, settings=QueueSettings(busy_seconds=0.05))
        done = threading.Timer(0.2, other.execute, ("COMMIT",))
        done.start()
        with OutboxQueue.open(path) as queue:
            assert queue.users() == []
        done.join()


@pytest.mark.parametrize("passphrase", [None, KEY])
def test_a_new_file_may_be_opened_by_several_processes_at_once(
    quick_path: Path, passphrase: bytes | None
) -> None:
    openers = 6

    def open_at_once(path: Path, start: threading.Barrier) -> None:
        start.wait()
        OutboxQueue.open(path, passphrase=passphrase).close()

    with ThreadPoolExecutor(openers) as pool:
        for turn in range(30):
            start = threading.Barrier(openers)
            path = quick_path / f"{turn}.db"
            opened = [pool.submit(open_at_once, path, start) for _ in range(openers)]
            assert [one.exception() for one in opened] == [None] * openers


@pytest.mark.parametrize("passphrase", [None, KEY])
def test_a_file_too_short_to_be_a_database_is_not_overwritten(
    quick_path: Path, passphrase: bytes | None
) -> None:
    path = quick_path / "q.db"
    path.write_bytes(b"notes to myself")
    with pytest.raises(FileDamagedError, match="too short"):
        OutboxQueue.open(path, passphrase=passphrase)
    assert snapshot(quick_path) == {"q.db": b"notes to myself"}


@pytest.mark.parametrize("passphrase", [None, KEY])
def test_a_damaged_file_is_refused_or_its_damage_found(
    quick_path: Path, passphrase: bytes | None
) -> None:
    lab = Lab(quick_path / "q.db", passphrase=passphrase)
    lab.queue.enqueue_many([new(payload={"n": n}) for n in range(500)])
    lab.queue.close()
    whole = lab.path.read_bytes()
    pages = len(whole) // 4096
    for page in range(1, pages):
        damaged = bytearray(whole)
        damaged[page * 4096 : page * 4096 + 4096] = os.urandom(4096)
        lab.path.write_bytes(damaged)
        with pytest.raises(FileDamagedError):
            _look_at_everything(lab)
        # What could be written by looking was not.
        assert lab.path.read_bytes() == bytes(damaged)
        if page > 8:
            break
    lab.path.write_bytes(whole)
    _look_at_everything(lab)


def _look_at_everything(lab: Lab) -> None:
    with lab.open() as queue:
        queue.check_integrity()


def test_damage_found_during_an_operation_raises_file_damaged(lab: Lab) -> None:
    lab.queue.enqueue_many([new(payload={"n": n, "x": "y" * 1000}) for n in range(200)])
    lab.queue.close()
    data = bytearray(lab.path.read_bytes())
    for page in range(40, len(data) // 4096):
        data[page * 4096 : page * 4096 + 4096] = b"\xff" * 4096
    lab.path.write_bytes(data)
    with lab.open() as queue, pytest.raises(FileDamagedError, match="damaged"):
        queue.entries(limit=1000)


def test_a_truncated_file_is_refused(lab: Lab) -> None:
    lab.queue.enqueue_many([new() for _ in range(200)])
    lab.queue.close()
    cut = lab.path.read_bytes()[: 4096 * 9 + 100]
    lab.path.write_bytes(cut)
    with pytest.raises(FileDamagedError):
        _look_at_everything(lab)
    assert lab.path.read_bytes() == cut


def test_a_file_of_a_newer_version_is_refused_and_not_changed(lab: Lab) -> None:
    entry = lab.add()
    lab.queue.close()
    with closing(sqlite3.connect(lab.path)) as connection, connection:
        connection.execute("UPDATE outbox_meta SET value = 99 WHERE name = 'schema'")
    before = snapshot(lab.path.parent)
    with pytest.raises(NewerFileError, match="schema 99"):
        OutboxQueue.open(lab.path)
    assert snapshot(lab.path.parent) == before
    with closing(sqlite3.connect(lab.path)) as connection:
        found = connection.execute("SELECT id FROM offline_sync_queue").fetchall()
    assert found == [(entry.id,)]


def following(steps: Sequence[Migration], sql: str) -> Migration:
    return dataclasses.replace(steps[-1], number=steps[-1].number + 1, sql=sql)


def test_an_older_file_is_migrated_and_keeps_what_is_queued(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = [lab.add(), lab.add()]
    lab.send()
    steps = load_migrations("outbox", files("onceward_outbox.migrations"))
    newer = [*steps, following(steps, "ALTER TABLE offline_sync_queue ADD COLUMN colour TEXT;\n")]
    monkeypatch.setattr(database, "load_migrations", lambda *_: newer)
    queue = lab.reopen()
    assert [entry.id for entry in queue.entries()] == [entry.id for entry in entries]
    with queue.transaction() as connection:
        assert connection.execute("SELECT colour FROM offline_sync_queue").fetchall() == [
            (None,),
            (None,),
        ]
    assert lab.claim().entry.id == entries[1].id
    # And the version before refuses it from now on.
    monkeypatch.setattr(database, "load_migrations", lambda *_: steps)
    with pytest.raises(NewerFileError):
        lab.reopen()


@pytest.mark.parametrize("schema", [1, 8])
def test_a_file_of_version_0_1_is_refused_and_not_changed(lab: Lab, schema: int) -> None:
    lab.add()
    lab.queue.close()
    with closing(sqlite3.connect(lab.path)) as connection, connection:
        connection.execute("UPDATE outbox_meta SET value = ? WHERE name = 'schema'", (schema,))
    before = snapshot(lab.path.parent)
    with pytest.raises(
        OutboxFileError, match=r"an outbox of version 0\.1.*use another file"
    ) as raised:
        OutboxQueue.open(lab.path)
    assert "\n" not in str(raised.value)
    assert snapshot(lab.path.parent) == before


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = lab.add()
    steps = load_migrations("outbox", files("onceward_outbox.migrations"))
    broken = "ALTER TABLE users ADD COLUMN colour TEXT;\nALTER TABLE nothing ADD COLUMN x;\n"
    monkeypatch.setattr(database, "load_migrations", lambda *_: [*steps, following(steps, broken)])
    lab.queue.close()
    with pytest.raises(OutboxFileError):
        lab.open()
    monkeypatch.undo()
    queue = lab.reopen()
    assert queue.get(entry.id).status is Status.PENDING
    with queue.transaction() as connection:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(users)").fetchall()]
    assert "colour" not in columns


def test_migrations_are_numbered_from_9_without_gaps() -> None:
    numbers = [
        step.number for step in load_migrations("outbox", files("onceward_outbox.migrations"))
    ]
    assert numbers == list(range(9, len(numbers) + 9))


def test_the_outbox_can_share_the_apps_database_file(quick_path: Path) -> None:
    path = quick_path / "app.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE notes (text)")
        connection.execute("INSERT INTO notes VALUES ('mine')")
    with OutboxQueue.open(path) as queue:
        queue.add_user("ada")
        queue.enqueue(new())
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT text FROM notes").fetchall() == [("mine",)]


def test_a_table_of_the_same_name_is_refused(quick_path: Path) -> None:
    path = quick_path / "app.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE users (name)")
    before = snapshot(quick_path)
    with pytest.raises(OutboxFileError, match="already has a table 'users'"):
        OutboxQueue.open(path)
    assert snapshot(quick_path) == before


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond this: what a full disk does, seen from SQLite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("passphrase", [None, KEY])
def test_on_a_full_disk_enqueue_raises_and_works_again_when_there_is_space(
    quick_path: Path, passphrase: bytes | None
) -> None:
    lab = Lab(quick_path / "q.db", passphrase=passphrase)
    kept = [lab.add() for _ in range(3)]
    lab.events.clear()
    wal = lab.path.with_name("q.db-wal").stat().st_size
    with disk_of(wal + 5000):
        for _ in range(3):
            with pytest.raises(OutboxFileError):
                lab.add(payload={"x": "y" * 20_000})
        with pytest.raises(OutboxFileError):
            lab.queue.enqueue_many([new(payload={"x": "y" * 5000}) for _ in range(50)])
        assert lab.queue.entries() == kept
    assert lab.events == []
    more = lab.add(payload={"x": "y" * 20_000})
    assert lab.reopen().entries() == [*kept, more]
    lab.queue.check_integrity()
    lab.queue.close()


def test_a_claim_that_could_not_be_written_was_not_made(lab: Lab) -> None:
    entry = lab.add()
    wal = lab.path.with_name("outbox.db-wal").stat().st_size
    with disk_of(wal + 100), pytest.raises(OutboxFileError):
        lab.queue.claim("ada")
    assert lab.queue.get(entry.id) == entry
    assert lab.claim().number == 1


def test_a_full_disk_raises_disk_full(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db", driver="apsw")
    with lab.queue.transaction() as connection:
        pages = connection.execute("PRAGMA page_count").fetchall()[0][0]
        connection.execute(f"PRAGMA max_page_count = {pages + 2}").fetchall()
    with pytest.raises(DiskFullError, match="disk is full"):
        lab.add(payload={"x": "y" * 50_000})
    assert lab.queue.stats().unsent == 0
    assert lab.add().status is Status.PENDING
    lab.queue.close()


def test_a_locked_file_raises_file_busy(quick_path: Path) -> None:
    lab = Lab(quick_path / "q.db", settings=QueueSettings(busy_seconds=0.05))
    entry = lab.add()
    with closing(sqlite3.connect(lab.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(FileBusyError):
            lab.add()
        assert lab.queue.get(entry.id) == entry  # reading goes on
        other.execute("ROLLBACK")
    assert lab.add().sequence_number == 2
    lab.queue.close()


def test_synchronous_is_full(lab: Lab) -> None:
    secret = Lab(lab.path.with_name("secret.db"), passphrase=KEY)
    for queue in (lab.queue, secret.queue):
        with queue.transaction() as connection:
            for pragma, value in (
                ("synchronous", 2),
                ("journal_mode", "wal"),
                ("temp_store", 2),
                ("foreign_keys", 1),
            ):
                assert connection.execute(f"PRAGMA {pragma}").fetchall() == [(value,)]
    secret.queue.close()


def test_a_closed_queue_raises_usage_error(lab: Lab) -> None:
    lab.queue.close()
    lab.queue.close()
    with pytest.raises(UsageError, match="closed"):
        lab.queue.stats()
    with pytest.raises(UsageError, match="closed"):
        lab.add()


def test_a_queue_used_after_a_fork_raises_usage_error(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(UsageError, match="fork"):
        lab.queue.stats()


def test_a_copy_of_the_file_is_an_independent_queue(lab: Lab, quick_path: Path) -> None:
    entry = lab.add()
    lab.queue.close()
    copy = quick_path / "with space ? and # in its name.db"
    shutil.copy(lab.path, copy)
    with OutboxQueue.open(copy) as queue:
        assert [found.id for found in queue.entries()] == [entry.id]


def test_invalid_settings_are_refused() -> None:
    for settings in ({"lease_seconds": 0}, {"max_entries": 0}, {"max_payload_bytes": 0}):
        with pytest.raises(ConfigurationError):
            QueueSettings(**settings)  # type: ignore[arg-type]


def test_a_passphrase_needs_the_driver_that_can_encrypt(quick_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="apsw"):
        OutboxQueue.open(quick_path / "q.db", passphrase=KEY, driver="sqlite3")


def test_without_the_extra_the_error_names_what_to_install(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "apsw", None)
    with pytest.raises(ConfigurationError, match="pip install apsw-sqlite3mc"):
        OutboxQueue.open(quick_path / "q.db", passphrase=KEY)
    with OutboxQueue.open(quick_path / "plain.db") as queue:
        assert queue.users() == []


@pytest.mark.parametrize("content", [None, b"", "a database"])
def test_create_false_refuses_a_file_without_an_outbox(
    quick_path: Path, content: bytes | str | None
) -> None:
    path = quick_path / "q.db"
    if isinstance(content, str):
        with closing(sqlite3.connect(path)) as app:
            app.execute("CREATE TABLE orders (id)")
    elif content is not None:
        path.write_bytes(content)
    before = snapshot(quick_path)
    with pytest.raises(OutboxFileError, match="outbox"):
        OutboxQueue.open(path, create=False)
    assert snapshot(quick_path) == before
