"""The torture as people see it: a bar while it runs, then counts, and what broke."""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from holdfast.cli.output import CommandError, print_json, print_table
from holdfast.cli.signals import stop_requested
from holdfast_lab.simulation import mutations as planted
from holdfast_lab.simulation import runner as campaign
from holdfast_lab.simulation.faults import POINTS

__all__ = ["check_options", "show_planted", "show_seed", "show_simulation"]

_DEFAULT_SEEDS: Final = 2000
_LAST_LINES: Final = 60
_PLAIN_EVERY_SECONDS: Final = 10.0


def show_simulation(
    *, seeds: int | None, seconds: float | None, first: int, jobs: int | None, as_json: bool
) -> int:
    """Run a campaign; returns the exit code."""
    count = _DEFAULT_SEEDS if seeds is None and seconds is None else seeds
    numbers = itertools.count(first) if count is None else iter(range(first, first + count))
    deadline = None if seconds is None else time.monotonic() + seconds
    with stop_requested() as stops, _watching(count, seconds, as_json=as_json) as watch:
        summary = campaign.simulate(
            numbers, jobs=jobs or _cores(), deadline=deadline, on_progress=watch, stops=stops
        )
        was_stopped = stops()
    if as_json:
        points, struck = summary.hits()
        more = {
            "points": points,
            "struck": struck,
            "unvisited": summary.unvisited,
            "stopped": was_stopped,
            "good": summary.is_good,
        }
        print_json(msgspec.to_builtins(summary) | more)
    else:
        _tell(summary)
        if was_stopped:
            print("stopped early, at what has been run so far")
    return 0 if summary.is_good else 1


def show_seed(seed: int, *, as_json: bool) -> int:
    """Replay one seed and tell everything that happened; returns the exit code."""
    found = campaign.replay(seed)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        for line in found.timeline:
            print(line)
        _tell_violations(found.violations)
        print(f"seed {seed}: {'broken' if found.violations else 'all promises kept'}")
    return 1 if found.violations else 0


def show_planted(*, jobs: int | None, as_json: bool) -> int:
    """Look for every planted bug and tell the score; returns the exit code."""
    names = list(planted.load_bugs())
    catches: list[planted.Catch] = []
    for catch in planted.hunt(names, jobs=jobs or _cores()):
        catches.append(catch)
        if not as_json:
            _tell_catch(catch, len(catches), len(names))
    found = sum(catch.failure is not None for catch in catches)
    if as_json:
        print_json({"planted": len(names), "found": found, "bugs": msgspec.to_builtins(catches)})
    else:
        print(f"\nplanted bugs found: {found} of {len(names)}")
    return 0 if found == len(names) else 1


def _tell_catch(catch: planted.Catch, number: int, count: int) -> None:
    if catch.broken is not None:
        told = f"THE PLANT IS BROKEN: {catch.broken}"
    elif catch.failure is None:
        told = f"NOT FOUND in {catch.seeds} seeds"
    else:
        told = f"seed {catch.failure.seed}: {catch.failure.violations[0]}"
    print(f"{number:3}/{count}  {catch.bug:<34} {told}", flush=True)


# -- counts -------------------------------------------------------------------------------------


def _tell(summary: campaign.Summary) -> None:
    pace = summary.seeds / summary.seconds if summary.seconds else 0.0
    print_table(
        ("what", "how many"),
        [
            ("seeds", f"{summary.seeds}"),
            ("seconds", f"{summary.seconds:.1f} ({pace:.1f} seeds per second)"),
            ("virtual days", f"{summary.virtual_seconds / 86_400:.1f}"),
            ("taps", f"{summary.taps}"),
            ("requests", f"{summary.requests}"),
            ("effects", f"{summary.effects}"),
            ("jobs", f"{summary.jobs}"),
            ("faults", f"{sum(summary.faults.values())}"),
            ("violations", f"{len(summary.failing)} seeds"),
        ],
    )
    by_kind = sorted(summary.faults.items(), key=lambda item: -item[1])
    print_table(("fault", "times"), [(kind, str(times)) for kind, times in by_kind])
    print_table(
        ("fault point", "reached", "struck"),
        [
            (point, str(summary.points.get(point, 0)), str(summary.struck.get(point, 0)))
            for point in POINTS
        ],
    )
    if summary.unvisited and summary.seeds >= campaign.ENOUGH_SEEDS:
        print(f"never struck: {', '.join(summary.unvisited)}")
    for failure in summary.failures:
        _tell_failure(failure)
    untold = len(summary.failing) - len(summary.failures)
    if untold > 0:
        print(f"and {untold} more: {', '.join(str(seed) for seed in summary.failing)}")
    print("no promise was broken" if summary.is_good else "the torture has FAILED")


def _tell_failure(failure: campaign.Failure) -> None:
    print(f"\nseed {failure.seed}, with {failure.faults_left} faults left:")
    left_out = len(failure.timeline) - _LAST_LINES
    if left_out > 0:
        print(f"  … {left_out} lines before")
    for line in failure.timeline[-_LAST_LINES:]:
        print(f"  {line}")
    _tell_violations(failure.violations)
    print(f"  holdfast simulate --seed {failure.seed}   shows the whole of it")


def _tell_violations(violations: list[str]) -> None:
    for violation in violations:
        print(f"  BROKEN  {violation}")


# -- while it runs ------------------------------------------------------------------------------


@contextmanager
def _watching(
    seeds: int | None, seconds: float | None, *, as_json: bool
) -> Iterator[Callable[[campaign.Summary], None]]:
    """Give what shows how far it is: a bar on a terminal, a line now and then over a pipe."""
    if as_json:
        yield lambda _: None
        return
    if not sys.stdout.isatty():
        yield _plain()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.completed:.0f} of {task.total:.0f} {task.fields[unit]}")
    found = TextColumn("{task.fields[seeds]} seeds, {task.fields[bad]} broken")
    with Progress(BarColumn(), text, found, TimeElapsedColumn(), transient=True) as bar:
        by_time = seeds is None
        task = bar.add_task(
            "",
            total=seconds if by_time else seeds,
            unit="s" if by_time else "seeds",
            seeds=0,
            bad=0,
        )

        def watch(summary: campaign.Summary) -> None:
            done: Any = summary.seconds if by_time else summary.seeds
            bar.update(task, completed=done, seeds=summary.seeds, bad=len(summary.failing))

        yield watch


def _plain() -> Callable[[campaign.Summary], None]:
    last = 0.0

    def watch(summary: campaign.Summary) -> None:
        nonlocal last
        if summary.seconds - last >= _PLAIN_EVERY_SECONDS:
            last = summary.seconds
            print(
                f"{summary.seconds:6.0f} s  {summary.seeds} seeds, {len(summary.failing)} broken",
                flush=True,
            )

    return watch


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_options(
    *, seed: int | None, seeds: int | None, seconds: float | None, planted: bool
) -> None:
    """Refuse what cannot be meant."""
    if planted and not (seed is seeds is seconds is None):
        raise CommandError("--planted hunts every bug: leave --seed, --seeds and --seconds out", 2)
    if seed is not None and (seeds is not None or seconds is not None):
        raise CommandError("--seed replays one seed: leave --seeds and --seconds out", 2)
    if seconds is not None and not math.isfinite(seconds):
        raise CommandError(
            "--seconds should be a number of seconds: it is for --seeds to say how many", 2
        )
