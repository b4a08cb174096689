"""Files of earlier schemas: a kill or a power cut at any statement loses nothing."""

import itertools
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onceward_outbox import OutboxQueue, database
from onceward_outbox.entry import Status
from onceward_protocol.storage.migrations import Migration, Steps, load_migrations, run_steps
from packages.outbox.tests.outcomes import fail, record_conflict, retry_later
from packages.outbox.tests.power_cuts import Disk, Mark, Sync, after_cut, restore
from packages.outbox.tests.queue_harness import KEY, Lab, local

BASELINE = load_migrations("outbox", files("onceward_outbox.migrations"))
# The steps of later versions, as far as they change rows.
LATER = (
    (
        "ALTER TABLE offline_sync_queue ADD COLUMN colour TEXT;\n"
        "UPDATE offline_sync_queue SET colour = status;\n"
    ),
    (
        "CREATE TABLE colours (name TEXT PRIMARY KEY NOT NULL) WITHOUT ROWID;\n"
        "INSERT INTO colours SELECT DISTINCT status FROM offline_sync_queue;\n"
    ),
)
MIGRATIONS = [
    *BASELINE,
    *(Migration("outbox", BASELINE[-1].number + n, "later", sql) for n, sql in enumerate(LATER, 1)),
]
TABLES = ("users", "offline_sync_queue", "entry_waits", "id_mappings", "attempts", "outbox_clock")
names = (f"schema-disk{number}" for number in itertools.count())
Rows = dict[str, tuple[list[str], list[tuple[Any, ...]]]]


def read(queue: OutboxQueue, tables: tuple[str, ...] = TABLES) -> Rows:
    """Return the columns and the rows of each table."""
    found: Rows = {}
    with queue.transaction() as connection:
        for table in tables:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            order = "sequence_number" if "sequence_number" in columns else "1, 2"
            rows = connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY {order}")
            found[table] = (columns, [tuple(row) for row in rows.fetchall()])
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A queue with entries in every state that an older version could have."""
    lab = Lab(tmp_path_factory.mktemp("new") / "new.db", driver="apsw")
    queue, made = lab.queue, local()
    lab.add(local_id=made)
    lab.add(operation="patch", endpoint=f"/api/v1/activities/{{local:{made}}}", local_id=made)
    lab.send(server_id=7, http_status=201)
    lab.add(operation="update", endpoint="/api/v1/activities/9", headers={"If-Match": '"3"'})
    lab.add(priority=90, headers={"X-App": "7"})
    fail(queue, lab.claim(), http_status=422, code="SOLD_OUT", error="no")
    lab.add(priority=90)
    retry_later(queue, lab.claim(), outcome_unknown=True, http_status=500, delay_seconds=60)
    lab.add(priority=90)
    record_conflict(queue, lab.claim(), theirs={"name": "theirs"}, theirs_version='"4"')
    lab.add(priority=90)
    lab.claim()
    queue.cancel(lab.add().id)
    lab.add(payload={"after": f"see {{local:{local()}}}"})
    assert {entry.status for entry in queue.entries()} == set(Status) - {Status.EXPIRED}
    yield lab
    queue.close()


def older(path: Path, rows: Rows, step: int, **options: Any) -> None:
    """Create the file as the version with this step would have it."""
    opened = database.open_database(
        path, driver="apsw", busy_seconds=5, create=True, allow_weak_passphrase=False, **options
    )
    opened.rows("BEGIN")
    for table, (columns, values) in rows.items():
        known = {row[1] for row in opened.rows(f"PRAGMA table_info({table})")}
        kept = [index for index, column in enumerate(columns) if column in known]
        into = ", ".join(columns[index] for index in kept)
        marks = ", ".join("?" * len(kept))
        for row in values:
            values_kept = tuple(row[index] for index in kept)
            opened.rows(f"INSERT INTO {table} ({into}) VALUES ({marks})", values_kept)
    opened.rows("COMMIT")
    assert opened.rows("SELECT value FROM outbox_meta WHERE name = 'schema'") == [(step,)]
    opened.close()


@pytest.mark.parametrize("passphrase", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("known", range(len(BASELINE), len(MIGRATIONS)))
def test_a_cut_at_any_statement_of_a_migration_loses_nothing(
    quick_path: Path,
    filled: Lab,
    monkeypatch: pytest.MonkeyPatch,
    known: int,
    passphrase: bytes | None,
) -> None:
    rows, entries = read(filled.queue), filled.queue.entries()
    disk = Disk(name := next(names))
    vfs = name if passphrase is None else f"multipleciphers-{name}"
    (quick_path / "disk").mkdir()
    path = quick_path / "disk/q.db"
    with monkeypatch.context() as patched:
        patched.setattr(database, "load_migrations", lambda *_: MIGRATIONS[:known])
        older(path, rows, MIGRATIONS[known - 1].number, passphrase=passphrase, vfs=vfs)
    monkeypatch.setattr(database, "load_migrations", lambda *_: MIGRATIONS)
    disk.mark("begun")

    def opened(path: Path, **options: Any) -> OutboxQueue:
        return filled.open(path=path, passphrase=passphrase, **options)

    def run(steps: Steps[None], execute: Callable[..., Any]) -> None:
        def marked(sql: str, params: tuple[Any, ...] = ()) -> Any:
            disk.mark("statement")
            return execute(sql, params)

        run_steps(steps, marked)

    with monkeypatch.context() as patched:
        patched.setattr(database, "run_steps", run)
        with opened(path, vfs=vfs) as queue:
            complete, found = read(queue), queue.entries()
    disk.mark("ended")
    assert found == entries
    columns, values = complete.pop("offline_sync_queue")
    kept = [index for index, column in enumerate(columns) if column != "colour"]
    status = columns.index("status")
    # Rows of a file that had the column were written without it.
    is_filled = known == len(BASELINE)
    assert all(row[-1] == (row[status] if is_filled else None) for row in values)
    without = [columns[n] for n in kept], [tuple(row[n] for n in kept) for row in values]
    assert complete | {"offline_sync_queue": without} == rows
    complete["offline_sync_queue"] = columns, values

    random, seen, begun = Random(known), set[tuple[Any, ...]](), disk.record.index(Mark("begun"))
    for position in range(begun, len(disk.record)):
        if not isinstance(disk.record[position], Mark | Sync):
            continue
        for before_cut in (disk.record[:position], disk.record[: position + 1]):
            images = after_cut(before_cut, random)
            content = tuple(sorted(images.items()))
            if content in seen:
                continue
            seen.add(content)
            directory = quick_path / f"cut{len(seen)}"
            restore(images, directory)
            with opened(directory / "q.db") as queue:
                assert read(queue) == complete
                queue.check_integrity()
    statements = disk.record.count(Mark("statement"))
    assert statements > len(MIGRATIONS) - known
