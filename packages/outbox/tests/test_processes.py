"""Several processes on one file, and processes killed at any step."""

import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from onceward_outbox import OutboxQueue, Status
from onceward_testing.fork_server import ForkServer
from packages.outbox.tests.queue_harness import KEY, local, new, walk
from packages.outbox.tests.queue_processes import (
    ALL_DONE,
    fork_server,
    lines,
    opened,
    settled,
)

ROUNDS = int(os.environ.get("ONCEWARD_TEST_ROUNDS", "0"))


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServer]:
    with fork_server() as made:
        yield made


def filled(path: Path, count: int, *, strict: bool = False, **options: object) -> list[str]:
    with OutboxQueue.open(path, **options) as queue:  # type: ignore[arg-type]
        queue.add_user("ada")
        make = walk if strict else new
        return [entry.id for entry in queue.enqueue_many([make() for _ in range(count)])]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("encrypted", [False, True])
def test_no_entry_is_claimed_by_two_processes(
    processes: ForkServer, quick_path: Path, workers: int, encrypted: bool
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    options: dict[str, Any] = {"passphrase": KEY} if encrypted else {}
    ids = filled(path, 150 + ROUNDS, **options)
    args = {"path": str(path), "log": str(log), "encrypted": encrypted}
    assert processes.run(*[("work", args)] * workers) == [0] * workers
    taken = Counter(entry for word, entry, *_ in lines(log) if word == "take")
    assert taken == Counter(ids)
    assert settled(path, encrypted=encrypted) == [(id_, ALL_DONE) for id_ in ids]


def test_in_strict_order_processes_take_turns(processes: ForkServer, quick_path: Path) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    ids = filled(path, 60 + ROUNDS, strict=True)
    args = {"path": str(path), "log": str(log), "pause": 0.001}
    assert processes.run(*[("work", args)] * 4) == [0] * 4
    held = sorted((int(at), word, entry) for word, entry, _, at in lines(log))
    # Never two at once, and in the order in which they were queued.
    assert [word for _, word, _ in held] == ["take", "give"] * len(ids)
    assert [entry for _, word, entry in held if word == "take"] == ids


def test_concurrent_enqueues_lose_nothing_and_have_unique_numbers(
    processes: ForkServer, quick_path: Path
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    filled(path, 0)
    writers = [
        ("enqueue_some", {"path": str(path), "log": str(log), "count": 40, "who": str(n)})
        for n in range(4)
    ]
    assert processes.run(*writers) == [0] * 4
    with OutboxQueue.open(path) as queue:
        entries = queue.entries(limit=1000)
    assert [entry.sequence_number for entry in entries] == list(range(1, 161))
    assert {entry.id for entry in entries} == {words[0] for words in lines(log)}
    for who in range(4):
        mine = [body["n"] for entry in entries if (body := entry.decoded())["who"] == str(who)]
        assert mine == list(range(40))


def test_processes_that_create_an_encrypted_file_at_once_all_open_it(
    processes: ForkServer, tmp_path: Path
) -> None:
    # A passphrase, not a key: the time it takes to stretch is the time to be overtaken in.
    path = tmp_path / "outbox.db"
    doing = ("add_user", {"path": str(path), "passphrase": "a secret between processes"})
    assert processes.run(*[doing] * 3) == [0] * 3
    with OutboxQueue.open(path, passphrase="a secret between processes") as queue:
        assert queue.users() == ["ada"]


@pytest.mark.parametrize("point", ["enqueue.before_commit", "enqueue.after_commit"])
def test_a_kill_while_enqueueing_loses_nothing_that_was_acknowledged(
    processes: ForkServer, tmp_path: Path, point: str
) -> None:
    path, log = tmp_path / "q.db", tmp_path / "log"
    filled(path, 0)
    acknowledged = 0
    for turn in range(1, 9):
        args = {
            "path": str(path),
            "log": str(log),
            "count": 20,
            "who": "x",
            "kill_at": [point, turn],
        }
        assert processes.run(("enqueue_some", args)) == [-9]
        acknowledged += turn - 1
    noted = {words[0] for words in lines(log)}
    assert len(noted) == acknowledged
    there = {id_ for id_, _ in settled(path)}
    assert noted <= there
    # Killed before its commit an entry is not there; killed after it, it is there untold.
    assert len(there - noted) == (0 if point == "enqueue.before_commit" else 8)


@pytest.mark.parametrize(
    "point",
    [
        "claim.before_commit",
        "claim.after_commit",
        "record.before_commit",
        "transaction.before_commit",
        "transaction.after_commit",
        "watchdog.before_commit",
        "watchdog.after_commit",
    ],
)
def test_a_kill_at_any_step_of_a_drain_leaves_every_entry_to_be_sent_with_its_key(
    processes: ForkServer, quick_path: Path, point: str
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    ids = filled(path, 12, strict=True)
    with OutboxQueue.open(path) as queue:
        keys = {entry.id: entry.idempotency_key for entry in queue.entries(limit=100)}
    args = {"path": str(path), "log": str(log), "lease_seconds": 0.001}
    for turn in (1, 2, 3, 1, 2, 3):
        codes = processes.run(("work_in_groups", {**args, "kill_at": [point, turn]}))
        assert codes in ([-9], [0])
    assert processes.run(("work_in_groups", args)) == [0]
    assert settled(path) == [(id_, ALL_DONE) for id_ in ids]
    sent = [(entry, key) for _, entry, key in lines(log)]
    assert {key for _, key in sent} == set(keys.values())
    assert all(keys[entry] == key for entry, key in sent)
    # Sent again at most where it was cut off, and never out of order.
    order = [ids.index(entry) for entry, _ in sent]
    assert order == sorted(order)


def test_claims_of_a_killed_process_are_returned_at_once(
    processes: ForkServer, quick_path: Path
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    ids = filled(path, 3)
    args = {"path": str(path), "log": str(log), "kill_at": ["record.before_commit", 1]}
    assert processes.run(("work", args)) == [-9]
    with opened(str(path)) as queue:
        assert queue.get(ids[0]).status is Status.IN_FLIGHT
        (back,) = queue.watchdog()  # though the lease is of two minutes
        assert (back.id, back.status, back.outcome_unknown) == (ids[0], Status.PENDING, True)


def test_claims_of_a_living_process_are_not_returned(
    processes: ForkServer, quick_path: Path
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    ids = filled(path, 1)
    with opened(str(path)) as queue:
        assert queue.claim("ada") is not None
        assert processes.run(("work", {"path": str(path), "log": str(log)})) == [0]
        assert queue.watchdog() == []
        assert (queue.get(ids[0]).status, lines(log)) == (Status.IN_FLIGHT, [])


def test_claims_of_a_killed_process_without_a_name_are_returned_after_the_lease(
    processes: ForkServer, quick_path: Path
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    ids = filled(path, 3)
    args = {"path": str(path), "log": str(log), "kill_at": ["record.before_commit", 1]}
    assert processes.run(("work", args)) == [-9]
    with closing(sqlite3.connect(path)) as file, file:
        # As earlier versions and other systems write it.
        file.execute("UPDATE offline_sync_queue SET claimed_by = '99' WHERE lease_ms > 0")
    with opened(str(path)) as queue:
        assert queue.get(ids[0]).status is Status.IN_FLIGHT
        assert queue.watchdog() == []  # the lease of two minutes holds
    args = {"path": str(path), "log": str(log), "kill_at": ["record.before_commit", 1]}
    assert processes.run(("work", {**args, "lease_seconds": 0.001})) == [-9]
    with opened(str(path)) as queue:
        (back,) = queue.watchdog()
        assert (back.id, back.outcome_unknown) == (ids[1], True)


def test_the_mapping_and_the_success_survive_a_kill_together(
    processes: ForkServer, quick_path: Path
) -> None:
    path, log = quick_path / "q.db", quick_path / "log"
    ref = local()
    with OutboxQueue.open(path) as queue:
        queue.add_user("ada")
        parent, child = queue.enqueue_many([new(local_id=ref), new(payload={"a": ref})])
    for point, expected in (("before", {}), ("after", {ref: parent.sequence_number})):
        args = {
            "path": str(path),
            "log": str(log),
            "lease_seconds": 0.001,
            "kill_at": [f"record.{point}_commit", 1],
        }
        assert processes.run(("work", args)) == [-9]
        with opened(str(path)) as queue:
            queue.watchdog()
            assert queue.mappings("ada", [ref]) == expected
            done = queue.get(parent.id).status is Status.SUCCEEDED
            assert done == (point == "after")
            assert (queue.get(child.id).waiting_for == 0) == done


def test_kills_at_random_instants_leave_an_intact_file(
    processes: ForkServer, tmp_path: Path
) -> None:
    path, log = tmp_path / "q.db", tmp_path / "log"
    filled(path, 0, passphrase=KEY)
    args = {"path": str(path), "log": str(log), "encrypted": True}
    queued: set[str] = set()
    turn, to_open = 0, 0.08
    while turn < 6 + ROUNDS // 100:
        writer = ("enqueue_some", {**args, "count": 10_000, "who": str(turn)})
        worker = ("work", {**args, "lease_seconds": 0.01})
        processes.run(writer, worker, kill_after=to_open + 0.03 * turn)
        before, queued = queued, {words[0] for words in lines(log) if len(words) == 1}
        if queued == before:  # killed before the first entry, on a slow machine
            to_open *= 2
            assert to_open < 60
        else:
            turn += 1
    assert queued
    assert queued <= {id_ for id_, _ in settled(path, encrypted=True)}
