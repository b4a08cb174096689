"""Pruning by the outbox, and settings from the environment."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from onceward.errors import ConfigurationError
from onceward_outbox import EventKind, OutboxQueue, maintenance
from onceward_outbox.entry import Status
from onceward_outbox.errors import DiskFullError, FileBusyError, OutboxFileError
from onceward_outbox.outbox import Outbox
from onceward_outbox.settings import VARIABLES, QueueSettings
from packages.onceward.tests.support.outbox_harness import SOON, Scripted, activity, response
from packages.outbox.tests.queue_harness import Lab, new
from packages.outbox.tests.test_background import eventually


@pytest.fixture
def outbox(lab: Lab) -> Iterator[Outbox]:
    """An outbox on a queue whose clock the test sets."""
    with Outbox(lab.queue, Scripted(lambda _: response(201, {"id": 1})), "t", retry=SOON) as made:
        yield made


def settled(lab: Lab, count: int) -> None:
    lab.queue.enqueue_many([new() for _ in range(count)])
    for _ in range(count):
        lab.send()


def count(lab: Lab) -> int:
    return sum(lab.queue.stats().counts.values())


def test_the_background_drain_prunes_everything_at_its_start(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 3)
    settled(lab, 10)
    lab.clock.pass_by(days=8)
    settled(lab, 2)
    outbox.start()
    eventually(lambda: count(lab) == 2, 20)


def test_new_entries_are_sent_before_pruning_continues(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "PRUNE_BATCH", 1)
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


def test_a_drain_prunes_at_most_once_an_hour(
    lab: Lab, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("onceward_outbox.maintenance.monotonic", lambda: now)
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
def test_an_error_while_pruning_is_logged_only(
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


def test_prune_if_due_reads_few_rows_when_nothing_is_old(
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
    assert not lab.queue.prune_if_due()
    connection.set_progress_handler(None, 1)  # type: ignore[attr-defined]
    lab.queue.close()
    assert steps < 3000, "it reads every row"


# -- what can be set ------------------------------------------------------------------------------


def test_settings_from_the_environment_may_be_fractions() -> None:
    assert QueueSettings.from_environment({}) == QueueSettings()
    given = {
        "ONCEWARD_OUTBOX_LEASE_SECONDS": "0.5",
        "ONCEWARD_OUTBOX_CAP_DAYS": "14",
        "ONCEWARD_OUTBOX_KEEP_SUCCEEDED_DAYS": "0.25",
        "ONCEWARD_OUTBOX_KEEP_SETTLED_DAYS": "",
        "ONCEWARD_OUTBOX_WARN_DAYS": "0.5",
        "ONCEWARD_OUTBOX_RESPONSE_CEILING_SECONDS": "7.5",
        "ONCEWARD_OUTBOX_PARALLEL_LANES": "12",
    }
    assert QueueSettings.from_environment(given) == QueueSettings(
        lease_seconds=0.5,
        stale_after=timedelta(days=14),
        keep_succeeded=timedelta(hours=6),
        warn_before=timedelta(hours=12),
        response_ceiling_seconds=7.5,
        parallel_lanes=12,
    )


@pytest.mark.parametrize("variable", VARIABLES.values())
@pytest.mark.parametrize("value", ["a week", "0", "-1", "nan", "inf", "1e9", "1e-12", "1,5", " "])
def test_an_invalid_environment_variable_is_named(variable: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{variable} should be a number of \w+ .*$"):
        QueueSettings.from_environment({variable: value})


def test_every_variable_of_the_outbox_is_on_its_page_with_its_default() -> None:
    page = Path(__file__).parents[3] / "docs/reference/outbox.md"
    text = page.read_text(encoding="utf-8")
    for name, variable in VARIABLES.items():
        default = getattr(QueueSettings(), name)
        number = default / timedelta(days=1) if isinstance(default, timedelta) else default
        shown = "" if number is None else f"`{number:g}`"
        assert f"\n| `{variable}` | {shown} | `{name}` |" in text
    known = {*VARIABLES.values(), "ONCEWARD_OUTBOX_RETRY_SECONDS"}
    assert set(re.findall(r"ONCEWARD_\w+", text)) == known
