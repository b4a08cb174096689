"""``make bench``: every speed line, interleaved, as ratios first."""

import argparse
import asyncio
import json
import sqlite3
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import fingerprint, growth, job_growth, job_wake, jobs
from bench.races import Contender, race, ratio, served
from holdfast.testing.servers import RealPostgres

CREATE = "CREATE TABLE orders (id text PRIMARY KEY, item text NOT NULL, quantity integer NOT NULL)"
RESULTS = Path(__file__).parent / "results"
PARTS = ("postgres", "sqlite", "fingerprint", "growth", "jobs")
JOB_RACES = {
    "jobs_enqueue_1": "one insert, one job, one commit; 1 connection",
    "jobs_enqueue_8": "one insert, one job, one commit; 8 connections",
    "jobs_worked": "jobs that do nothing, one worker process, completion on the disk",
    "jobs_that_write": "jobs that write one row",
    "jobs_sqlite": "jobs that do nothing, on SQLite",
}


def main() -> None:
    options = _options()
    console = Console()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        if {"postgres", "growth", "jobs"} & set(options.only):
            with RealPostgres() as server:
                if "postgres" in options.only:
                    found["postgres"] = _race_postgres(server.create_database(), options, console)
                if "growth" in options.only:
                    console.print(f"filling PostgreSQL with {options.rows:,} records …")
                    urls = server.create_database(), server.create_database()
                    found["growth_postgres"] = asyncio.run(growth.postgres(*urls, options.rows))
                if "jobs" in options.only:
                    found |= _jobs(server, Path(folder), options, console)
        if "sqlite" in options.only:
            found["sqlite"] = _race_sqlite(Path(folder), options, console)
        if "growth" in options.only:
            console.print(f"filling SQLite with {options.rows:,} records …")
            found["growth_sqlite"] = asyncio.run(growth.sqlite(folder, options.rows))
        if "fingerprint" in options.only:
            found["fingerprint"] = fingerprint.measure()
    _show(found, console)
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / "latest.json"
    # Parts that were not run keep their last figures.
    earlier = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    for part in found.values():
        part["made_at"] = datetime.now(UTC).isoformat(timespec="seconds")
    settings = {"rounds": options.rounds, "seconds": options.seconds}
    stamped = {**earlier, "settings": settings, **found}
    target.write_text(json.dumps(stamped, indent=2) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(stamped))
    else:
        console.print(f"written to {target.relative_to(Path.cwd())}" if target else "")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="interleaved rounds (default 11)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per round (default 2)")
    parser.add_argument("--rows", type=int, default=5_000_000, help="records for the growth part")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to run")
    parser.add_argument("--json", action="store_true", help="print the results as JSON too")
    return parser.parse_args()


def _race_postgres(url: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    async def create() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(CREATE)
        await connection.close()

    asyncio.run(create())
    idemkit = Path(sys.executable).parent / "idemkit"
    subprocess.run([idemkit, "init-pg", url], check=True, capture_output=True)
    contenders = [
        Contender("bare", "bare_postgres", url),
        Contender("bare, pool tuned", "tuned_postgres", url),
        Contender("guarded", "guarded", url),
        Contender("guarded, no audit event", "guarded_without_audit", url),
        Contender("replays from the store", "guarded_without_memory", url, replay=True),
        Contender("replays from memory", "guarded", url, replay=True),
        Contender("idemkit", "idemkit_postgres", url),
        Contender("idemkit, replays", "idemkit_postgres", url, replay=True),
    ]
    return _race("PostgreSQL", contenders, options, console)


def _race_sqlite(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    contenders = [
        Contender("bare", "bare_sqlite", ""),
        Contender("bare, one hop to a thread", "tuned_sqlite", ""),
        Contender("guarded", "guarded", ""),
        Contender("guarded, no audit event", "guarded_without_audit", ""),
        Contender("replays from the store", "guarded_without_memory", "", replay=True),
        Contender("replays from memory", "guarded", "", replay=True),
    ]
    for number, contender in enumerate(contenders):
        path = folder / f"{number}.db"
        with sqlite3.connect(path) as db:
            db.execute(CREATE)
        db.close()
        contender.database = f"sqlite:///{path}"
    return _race("SQLite", contenders, options, console)


def _jobs(
    server: RealPostgres, folder: Path, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("jobs", total=jobs.steps(options.rounds))
        race = {"rounds": options.rounds, "step": lambda: progress.advance(task)}
        found |= jobs.postgres(server, seconds=options.seconds, **race)
        found |= jobs.sqlite(folder, **race)
    url = server.create_database()
    found["jobs_wake_postgres"] = asyncio.run(job_wake.measure(url))
    found["jobs_wake_sqlite"] = asyncio.run(job_wake.measure(f"sqlite:///{folder}/wake.db"))
    console.print(f"claiming beside {job_growth.ROWS:,} other jobs …")
    urls = [server.create_database() for _ in range(3)]
    found["jobs_growth_postgres"] = asyncio.run(job_growth.postgres(urls))
    found["jobs_growth_sqlite"] = asyncio.run(job_growth.sqlite(folder))
    return found


def _race(
    name: str, contenders: list[Contender], options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    total = options.rounds * len(contenders)
    with served(contenders), Progress(console=console, transient=True) as progress:
        task = progress.add_task(name, total=total)
        race(contenders, options.rounds, options.seconds, lambda: progress.advance(task))
    base = contenders[0]
    results = {}
    for contender in contenders:
        middle, least, most = ratio(contender, base)
        results[contender.name] = {
            "ratio": round(middle, 3),
            "ratio_of_medians": round(contender.median / base.median, 3),
            "least": round(least, 3),
            "most": round(most, 3),
            "requests_per_second": round(contender.median, 1),
        }
    return results


def _show(found: dict[str, Any], console: Console) -> None:
    for part, rows in found.items():
        if part in ("postgres", "sqlite"):
            title = f"{part}: one worker, 16 connections, fsync on"
            console.print(_race_table(title, rows, "bare", "requests_per_second"))
        elif part in JOB_RACES:
            console.print(_race_table(JOB_RACES[part], rows, "best peer", "per_second"))
        else:
            table = Table("", part)
            for name, value in rows.items():
                table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
            console.print(table)


def _race_table(title: str, rows: dict[str, Any], base: str, rate: str) -> Table:
    table = Table(title=title)
    columns = ("", f"÷ {base}", "least … most", f"÷ {base} (medians)", rate.replace("_per_", "/"))
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for name, row in rows.items():
        if name == "made_at":
            continue
        table.add_row(
            name,
            f"{row['ratio']:.2f}",
            f"{row['least']:.2f} … {row['most']:.2f}",
            f"{row['ratio_of_medians']:.2f}",
            f"{row[rate]:,.0f}",
        )
    return table


if __name__ == "__main__":
    main()
