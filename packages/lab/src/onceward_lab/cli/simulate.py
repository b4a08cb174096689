"""``onceward simulate``: progress, counts and violations, as text or JSON."""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from onceward_lab.cli.signals import stop_requested
from onceward_lab.mutations.runner import BUGS, BugResult, find_bugs
from onceward_lab.simulation import runner
from onceward_lab.simulation.faults import POINTS
from onceward_protocol.cli.output import CommandError, print_json, print_json_line, print_table

__all__ = ["check_options", "show_planted", "show_seed", "show_simulation"]

_DEFAULT_SEEDS: Final = 2000
_TIMELINE_LINES: Final = 60
_LINE_EVERY_SECONDS: Final = 10.0


def show_simulation(
    *, seeds: int | None, seconds: float | None, first: int, jobs: int | None, as_json: bool
) -> int:
    """Run many seeds; returns the exit code, 1 if a guarantee was violated."""
    count = _DEFAULT_SEEDS if seeds is None and seconds is None else seeds
    numbers = itertools.count(first) if count is None else iter(range(first, first + count))
    deadline = None if seconds is None else time.monotonic() + seconds
    with (
        stop_requested() as stops,
        _showing_progress(count, seconds, as_json=as_json) as on_progress,
    ):
        summary = runner.simulate(
            numbers,
            jobs=jobs or _cores(),
            deadline=deadline,
            on_progress=on_progress,
            should_stop=stops,
        )
        was_stopped = stops()
    if as_json:
        points, struck = summary.hits()
        more = {
            "points": points,
            "struck": struck,
            "unvisited": summary.unvisited,
            "stopped": was_stopped,
            "good": summary.passed,
            "violations": len(summary.failing),
            "planted": None,
        }
        print_json_line(msgspec.to_builtins(summary) | more)
    else:
        _print_summary(summary)
        if was_stopped:
            print("stopped early; the counts are for the seeds that ran")
    return 0 if summary.passed else 1


def show_seed(seed: int, *, as_json: bool) -> int:
    """Replay one seed and print its timeline; returns the exit code."""
    found = runner.replay(seed)
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        for line in found.timeline:
            print(line)
        _print_violations(found.violations)
        print(f"seed {seed}: {'violations found' if found.violations else 'no violations'}")
    return 1 if found.violations else 0


def show_planted(*, jobs: int | None, as_json: bool) -> int:
    """Search for every planted bug; returns the exit code, 1 if one was not found."""
    names = list(BUGS)
    results: list[BugResult] = []
    for result in find_bugs(names, jobs=jobs or _cores()):
        results.append(result)
        if not as_json:
            _print_bug(result, len(results), len(names))
    found = sum(result.failure is not None for result in results)
    if as_json:
        summary = {
            "seeds": sum(result.seeds for result in results),
            "violations": found,
            "planted": len(names),
            "found": found,
            "bugs": msgspec.to_builtins(results),
        }
        print_json_line(summary)
    else:
        print(f"\nplanted bugs found: {found} of {len(names)}")
    return 0 if found == len(names) else 1


def _print_bug(result: BugResult, number: int, count: int) -> None:
    if result.broken is not None:
        text = f"COULD NOT BE PLANTED: {result.broken}"
    elif result.failure is None:
        text = f"NOT FOUND in {result.seeds} seeds"
    else:
        text = f"seed {result.failure.seed}: {result.failure.violations[0]}"
    print(f"{number:3}/{count}  {result.bug:<34} {text}", flush=True)


# -- counts -------------------------------------------------------------------------------------


def _print_summary(summary: runner.Summary) -> None:
    rate = summary.seeds / summary.seconds if summary.seconds else 0.0
    print_table(
        ("", "count"),
        [
            ("seeds", f"{summary.seeds}"),
            ("seconds", f"{summary.seconds:.1f} ({rate:.1f} seeds per second)"),
            ("virtual days", f"{summary.virtual_seconds / 86_400:.1f}"),
            ("user actions", f"{summary.actions}"),
            ("requests", f"{summary.requests}"),
            ("effects", f"{summary.effects}"),
            ("jobs", f"{summary.jobs}"),
            ("faults", f"{sum(summary.faults.values())}"),
            ("violations", f"{len(summary.failing)} seeds"),
        ],
    )
    by_kind = sorted(summary.faults.items(), key=lambda item: -item[1])
    print_table(("fault", "count"), [(kind, str(times)) for kind, times in by_kind])
    print_table(
        ("fault point", "reached", "faults"),
        [
            (point, str(summary.points.get(point, 0)), str(summary.struck.get(point, 0)))
            for point in POINTS
        ],
    )
    if summary.unvisited and summary.seeds >= runner.FULL_COVERAGE_SEEDS:
        print(f"fault points without a fault: {', '.join(summary.unvisited)}")
    for failure in summary.failures:
        _print_failure(failure)
    omitted = len(summary.failing) - len(summary.failures)
    if omitted > 0:
        print(f"and {omitted} more: {', '.join(str(seed) for seed in summary.failing)}")
    print("no guarantee was violated" if summary.passed else "THE SIMULATION FAILED")


def _print_failure(failure: runner.Failure) -> None:
    print(f"\nseed {failure.seed}, reduced to {failure.faults_left} faults:")
    skipped = len(failure.timeline) - _TIMELINE_LINES
    if skipped > 0:
        print(f"  … {skipped} earlier lines")
    for line in failure.timeline[-_TIMELINE_LINES:]:
        print(f"  {line}")
    _print_violations(failure.violations)
    print(f"  onceward simulate --seed {failure.seed}   prints the whole timeline")


def _print_violations(violations: list[str]) -> None:
    for violation in violations:
        print(f"  VIOLATED  {violation}")


# -- progress -----------------------------------------------------------------------------------


@contextmanager
def _showing_progress(
    seeds: int | None, seconds: float | None, *, as_json: bool
) -> Iterator[Callable[[runner.Summary], None]]:
    """Show a bar on a terminal, a line every 10 s over a pipe, nothing with ``--json``."""
    if as_json:
        yield lambda _: None
        return
    if not sys.stdout.isatty():
        yield _line_printer()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.completed:.0f} of {task.total:.0f} {task.fields[unit]}")
    found = TextColumn("{task.fields[seeds]} seeds, {task.fields[bad]} with violations")
    with Progress(BarColumn(), text, found, TimeElapsedColumn(), transient=True) as bar:
        by_time = seeds is None
        task = bar.add_task(
            "",
            total=seconds if by_time else seeds,
            unit="s" if by_time else "seeds",
            seeds=0,
            bad=0,
        )

        def on_progress(summary: runner.Summary) -> None:
            done: Any = summary.seconds if by_time else summary.seeds
            bar.update(task, completed=done, seeds=summary.seeds, bad=len(summary.failing))

        yield on_progress


def _line_printer() -> Callable[[runner.Summary], None]:
    last = 0.0

    def on_progress(summary: runner.Summary) -> None:
        nonlocal last
        if summary.seconds - last >= _LINE_EVERY_SECONDS:
            last = summary.seconds
            failing = len(summary.failing)
            print(
                f"{summary.seconds:6.0f} s  {summary.seeds} seeds, {failing} with violations",
                flush=True,
            )

    return on_progress


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_options(
    *, seed: int | None, seeds: int | None, seconds: float | None, planted: bool
) -> None:
    """Raise ``CommandError`` for options that exclude each other."""
    if planted and not (seed is seeds is seconds is None):
        raise CommandError("--planted cannot be combined with --seed, --seeds or --seconds", 2)
    if seed is not None and (seeds is not None or seconds is not None):
        raise CommandError("--seed cannot be combined with --seeds or --seconds", 2)
    if seconds is not None and not math.isfinite(seconds):
        raise CommandError("--seconds should be a finite number", 2)
