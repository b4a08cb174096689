"""Run the benchmarks and print ratios against bare code and against peers.

All contenders run in turns within one run. Results are written as JSON and SVG charts.
"""

import argparse
import json
import logging
import math
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from onceward_lab.bench.cpu_layers import tree_of
from onceward_lab.bench.curves import Curve
from onceward_lab.bench.environment import Environment, open_environment
from onceward_lab.bench.measurements import Measurement
from onceward_lab.bench.plots import draw
from onceward_lab.bench.suites import SUITES
from onceward_protocol.cli.output import print_error

RESULTS = Path("bench") / "results"
FILE = "latest.json"
BAD_INPUT = 2
# The growth curves begin with 1,000 rows and have a measurement at half of the largest size.
MIN_ROWS, MAX_ROWS = 2_000, 1_000_000_000
MIN_SECONDS, MAX_SECONDS = 0.01, 3_600


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(stderr=options.json)
    results = Path(options.results)
    try:
        results.mkdir(parents=True, exist_ok=True)
        found = _read(results / FILE)
        if options.draw_only:
            return _draw_only(found, results, console)
        _write(found, results / FILE)
    except OSError as error:
        print_error(f"--results {results}: {error.strerror}: name a writable directory")
        return BAD_INPUT
    logging.disable(logging.INFO)
    # Also where the parent ignores SIGINT, as a shell does for a command in the background.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    chosen = [name for name in SUITES if not options.only or name in options.only]
    done: list[str] = []
    written: list[Path] = []
    try:
        for name in _measure(chosen, options, found, console):
            done.append(name)
            # After each suite, so that a run that is stopped keeps its results.
            _write(found, results / FILE)
            written = [results / FILE, *draw(found, results)]
    except KeyboardInterrupt:
        kept = ", ".join(done) or "nothing, as no suite had finished"
        print_error(f"stopped before the end; kept: {kept}")
    if options.json:
        print(json.dumps(found))
        return 0
    _show(found, set(done), console)
    for path in written:
        console.print(f"written: {path}")
    return 0


def _measure(
    chosen: list[str], options: argparse.Namespace, found: dict[str, Any], console: Console
) -> Iterator[str]:
    """Run the suites, replace their earlier results in ``found``, and yield each name."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("benchmark", total=len(chosen))
        name = ""

        def on_step(step: str) -> None:
            progress.update(task, description=f"{name}: {step}")

        with open_environment(
            options.rounds, options.seconds, options.rows, on_step, options.baseline
        ) as environment:
            for name in chosen:
                on_step("running")
                started = time.perf_counter()
                for kind, rows in _run(name, environment).items():
                    kept = [row for row in found.get(kind, []) if row["suite"] != name]
                    found[kind] = kept + [{"suite": name, **row} for row in rows]
                found["runs"][name] = _stamp(options, time.perf_counter() - started)
                progress.advance(task)
                yield name


def _run(name: str, environment: Environment) -> dict[str, list[dict[str, Any]]]:
    found = SUITES[name](environment)
    return {
        "measurements": [item.as_json() for item in found if isinstance(item, Measurement)],
        "curves": [item.as_json() for item in found if isinstance(item, Curve)],
    }


def _draw_only(found: dict[str, Any], results: Path, console: Console) -> int:
    written = draw(found, results)
    if not written:
        print_error(f"{results / FILE} has no results: run onceward bench first")
        return BAD_INPUT
    for path in written:
        console.print(f"written: {path}")
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print one line, like the other commands."""
        print_error(f"{message} (try: onceward bench --help)")
        sys.exit(BAD_INPUT)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="onceward bench", description=__doc__)
    parser.add_argument(
        "--rounds",
        type=_integer(1, 1_000),
        default=4,
        help="number of interleaved rounds (default 4)",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=0.6,
        help="seconds per contender and round (default 0.6)",
    )
    parser.add_argument(
        "--rows",
        type=_integer(MIN_ROWS, MAX_ROWS),
        default=10_000_000,
        help="size of the largest table (default 10,000,000)",
    )
    parser.add_argument("--only", nargs="+", choices=list(SUITES), default=[], help="suites to run")
    parser.add_argument(
        "--results",
        default=str(RESULTS),
        help=f"directory for {FILE} and the charts (default {RESULTS})",
    )
    parser.add_argument(
        "--draw-only", action="store_true", help=f"only draw the charts from {FILE}"
    )
    parser.add_argument(
        "--baseline",
        type=_checkout,
        metavar="PATH",
        help="a checkout of another commit, with which the suite cpu compares",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args(arguments)


def _integer(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"should be a number from {least:,} to {most:,}")
        return int(text)

    return parse


def _checkout(text: str) -> Path:
    try:
        return tree_of(Path(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"should be from {MIN_SECONDS} to {MAX_SECONDS:,}")
    return seconds


def _read(path: Path) -> dict[str, Any]:
    """Return the earlier results: suites that do not run now keep theirs."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return {kind: found.get(kind, empty) for kind, empty in _EMPTY.items()}


_EMPTY: dict[str, Any] = {"runs": {}, "measurements": [], "curves": []}


def _stamp(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_seconds": round(seconds, 1),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "rows": options.rows,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _write(found: dict[str, Any], path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    new.replace(path)


def _show(found: dict[str, Any], chosen: set[str], console: Console) -> None:
    table = Table(title="ratios; ✓ target met, ✗ target missed")
    for column in ("", "ratio", "min … max", "target", ""):
        table.add_column(column, justify="left" if not column else "right")
    group = None
    for row in found["measurements"]:
        if row["suite"] not in chosen:
            continue
        if row["group"] != group:
            group = row["group"]
            table.add_section()
            table.add_row(f"[bold]{group}[/bold]")
        mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: ""}[row["met"]]
        spread = "" if row["least"] is None else f"{row['least']:.2f} … {row['most']:.2f}"
        cost = row["figures"].get("microseconds")
        name = row["name"] if cost is None else f"{row['name']} ({cost:,.0f} µs)"
        table.add_row(f"  {name}", f"{row['ratio']:.2f}", spread, row["target"], mark)
    if group is not None:
        console.print(table)
    for curve in found["curves"]:
        if curve["suite"] in chosen:
            points = [
                f"{p['rows']:,}: {p['us']:,.0f} µs ({p['ratio']:.2f})" for p in curve["points"]
            ]
            console.print(
                f"[bold]{curve['name']}[/bold] by number of {curve['unit']}: {', '.join(points)}"
            )


if __name__ == "__main__":
    sys.exit(main())
