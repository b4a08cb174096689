"""Enqueueing in the app's transaction: both commit, or neither."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from onceward.errors import UsageError
from onceward_outbox import OutboxQueue, Status
from onceward_outbox.errors import EntryInvalidError, FileBusyError, QueueFullError
from packages.outbox.tests.queue_harness import KEY, Lab, local, new


@pytest.fixture(params=["sqlite3", "encrypted"])
def app(request: pytest.FixtureRequest, quick_path: Path) -> Iterator[Lab]:
    options: dict[str, Any] = {} if request.param == "sqlite3" else {"passphrase": KEY}
    made = Lab(quick_path / "app.db", **options)
    with made.queue.transaction() as connection:
        connection.execute("CREATE TABLE notes (text)")
    made.events.clear()
    yield made
    made.close()


def connected(app: Lab) -> Any:
    """Open the app's own connection to the same file, with the queue's driver."""
    if "passphrase" not in app.options:
        return sqlite3.connect(app.path, isolation_level=None)
    connection = apsw.Connection(str(app.path))
    for pragma in ("cipher = 'sqlcipher'", "legacy = 4", f"key = \"x'{KEY.hex()}'\""):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def notes(app: Lab) -> list[str]:
    with app.queue.transaction() as connection:
        return [row[0] for row in connection.execute("SELECT text FROM notes").fetchall()]


def test_the_apps_rows_and_the_entry_commit_together(app: Lab) -> None:
    with app.queue.transaction() as connection:
        connection.execute("INSERT INTO notes VALUES (?)", ("hello",))
        entry = app.queue.enqueue(new())
        assert app.events == []
    assert notes(app) == ["hello"]
    assert app.queue.entries() == [entry]
    assert app.kinds() == ["enqueued"]


def test_an_exception_undoes_both(app: Lab) -> None:
    with suppress(ZeroDivisionError), app.queue.transaction() as connection:
        connection.execute("INSERT INTO notes VALUES (?)", ("hello",))
        _ = app.queue.enqueue(new()), 1 / 0
    assert notes(app) == []
    assert app.queue.entries() == []
    assert app.events == []


def test_an_operation_that_fails_inside_undoes_only_itself(app: Lab) -> None:
    with app.queue.transaction() as connection:
        connection.execute("INSERT INTO notes VALUES (?)", ("kept",))
        first = app.queue.enqueue(new())
        with pytest.raises(EntryInvalidError):
            app.queue.enqueue_many([new(), new(depends_on=(local(),))])
        second = app.queue.enqueue(new())
    assert notes(app) == ["kept"]
    assert app.queue.entries() == [first, second]
    assert [entry.sequence_number for entry in (first, second)] == [1, 2]


def test_a_transaction_inside_a_transaction_joins_it(app: Lab) -> None:
    with app.queue.transaction():
        outer = app.queue.enqueue(new())
        with pytest.raises(ZeroDivisionError), app.queue.transaction():
            _ = app.queue.enqueue(new()), 1 / 0
        with app.queue.transaction():
            inner = app.queue.enqueue(new())
        assert app.events == []
    assert app.queue.entries() == [outer, inner]
    assert [event.entry_id for event in app.events] == [outer.id, inner.id]


def test_reading_inside_sees_what_was_written_inside(app: Lab) -> None:
    with app.queue.transaction():
        entry = app.queue.enqueue(new())
        assert app.queue.get(entry.id) == entry
        assert app.queue.next_eligible("ada") == entry


def test_the_apps_own_connection_can_carry_the_entry(app: Lab) -> None:
    with closing(connected(app)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO notes VALUES (?)", ("hello",))
        entry = app.queue.enqueue(new(), connection=connection)
        child = app.queue.enqueue(new(depends_on=(entry.id,)), connection=connection)
        assert app.queue.entries() == []
        connection.execute("COMMIT")
    assert app.events == []
    app.queue.announce([entry, child])
    assert [event.entry_id for event in app.events] == [entry.id, child.id]
    assert app.queue.entries() == [entry, child]
    assert child.waiting_for == 1
    assert app.claimable() == [entry.id]


def test_what_the_app_rolls_back_was_never_queued(app: Lab) -> None:
    with closing(connected(app)) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO notes VALUES (?)", ("hello",))
        app.queue.enqueue_many([new(), new()], connection=connection)
        connection.execute("ROLLBACK")
    assert notes(app) == []
    assert app.queue.entries() == []
    assert app.add().sequence_number == 1


def test_an_invalid_entry_does_not_end_the_apps_transaction(app: Lab) -> None:
    with closing(connected(app)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO notes VALUES (?)", ("kept",))
        with pytest.raises(EntryInvalidError):
            app.queue.enqueue(new(user_id="nobody"), connection=connection)
        connection.execute("COMMIT")
    assert notes(app) == ["kept"]


def test_a_connection_without_a_transaction_is_refused(app: Lab) -> None:
    with closing(connected(app)) as connection, pytest.raises(UsageError, match="begin"):
        app.queue.enqueue(new(), connection=connection)


def test_a_connection_without_synchronous_full_is_refused(app: Lab) -> None:
    with closing(connected(app)) as connection:
        connection.execute("PRAGMA synchronous = NORMAL").fetchall()
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageError, match="synchronous=FULL"):
            app.queue.enqueue(new(), connection=connection)
        connection.execute("ROLLBACK")


def test_a_connection_to_another_file_is_refused(app: Lab, quick_path: Path) -> None:
    other = Lab(quick_path / "other.db", **app.options)
    with closing(connected(other)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(UsageError, match="should be"):
            app.queue.enqueue(new(), connection=connection)
        connection.execute("ROLLBACK")
    other.queue.close()


def test_a_connection_of_another_driver_is_refused(app: Lab) -> None:
    # Not to the same file: that is the very thing that must not happen.
    stranger: Any
    if "passphrase" in app.options:
        stranger = sqlite3.connect(":memory:", isolation_level=None)
    else:
        stranger = apsw.Connection(":memory:")
    stranger.execute("BEGIN")
    with pytest.raises(UsageError, match="two copies of SQLite"):
        app.queue.enqueue(new(), connection=stranger)
    stranger.close()


def test_the_standard_librarys_implicit_transactions_work_too(quick_path: Path) -> None:
    lab = Lab(quick_path / "app.db")
    with closing(sqlite3.connect(lab.path)) as connection:
        connection.execute("CREATE TABLE notes (text)")
        with connection:
            connection.execute("INSERT INTO notes VALUES ('hello')")
            entry = lab.queue.enqueue(new(), connection=connection)
    assert lab.queue.get(entry.id).status is Status.PENDING
    lab.queue.close()


def test_enqueue_raises_file_busy_when_the_apps_transaction_is_too_long(quick_path: Path) -> None:
    from onceward_outbox import QueueSettings

    lab = Lab(quick_path / "app.db", settings=QueueSettings(busy_seconds=0.05, max_entries=1))
    with closing(sqlite3.connect(lab.path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        lab.queue.enqueue(new(), connection=connection)
        with pytest.raises(FileBusyError):
            lab.add()
        with pytest.raises(QueueFullError):
            lab.queue.enqueue(new(), connection=connection)
        connection.execute("COMMIT")
    with OutboxQueue.open(lab.path) as other:
        assert len(other.entries()) == 1
    lab.queue.close()
