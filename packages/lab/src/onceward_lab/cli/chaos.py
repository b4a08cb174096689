"""``onceward chaos``: progress and report, as text or JSON."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from onceward_lab.chaos import Progress, Report, run_chaos
from onceward_lab.fork_client import ChildError
from onceward_protocol.cli.output import CommandError, print_json_line, print_table

if TYPE_CHECKING:
    from onceward_lab.chaos.cluster import DatabaseKind, Replication

__all__ = ["show_chaos"]

_BAD_INPUT: Final = 2
_DATABASES: Final = ("sqlite", "postgres", "postgres-ha")
_LINE_EVERY_SECONDS: Final = 10.0
_MAX_VIOLATIONS: Final = 20

OnProgress = Callable[[Progress], None]


def show_chaos(
    *,
    seconds: float,
    database: str,
    replication: str | None,
    nats: bool,
    seed: int,
    as_json: bool,
) -> int:
    """Run and print the report; returns the exit code, 1 if a guarantee was violated."""
    if database not in _DATABASES:
        raise CommandError(
            f"--database should be one of {', '.join(_DATABASES)}, not {database!r}", _BAD_INPUT
        )
    if replication not in (None, "sync", "async"):
        raise CommandError(
            f"--replication should be sync or async, not {replication!r}", _BAD_INPUT
        )
    if replication is not None and database != "postgres-ha":
        raise CommandError("--replication needs --database postgres-ha", _BAD_INPUT)
    kind, mode = cast("DatabaseKind", database), cast("Replication", replication or "sync")
    try:
        with _showing_progress(seconds, as_json=as_json) as on_progress:
            report = asyncio.run(
                run_chaos(
                    seconds,
                    kind=kind,
                    replication=mode,
                    nats=nats,
                    seed=seed,
                    on_progress=on_progress,
                )
            )
    except (ChildError, TimeoutError, RuntimeError) as error:
        raise CommandError(
            f"the chaos run could not start: {error or 'a start timed out'}"
        ) from error
    if as_json:
        print_json_line(msgspec.to_builtins(report) | {"holds": report.holds})
    else:
        _print_report(report)
    return 0 if report.holds else 1


@contextmanager
def _showing_progress(seconds: float, *, as_json: bool) -> Iterator[OnProgress]:
    """Show a bar on a terminal, lines over a pipe, nothing with ``--json``."""
    if as_json:
        yield lambda _progress: None
    elif not sys.stdout.isatty():
        last = -_LINE_EVERY_SECONDS

        def print_line(progress: Progress) -> None:
            nonlocal last
            if progress.seconds - last >= _LINE_EVERY_SECONDS:
                last = progress.seconds
                print(f"{progress.seconds:6.0f} s  {_describe(progress)}", flush=True)

        yield print_line
    else:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as ProgressBar

        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with ProgressBar(*columns) as bar:
            task = bar.add_task("starting", total=seconds)

            def show(progress: Progress) -> None:
                done = 0.0 if progress.phase == "starting" else min(progress.seconds, seconds)
                bar.update(task, completed=done, description=_describe(progress))

            yield show


def _describe(progress: Progress) -> str:
    return (
        f"{progress.phase}: {progress.kills} kills, {progress.stops} stops, "
        f"{progress.failovers} failovers, "
        f"{progress.acknowledged} actions acknowledged, {progress.requests} requests"
    )


def _print_report(report: Report) -> None:
    def by_kind(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))

    rows: list[tuple[str, Any, str]] = [
        ("kills", sum(report.kills.values()), by_kind(report.kills)),
        ("stops", sum(report.stops.values()), by_kind(report.stops)),
        ("failovers", report.failovers, by_kind(report.failover_causes)),
        ("requests", report.requests, by_kind(report.outcomes)),
        ("acknowledged actions", report.acknowledged, f"by {report.users} users"),
        ("effects", report.effects, ""),
        ("jobs", report.jobs, f"{report.dead_letters} dead letters"),
        ("doubled", report.doubled, ""),
        ("lost", report.lost, ""),
        ("violations", len(report.violations), ""),
    ]
    print_table(("what", "count", "of which"), [(name, str(n), more) for name, n, more in rows])
    if report.recovery_median_seconds is not None:
        print(
            f"from the loss of the primary to the first success: median "
            f"{report.recovery_median_seconds:g} s, worst {report.recovery_worst_seconds:g} s"
        )
    for violation in report.violations[:_MAX_VIOLATIONS]:
        print(f"VIOLATED {violation}")
    where = f"{report.database}{' and NATS' if report.nats else ''}"
    if report.replication is not None:
        where += f" with {report.replication} replication"
    result = "no guarantee was violated" if report.holds else "GUARANTEES WERE VIOLATED"
    print(f"{result} in {report.fault_seconds:g} s of faults on {where} (seed {report.seed})")
