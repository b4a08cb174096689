"""The outbox keeps its file in order by itself: what was settled long ago goes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.entry import Status
from holdfast.device import EventKind, OutboxQueue, upkeep
from holdfast.device.outbox import Outbox
from holdfast.errors import DiskFullError, FileBusyError, OutboxFileError
from tests.device.queue_lab import Lab, new
from tests.device.test_runner import eventually
from tests.support.outbox_lab import SOON, Scripted, activity, answer


@pytest.fixture
def outbox(lab: Lab) -> Iterator[Outbox]:
    """An outbox on a queue whose clock moves by hand."""
    with Outbox(lab.queue, Scripted(lambda _: answer(201, {"id": 1})), "t", retry=SOON) as made:
        yield made


def settled(lab: Lab, count: int) -> None:
    lab.queue.enqueue_many([new() for _ in range(count)])
    for _ in range(count):
        lab.send()


def count(lab: Lab) -> int:
    return sum(lab.queue.stats().counts.values())


def test_the_runner_prunes_when_it_starts_however_much_there_is(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PRUNE_BATCH", 3)
    settled(lab, 10)
    lab.clock.pass_by(days=8)
    settled(lab, 2)
    outbox.start()
    eventually(lambda: count(lab) == 2, 20)


def test_what_is_queued_goes_before_the_rest_of_the_pruning(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "PRUNE_BATCH", 1)
    settled(lab, 10)
    lab.clock.pass_by(days=8)
    kinds: list[EventKind] = []

    def listen(event: Any) -> None:
        kinds.append(event.kind)
        if event.kind is EventKind.PRUNED and kinds.count(EventKind.PRUNED) == 2:
            outbox.enqueue(activity("ada", "now"))

    outbox.subscribe(listen)
    outbox.start()
    eventually(lambda: kinds.count(EventKind.PRUNED) == 10, 20)
    before = kinds[: kinds.index(EventKind.SUCCEEDED)]
    assert before.count(EventKind.PRUNED) == 2


def test_a_drain_prunes_too_and_looks_once_an_hour(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("holdfast.device.housekeeping.monotonic", lambda: now)
    settled(lab, 2)
    assert lab.queue.cancel(lab.add().id).status is Status.DISCARDED
    outbox.drain("ada")
    assert count(lab) == 3
    lab.clock.pass_by(days=8)
    now += 3500
    outbox.drain("ada")
    assert count(lab) == 3
    now += 200
    outbox.drain("ada")
    assert [entry.status for entry in lab.queue.entries()] == [Status.DISCARDED]
    lab.clock.pass_by(days=23)
    now += 3700
    outbox.drain("ada")
    assert count(lab) == 0


@pytest.mark.parametrize("error", [FileBusyError, DiskFullError])
def test_a_file_that_cannot_be_pruned_now_ends_nothing(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch, error: type[OutboxFileError]
) -> None:
    settled(lab, 1)
    lab.clock.pass_by(days=8)
    tries: list[None] = []

    def fail(*_: Any, **__: Any) -> int:
        tries.append(None)
        raise error("not now")

    monkeypatch.setattr(OutboxQueue, "prune", fail)
    outbox.start()
    eventually(lambda: bool(tries), 20)
    outbox.enqueue(activity("ada", "one"))
    eventually(lambda: lab.queue.stats().counts[Status.SUCCEEDED] == 2, 20)
    assert len(tries) == 1


def test_a_look_that_finds_nothing_reads_little_however_much_there_is(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(quick_path / "many.db")
    monkeypatch.setattr(OutboxQueue, "prune", lambda *_, **__: pytest.fail("there is nothing"))
    with lab.queue.transaction() as connection:
        lab.queue.enqueue_many([new() for _ in range(3000)])
        connection.execute(
            "UPDATE offline_sync_queue SET status = 'succeeded', settled_ms = enqueued_ms"
        )
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    lab.clock.pass_by(days=6)
    connection.set_progress_handler(step, 1)  # type: ignore[attr-defined]
    assert not lab.queue.prune_in_passing()
    connection.set_progress_handler(None, 1)  # type: ignore[attr-defined]
    lab.queue.close()
    assert steps < 3000, "it reads every row"
