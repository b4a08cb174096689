"""Jobs against their peers: by turns on one PostgreSQL, each in a process of its own."""

import asyncio
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from bench.job_apps import CREATE, HoldfastJobs

RUNNERS = (
    "holdfast",
    "procrastinate",
    "pgqueuer",
    "holdfast_without_marker",
    "holdfast_writing",
    "procrastinate_writing",
    "pgqueuer_writing",
)


class Runner:
    """One queue in a process of its own, told what to do line by line."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.job_apps", name, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def tell(self, order: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} has ended")
        return line


def compare(
    new_database: Callable[[], str], rounds: int, seconds: float, jobs: int, step: Callable[[], Any]
) -> dict[str, Any]:
    """Return medians and the rounds' own ratios to the better of the two peers."""
    runners = [Runner(name, _prepared(new_database())) for name in RUNNERS]
    plain = [r for r in runners if not r.name.endswith(("_writing", "_marker"))]
    try:
        found: dict[str, Any] = {}
        for title, order, chosen in (
            ("enqueue, 1 connection", f"enqueue 1 {seconds}", plain),
            ("enqueue, 8 connections", f"enqueue 8 {seconds}", plain),
            ("work, no-op jobs", f"work {jobs}", runners[:4]),
            ("work, jobs that write a row", f"work {jobs}", runners[4:]),
        ):
            rates: dict[str, list[float]] = {runner.name: [] for runner in chosen}
            for runner in chosen:
                runner.tell(order)  # plans, connections and caches warm up
            for number in range(rounds):
                for runner in chosen if number % 2 == 0 else reversed(chosen):
                    rates[runner.name].append(runner.tell(order))
                    step()
            found[title] = _summary(rates)
        return found
    finally:
        for runner in runners:
            runner.close()


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    ours = next(values for name, values in rates.items() if name in ("holdfast", RUNNERS[4]))
    peers = [v for name, v in rates.items() if name.startswith(("procrastinate", "pgqueuer"))]
    best = [max(pair) for pair in zip(*peers, strict=True)]
    ratios = [mine / theirs for mine, theirs in zip(ours, best, strict=True)]
    return {
        "ratio_to_the_better_peer": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "per_second": {name: round(statistics.median(v), 1) for name, v in rates.items()},
    }


def _prepared(url: str) -> str:
    async def create() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(CREATE)
        await connection.close()

    asyncio.run(create())
    return url


def sqlite(folder: Path, rounds: int, jobs: int) -> dict[str, Any]:
    """Return worked jobs ÷ raw claim-and-complete commits, both with synchronous=FULL."""
    ours, raw = [], []

    async def work(path: Path) -> float:
        queue = HoldfastJobs()
        await queue.open(f"sqlite:///{path}")
        await queue.fill(jobs)
        seconds = await queue.work(jobs)
        await queue.close()
        return jobs / seconds

    for number in range(rounds):
        path = folder / f"jobs-{number}.db"
        with sqlite3.connect(path) as db:
            db.execute(CREATE)
        db.close()
        ours.append(asyncio.run(work(path)))
        raw.append(_raw(folder / f"raw-{number}.db", jobs))
    ratios = [mine / bare for mine, bare in zip(ours, raw, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "jobs_per_second": round(statistics.median(ours), 1),
        "raw_per_second": round(statistics.median(raw), 1),
    }


def _raw(path: Path, jobs: int) -> float:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE q (id INTEGER PRIMARY KEY, state TEXT, payload TEXT)")
    db.execute("CREATE TABLE done (id INTEGER PRIMARY KEY)")
    db.execute("BEGIN")
    db.executemany("INSERT INTO q (state, payload) VALUES ('waiting', ?)", [("x" * 100,)] * jobs)
    db.execute("COMMIT")
    started = time.perf_counter()
    for number in range(1, jobs + 1):
        db.execute("BEGIN IMMEDIATE")
        db.execute("UPDATE q SET state = 'running' WHERE id = ?", (number,))
        db.execute("COMMIT")
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM q WHERE id = ?", (number,))
        db.execute("INSERT INTO done VALUES (?)", (number,))
        db.execute("COMMIT")
    took = time.perf_counter() - started
    db.close()
    return jobs / took


async def growth(url: str, finished: int) -> dict[str, float]:
    """Return how much a million finished jobs slow the claim."""
    queue = HoldfastJobs()
    await queue.open(url)
    try:

        async def claims() -> float:
            await queue.fill_only(2000)
            took = []
            for _ in range(60):
                started = time.perf_counter()
                await queue.table.claim(["default"], worker="w", limit=16, lease_seconds=600)
                took.append(time.perf_counter() - started)
            return statistics.median(took)

        await claims()
        empty = await claims()
        await queue.store.write(
            "INSERT INTO job_completions (tenant, job_id, key, queue, type, payload_hash, attempts,"
            " request_id, correlation_id, enqueued_at) SELECT 'bench', gen_random_uuid(),"
            " 'job:' || n, 'default', 't', 'h', 1, 'r', 'c', now()"
            f" FROM generate_series(1, {finished}) AS n"
        )
        await queue.store.write("VACUUM ANALYZE job_completions")
        await claims()
        full = await claims()
        return {
            "finished": finished,
            "claim_empty_ms": round(empty * 1e3, 3),
            "claim_full_ms": round(full * 1e3, 3),
            "ratio": round(full / empty, 3),
        }
    finally:
        await queue.close()
