"""Power cuts: acknowledged entries are on the disk, whatever unsynced writes are lost."""

import itertools
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from onceward_outbox import OutboxQueue, Status
from onceward_outbox.errors import OutboxFileError
from packages.outbox.tests.outcomes import succeed
from packages.outbox.tests.power_cuts import Disk, Mark, Sync, after_cut, restore
from packages.outbox.tests.queue_harness import KEY, PocketClock, local, new, walk

names = (f"disk{number}" for number in itertools.count())
Opener = Callable[[Path], OutboxQueue]


def record(directory: Path, work: Callable[[OutboxQueue, Disk], None], **options: Any) -> Disk:
    """Run some work on a disk that remembers everything."""
    name = next(names)
    disk = Disk(name)
    vfs = f"multipleciphers-{name}" if "passphrase" in options else name
    clock = PocketClock()
    directory.mkdir()
    path = directory / "q.db"
    with OutboxQueue.open(path, driver="apsw", vfs=vfs, clock=clock, **options) as queue:
        queue.add_user("ada")
        with queue.transaction() as connection:
            # Small, so that the log is moved into the file in the middle of things.
            connection.execute("PRAGMA wal_autocheckpoint = 40").fetchall()
        disk.mark(("begun", None))
        work(queue, disk)
    return disk


def one_by_one(queue: OutboxQueue, disk: Disk) -> None:
    """Enqueue, claim and settle, marking each thing as soon as the app knows it."""
    for number in range(16):
        entry = queue.enqueue(new(payload={"n": number}) if number % 3 else walk())
        disk.mark(("queued", entry.id))
        if number % 4 == 3:
            claimed = queue.claim("ada")
            assert claimed is not None
            done = succeed(queue, claimed, server_id=number)
            disk.mark(("done", done.id))
    ref = local()
    batch = queue.enqueue_many([new(local_id=ref), new(payload={"a": ref}), new()])
    for entry in batch:
        disk.mark(("queued", entry.id))
    disk.mark(("discarded", queue.cancel(batch[2].id).id))


EXPECTED = {"done": Status.SUCCEEDED, "discarded": Status.DISCARDED}


def lost(images: dict[str, bytes], known: list[Any], directory: Path, opener: Opener) -> list[Any]:
    """Return what was acknowledged to the app and is not in the file after the cut."""
    restore(images, directory)
    with opener(directory / "q.db") as queue:
        queue.check_integrity()
        there = {entry.id: entry.status for entry in queue.entries(limit=1000)}
        missing = []
        for what, entry_id in known:
            expected = EXPECTED.get(what)
            if entry_id not in there or (expected is not None and there[entry_id] is not expected):
                missing.append((what, entry_id))
        # And it still works.
        entry = queue.enqueue(new())
        assert entry.sequence_number > len(there)
    return missing


def cuts(disk: Disk, count: int, seed: int) -> list[tuple[int, Random]]:
    """Choose instants: before and after every sync, and others at random."""
    random = Random(seed)
    begun = disk.record.index(Mark(("begun", None)))
    syncs = [n for n, event in enumerate(disk.record) if isinstance(event, Sync) and n > begun]
    near = [n + side for n in syncs for side in (0, 1)]
    anywhere = random.sample(range(begun, len(disk.record)), min(count, len(disk.record) - begun))
    chosen = random.sample(near, min(count, len(near))) + anywhere
    return [(n, Random(seed * 1_000_003 + n)) for n in chosen]


@pytest.mark.parametrize("passphrase", [None, KEY])
def test_no_acknowledged_change_is_lost_by_a_power_cut(
    quick_path: Path, passphrase: bytes | None
) -> None:
    options = {} if passphrase is None else {"passphrase": passphrase}
    disk = record(quick_path / "disk", one_by_one, **options)

    def opener(path: Path) -> OutboxQueue:
        return OutboxQueue.open(path, driver="apsw", passphrase=passphrase, clock=PocketClock())

    for trial, (position, random) in enumerate(cuts(disk, 60, seed=7)):
        before = disk.record[:position]
        known = [event.what for event in before if isinstance(event, Mark)][1:]
        images = after_cut(before, random)
        assert lost(images, known, quick_path / f"cut{trial}", opener) == []
    assert sum(isinstance(event, Mark) for event in disk.record) == 1 + 16 + 4 + 3 + 1


def test_without_waiting_for_the_disk_the_same_cuts_lose_entries(quick_path: Path) -> None:
    """The simulation can fail: it is the syncs that the test above is about."""

    def careless(queue: OutboxQueue, disk: Disk) -> None:
        with queue.transaction() as connection:
            pass
        connection.execute("PRAGMA synchronous = NORMAL").fetchall()
        one_by_one(queue, disk)

    disk = record(quick_path / "disk", careless)

    def opener(path: Path) -> OutboxQueue:
        return OutboxQueue.open(path, driver="apsw", clock=PocketClock())

    losses = 0
    for trial, (position, random) in enumerate(cuts(disk, 25, seed=11)):
        before = disk.record[:position]
        known = [event.what for event in before if isinstance(event, Mark)][1:]
        try:
            missing = lost(after_cut(before, random), known, quick_path / f"cut{trial}", opener)
        except OutboxFileError:
            missing = known
        losses += bool(missing)
    assert losses > 5


def test_a_power_cut_while_the_file_is_created_leaves_a_file_that_opens(quick_path: Path) -> None:
    disk = record(quick_path / "disk", lambda _queue, _disk: None)
    random = Random(3)
    for position in range(0, len(disk.record), 3):
        directory = quick_path / f"cut{position}"
        restore(after_cut(disk.record[:position], random), directory)
        with OutboxQueue.open(directory / "q.db", driver="apsw") as queue:
            queue.add_user("ada")
            assert queue.enqueue(new()).sequence_number == 1
