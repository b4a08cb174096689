"""``holdfast bench``: every speed line in one go, interleaved, as ratios first."""

import argparse
import json
import logging
import os
import platform
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.curves import Curve
from bench.lines import Line
from bench.parts import PARTS
from bench.plots import draw
from bench.world import World, a_world

RESULTS = Path(__file__).parent / "results"
FILE = "latest.json"


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    console = Console(stderr=options.json)
    results = Path(options.results)
    results.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.INFO)
    found = _earlier(results / FILE)
    chosen = [name for name in PARTS if not options.only or name in options.only]
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
                # After each part: whoever stops early keeps what there is.
                _write(found, results / FILE)
    written = draw(found, results)
    if options.json:
        print(json.dumps(found))
        return
    _show(found, set(chosen), console)
    for path in (results / FILE, *written):
        console.print(f"written: {path}")


def _run(name: str, world: World) -> dict[str, list[dict[str, Any]]]:
    found = PARTS[name](world)
    return {
        "lines": [one.as_json() for one in found if isinstance(one, Line)],
        "curves": [one.as_json() for one in found if isinstance(one, Curve)],
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="holdfast bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="interleaved rounds (default 4)")
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds of each (default 0.6)")
    parser.add_argument(
        "--rows", type=int, default=10_000_000, help="where growth ends (default 10,000,000)"
    )
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], help="parts to run")
    parser.add_argument("--results", default=str(RESULTS), help="folder for JSON and plots")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser.parse_args(arguments)


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
