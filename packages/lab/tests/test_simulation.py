"""The torture: many seeds keep every promise, and each seed is the same every time.

``HOLDFAST_SIMULATION_SEEDS`` says how many; 2,000 are enough for a fault at every point.
"""

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import holdfast.outbox
from holdfast.outbox import claims
from holdfast.outbox.sender import Sender
from holdfast.server.idempotency import Idempotency
from holdfast_lab.mutations import runner as mutations
from holdfast_lab.mutations.planting import BUGS, Replacement, plant
from holdfast_lab.simulation.faults import DEVICE_POINTS, KINDS, POINTS, Mask
from holdfast_lab.simulation.runner import (
    Summary,
    collecting_seldom,
    simulate,
    told,
)
from holdfast_lab.simulation.scenario import run_seed
from holdfast_lab.simulation.shrinking import shrink
from holdfast_lab.simulation.templates import Templates

SEEDS = int(os.environ.get("HOLDFAST_SIMULATION_SEEDS", "2000"))


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    with collecting_seldom(), Templates() as made:
        yield made


def test_many_seeds_break_no_promise_and_come_by_every_fault_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # the campaign sets it for good
    summary = simulate(iter(range(SEEDS)), jobs=os.cpu_count() or 1)
    assert summary.seeds == SEEDS
    assert summary.failing == [], _read(summary)
    assert [point for point in POINTS if not summary.points.get(point)] == []
    assert summary.unvisited == []
    assert {kind for kind in KINDS if not summary.faults.get(kind)} == set()
    assert summary.effects > SEEDS
    assert summary.is_good


def _read(summary: Summary) -> str:
    return "\n".join(
        line for failure in summary.failures for line in (*failure.timeline, *failure.violations)
    )


@pytest.mark.parametrize("seed", [3, 11, 17])
def test_a_seed_is_the_same_every_time(seed: int, templates: Templates) -> None:
    first, again = run_seed(seed, templates), run_seed(seed, templates)
    assert first.fingerprint == again.fingerprint
    assert first.timeline == again.timeline


def test_a_seed_does_not_know_what_ran_before_it(templates: Templates) -> None:
    seeds = [3, 11, 17, 28]
    forth = {seed: run_seed(seed, templates) for seed in seeds}
    with Templates() as others:
        back = {seed: run_seed(seed, others) for seed in reversed(seeds)}
    assert forth == back


def test_a_server_database_that_a_world_left_is_as_it_was(templates: Templates) -> None:
    def content() -> list[str]:
        database.begin_world(lambda: 0.0)
        return list(database.rows.iterdump())

    database = templates.server
    before = content()
    run_seed(3, templates)
    assert database.rows.execute("SELECT count(*) FROM effects").fetchone()[0] > 0
    assert content() == before


def test_what_a_killed_process_had_open_is_undone() -> None:
    with Templates() as templates:
        database = templates.server
        database.begin_world(lambda: 0.0)
        killed = database.take(partial(sqlite3.connect, database.path, isolation_level=None))
        killed.execute("BEGIN IMMEDIATE")
        killed.execute("INSERT INTO effects (tenant, tap) VALUES ('t', 'a')")
        database.give_back(killed)
        assert database.rows.execute("SELECT count(*) FROM effects").fetchone() == (0,)


@pytest.mark.parametrize("is_garbage", [True, False])
def test_a_snapshot_of_one_world_is_never_seen_in_the_next(is_garbage: bool) -> None:
    with Templates() as templates:
        database = templates.server
        database.begin_world(lambda: 0.0)
        killed = database.take(partial(sqlite3.connect, database.path, isolation_level=None))
        unread: list[Any] = [killed.execute("SELECT name FROM sqlite_schema")]
        unread[0].fetchone()
        unread.append(unread)
        database.give_back(killed)
        if is_garbage:
            del unread, killed
            database.begin_world(lambda: 0.0)
            return
        with pytest.raises(RuntimeError, match="still reads"):
            database.begin_world(lambda: 0.0)
        unread.clear()


def test_another_seed_is_another_world(templates: Templates) -> None:
    fingerprints = {run_seed(seed, templates).fingerprint for seed in range(8)}
    assert len(fingerprints) == 8


def test_without_its_faults_a_seed_is_calm(templates: Templates) -> None:
    outcome = run_seed(5, templates, Mask(only_first=0))
    assert sum(outcome.faults.values()) == 0
    assert outcome.violations == []


@pytest.mark.parametrize(
    "bug",
    [
        "key_regenerated_on_retry",
        "acknowledged_before_the_disk_has_it",
        "record_outside_the_transaction",
        "fingerprint_without_nested_keys",
        "marker_in_a_transaction_of_its_own",
        "stale_actions_accepted",
    ],
)
def test_a_planted_bug_is_found(bug: str, templates: Templates) -> None:
    result = mutations.find_bug(bug, templates, max_seeds=200, shrinks=False)
    assert result.broken is None
    assert result.failure is not None
    assert result.failure.violations


def _takes_too_little() -> list[Replacement]:
    return [(Sender, "_retry_after", lambda _self: None)]


def _asks_for_what_is_gone() -> list[Replacement]:
    right, seen = Idempotency.finish, []

    async def finish(self: Any, *args: Any, **options: Any) -> Any:
        seen.append(1)
        if len(seen) == 1:  # answered by 500, and tried again
            await self.is_gone()
        return await right(self, *args, **options)

    return [(Idempotency, "finish", finish)]


def _hides_its_error() -> list[Replacement]:
    def floor(self: Any, _answer: Any) -> None:
        with suppress(AttributeError):
            self.is_gone()

    return [(Sender, "_retry_after", floor)]


def _asks_a_table_that_is_gone() -> list[Replacement]:
    def watchdog(work: Any) -> Any:
        work._database.rows("UPDATE is_gone SET lease_ms = 0")

    return [(claims, "return_expired_claims", watchdog)]


def _cannot_be_planted() -> list[Replacement]:
    return [(Sender, "is_gone", None)]


@pytest.mark.parametrize(
    "made",
    [
        _takes_too_little,
        _asks_for_what_is_gone,
        _hides_its_error,
        _asks_a_table_that_is_gone,
        _cannot_be_planted,
    ],
)
def test_what_a_plant_breaks_by_its_own_error_is_no_catch(
    made: Callable[[], list[Replacement]], templates: Templates, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = (*mutations._BUG_FILES, __file__)  # these plants are in this file
    monkeypatch.setattr(mutations, "_BUG_FILES", files)
    monkeypatch.setitem(BUGS, "stale", plant(made))
    result = mutations.find_bug("stale", templates, max_seeds=60, shrinks=False)
    assert result.failure is None
    assert result.broken is not None


def test_a_failing_seed_is_shrunk_to_the_faults_that_matter(templates: Templates) -> None:
    with BUGS["acknowledged_before_the_commit"]():
        outcome = next(
            found for seed in range(200) if (found := run_seed(seed, templates)).violations
        )
        shrunk = shrink(outcome, templates, most_runs=15)
    assert {v.rule for v in shrunk.violations} & {v.rule for v in outcome.violations}
    assert 0 < told(shrunk).faults_left <= sum(outcome.faults.values())


def test_planted_bugs_leave_no_trace(templates: Templates) -> None:
    before = run_seed(7, templates).fingerprint
    for bug in BUGS.values():
        with bug():
            pass
    assert run_seed(7, templates).fingerprint == before


def test_every_operation_of_the_queue_that_commits_is_tortured() -> None:
    files = Path(holdfast.outbox.__file__).parent.glob("*.py")
    sources = "".join(file.read_text(encoding="utf-8") for file in files)
    written = set(re.findall(r'_write\("(\w+)"', sources))
    tortured = {point.partition(".")[0] for point in DEVICE_POINTS}
    assert "enqueue" in written
    assert written <= tortured


def test_planted_bugs_are_part_of_the_installed_package(tmp_path: Path) -> None:
    code = "from holdfast_lab.mutations.runner import BUGS; print(len(BUGS))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert int(ran.stdout) >= 41
