"""A siege as people see it: a bar on a terminal, a line now and then over a pipe, JSON."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from holdfast.cli.output import CommandError, print_json, print_table
from holdfast_lab.chaos import Report, Standing, run_chaos
from holdfast_lab.fork_client import ChildrenError

if TYPE_CHECKING:
    from holdfast_lab.chaos.cluster import DatabaseKind

__all__ = ["show_chaos"]

_BAD_INPUT: Final = 2
_SAY_EVERY_SECONDS: Final = 10.0
_MOST_VIOLATIONS: Final = 20

Watch = Callable[[Standing], None]


def show_chaos(*, seconds: float, database: str, nats: bool, seed: int, as_json: bool) -> int:
    """Lay siege and tell the outcome; returns the exit code."""
    if database not in ("sqlite", "postgres"):
        raise CommandError(f"--database should be sqlite or postgres, not {database!r}", _BAD_INPUT)
    kind = cast("DatabaseKind", database)
    try:
        with _watching(seconds, as_json=as_json) as watch:
            report = asyncio.run(run_chaos(seconds, kind=kind, nats=nats, seed=seed, watch=watch))
    except (ChildrenError, TimeoutError, RuntimeError) as error:
        raise CommandError(
            f"the siege could not be laid: {error or 'a start took too long'}"
        ) from error
    if as_json:
        print_json(msgspec.to_builtins(report) | {"holds": report.holds})
    else:
        _tell(report)
    return 0 if report.holds else 1


@contextmanager
def _watching(seconds: float, *, as_json: bool) -> Iterator[Watch]:
    """Give what shows how it stands: a bar, lines, or nothing."""
    if as_json:
        yield lambda _standing: None
    elif not sys.stdout.isatty():
        said_at = -_SAY_EVERY_SECONDS

        def say(standing: Standing) -> None:
            nonlocal said_at
            if standing.seconds - said_at >= _SAY_EVERY_SECONDS:
                said_at = standing.seconds
                print(f"{standing.seconds:6.0f} s  {_described(standing)}", flush=True)

        yield say
    else:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns) as bar:
            task = bar.add_task("starting", total=seconds)

            def show(standing: Standing) -> None:
                done = 0.0 if standing.phase == "starting" else min(standing.seconds, seconds)
                bar.update(task, completed=done, description=_described(standing))

            yield show


def _described(standing: Standing) -> str:
    return (
        f"{standing.phase}: {standing.kills} kills, {standing.stops} stops, "
        f"{standing.acknowledged} actions acknowledged, {standing.requests} requests"
    )


def _tell(report: Report) -> None:
    def by_kind(counts: dict[str, int]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))

    rows: list[tuple[str, Any, str]] = [
        ("kills", sum(report.kills.values()), by_kind(report.kills)),
        ("stops", sum(report.stops.values()), by_kind(report.stops)),
        ("requests", report.requests, by_kind(report.fates)),
        ("acknowledged actions", report.acknowledged, f"by {report.users} users"),
        ("effects", report.effects, ""),
        ("jobs", report.jobs, f"{report.dead_letters} dead letters"),
        ("duplicates", report.duplicates, ""),
        ("lost", report.lost, ""),
        ("broken promises", len(report.violations), ""),
    ]
    print_table(("what", "count", "of which"), [(name, str(n), more) for name, n, more in rows])
    for violation in report.violations[:_MOST_VIOLATIONS]:
        print(f"BROKEN {violation}")
    where = f"{report.database}{' and NATS' if report.nats else ''}"
    said = "every promise was kept" if report.holds else "PROMISES WERE BROKEN"
    print(f"{said} in {report.siege_seconds:g} s of siege on {where} (seed {report.seed})")
