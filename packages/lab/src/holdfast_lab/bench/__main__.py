"""Every speed line in one go, interleaved, as ratios first."""

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

from holdfast.cli.output import print_error
from holdfast_lab.bench.curves import Curve
from holdfast_lab.bench.lines import Line
from holdfast_lab.bench.parts import PARTS
from holdfast_lab.bench.plots import draw
from holdfast_lab.bench.world import World, a_world

RESULTS = Path("bench") / "results"
FILE = "latest.json"
BAD_INPUT = 2
# Growth begins with a thousand, and its line is drawn at half of what there is in the end.
LEAST_ROWS, MOST_ROWS = 2_000, 1_000_000_000
LEAST_SECONDS, MOST_SECONDS = 0.01, 3_600


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(stderr=options.json)
    results = Path(options.results)
    try:
        results.mkdir(parents=True, exist_ok=True)
        found = _earlier(results / FILE)
        _write(found, results / FILE)
    except OSError as error:
        print_error(f"--results {results}: {error.strerror}: name a folder that can be written")
        return BAD_INPUT
    logging.disable(logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    chosen = [name for name in PARTS if not options.only or name in options.only]
    done: list[str] = []
    written: list[Path] = []
    try:
        for name in _measured(chosen, options, found, console):
            done.append(name)
            # After each part: whoever stops early keeps what there is, in figures and pictures.
            _write(found, results / FILE)
            written = [results / FILE, *draw(found, results)]
    except KeyboardInterrupt:
        kept = ", ".join(done) or "nothing, as no part had ended"
        print_error(f"stopped before the end; kept: {kept}")
    if options.json:
        print(json.dumps(found))
        return 0
    _show(found, set(done), console)
    for path in written:
        console.print(f"written: {path}")
    return 0


def _measured(
    chosen: list[str], options: argparse.Namespace, found: dict[str, Any], console: Console
) -> Iterator[str]:
    """Measure one part after the other, put its figures in place of older ones, and name it."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("benchmark", total=len(chosen))
        name = ""

        def say(what: str) -> None:
            progress.update(task, description=f"{name}: {what}")

        with a_world(options.rounds, options.seconds, options.rows, say) as world:
            for name in chosen:
                say("running")
                started = time.perf_counter()
                for kind, rows in _run(name, world).items():
                    kept = [row for row in found.get(kind, []) if row["of"] != name]
                    found[kind] = kept + [{"of": name, **row} for row in rows]
                found["made"][name] = _stamp(options, time.perf_counter() - started)
                progress.advance(task)
                yield name


def _run(name: str, world: World) -> dict[str, list[dict[str, Any]]]:
    found = PARTS[name](world)
    return {
        "lines": [one.as_json() for one in found if isinstance(one, Line)],
        "curves": [one.as_json() for one in found if isinstance(one, Curve)],
    }


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say it in one line, as every other command does."""
        print_error(f"{message} (try: holdfast bench --help)")
        sys.exit(BAD_INPUT)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = _Parser(prog="holdfast bench", description=__doc__)
    parser.add_argument(
        "--rounds", type=_whole(1, 1_000), default=4, help="interleaved rounds (default 4)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=0.6, help="seconds of each (default 0.6)"
    )
    parser.add_argument(
        "--rows",
        type=_whole(LEAST_ROWS, MOST_ROWS),
        default=10_000_000,
        help="where growth ends (default 10,000,000)",
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="parts to run")
    parser.add_argument(
        "--results",
        default=str(RESULTS),
        help=f"folder for JSON and plots (default {RESULTS}, under the current one)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args(arguments)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"should be a number from {least:,} to {most:,}")
        return int(text)

    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_SECONDS <= seconds <= MOST_SECONDS:  # nor is NaN
        raise argparse.ArgumentTypeError(f"should be from {LEAST_SECONDS} to {MOST_SECONDS:,}")
    return seconds


def _earlier(path: Path) -> dict[str, Any]:
    """Return the last results: parts that are not run now keep their figures."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    return {kind: found.get(kind, empty) for kind, empty in _EMPTY.items()}


_EMPTY: dict[str, Any] = {"made": {}, "lines": [], "curves": []}


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
    table = Table(title="ratios; ✓ as it should be, ✗ not on this machine, this time")
    for column in ("", "ratio", "least … most", "should be", ""):
        table.add_column(column, justify="left" if not column else "right")
    part = None
    for row in found["lines"]:
        if row["of"] not in chosen:
            continue
        if row["part"] != part:
            part = row["part"]
            table.add_section()
            table.add_row(f"[bold]{part}[/bold]")
        mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: ""}[row["met"]]
        spread = "" if row["least"] is None else f"{row['least']:.2f} … {row['most']:.2f}"
        table.add_row(f"  {row['name']}", f"{row['ratio']:.2f}", spread, row["target"], mark)
    if part is not None:
        console.print(table)
    for curve in found["curves"]:
        if curve["of"] in chosen:
            points = [
                f"{p['rows']:,}: {p['us']:,.0f} µs ({p['ratio']:.2f})" for p in curve["points"]
            ]
            console.print(
                f"[bold]{curve['name']}[/bold] beside {curve['unit']}: {', '.join(points)}"
            )


if __name__ == "__main__":
    sys.exit(main())
