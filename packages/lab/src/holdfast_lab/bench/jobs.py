"""Jobs against procrastinate, pgqueuer and a bare loop: interleaved rounds, one process each."""

import asyncio
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg

from holdfast.testing.servers import RealPostgres
from holdfast_lab.bench.job_apps import CREATE

JOBS = 3000
# Which contenders the others are measured by: the quickest of them.
PEERS = ("procrastinate", "pgqueuer", "bare")
# Who works one job at a time gets an eighth of the jobs, or most of the run would wait for it.
SLOW = ("procrastinate",)

ENQUEUE = (
    ("Holdfast", "holdfast", 64),
    ("procrastinate", "procrastinate", 64),
    ("pgqueuer", "pgqueuer", 64),
)
WORK = (
    ("Holdfast, 64 at once", "holdfast", 64),
    ("Holdfast, 512 at once", "holdfast", 512),
    ("Holdfast, 512, without marker", "holdfast_without_marker", 512),
    ("procrastinate, 64 at once", "procrastinate", 64),
    ("pgqueuer, batches of 64", "pgqueuer", 64),
    ("pgqueuer, batches of 512", "pgqueuer", 512),
)
WRITE = (
    ("Holdfast, in the job's transaction", "holdfast_writing", 64),
    ("procrastinate, in one of its own", "procrastinate_writing", 64),
    ("pgqueuer, in one of its own", "pgqueuer_writing", 64),
)
SQLITE = (
    ("bare claim and completion", "bare_sqlite", 1),
    ("Holdfast, 64 at once", "holdfast", 64),
    ("Holdfast, each writes a row", "holdfast_writing", 64),
)


@dataclass
class Queue:
    name: str
    app: str
    at_once: int
    process: "subprocess.Popen[str]"
    rates: list[float] = field(default_factory=list)

    def ask(self, order: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


# What a queue is told, by the queue.
Order = Callable[[Queue], str]


def postgres(
    server: RealPostgres,
    *,
    rounds: int,
    seconds: float,
    jobs: int = JOBS,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Race on PostgreSQL: enqueue, work, and work that writes."""

    def database() -> str:
        url = server.create_database()
        asyncio.run(_make_orders(url))
        return url

    found = {}
    with _open(ENQUEUE, database) as queues:
        for connections in (1, 8):
            told = f"enqueue {connections} {seconds}"
            found[f"jobs_enqueue_{connections}"] = _race(queues, _always(told), rounds, step)
    with _open(WORK, database) as queues:
        found["jobs_worked"] = _race(queues, _work(jobs), rounds, step)
    with _open(WRITE, database) as queues:
        found["jobs_that_write"] = _race(queues, _work(jobs // 4), rounds, step)
    return found


def sqlite(
    folder: Path, *, rounds: int, jobs: int = JOBS, step: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Race on SQLite, each in a file of its own."""
    files = iter(range(len(SQLITE)))

    def database() -> str:
        path = folder / f"jobs-{next(files)}.db"
        with sqlite3.connect(path) as db:
            db.execute(CREATE)
        db.close()
        return f"sqlite:///{path}"

    with _open(SQLITE, database) as queues:
        return {"jobs_sqlite": _race(queues, _work(jobs // 4), rounds, step)}


def steps(rounds: int) -> int:
    """Say how often ``step`` is called by both."""
    return rounds * (2 * len(ENQUEUE) + len(WORK) + len(WRITE) + len(SQLITE))


@contextmanager
def _open(
    contenders: Sequence[tuple[str, str, int]], database: Callable[[], str]
) -> Iterator[list[Queue]]:
    queues: list[Queue] = []
    try:
        for name, app, at_once in contenders:
            command = [
                sys.executable,
                "-m",
                "holdfast_lab.bench.job_apps",
                app,
                str(at_once),
                database(),
            ]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            queues.append(Queue(name, app, at_once, process))
            assert process.stdout is not None
            if process.stdout.readline() != "open\n":
                raise RuntimeError(f"{name} did not open")
        yield queues
    finally:
        for queue in queues:
            queue.process.communicate()


def _always(order: str) -> Order:
    return lambda _queue: order


def _work(jobs: int) -> Order:
    return lambda queue: f"work {jobs // 8 if queue.app.startswith(SLOW) else jobs}"


def _race(
    queues: list[Queue], order: Order, rounds: int, step: Callable[[], None]
) -> dict[str, dict[str, float]]:
    for queue in queues:
        queue.rates.clear()
        queue.ask(order(queue))  # connections, caches and prepared statements warm up
    for number in range(rounds):
        # Every other round backwards: whoever runs first after a checkpoint is not always the same.
        for queue in queues if number % 2 == 0 else reversed(queues):
            queue.rates.append(queue.ask(order(queue)))
            step()
    peers = [queue for queue in queues if queue.app.startswith(PEERS)]
    best = max(peers, key=lambda queue: statistics.median(queue.rates))
    return {queue.name: _compared(queue, best) for queue in queues}


def _compared(queue: Queue, best: Queue) -> dict[str, float]:
    ratios = [a / b for a, b in zip(queue.rates, best.rates, strict=True)]
    middle, best_middle = statistics.median(queue.rates), statistics.median(best.rates)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_medians": round(middle / best_middle, 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "per_second": round(middle, 1),
    }


async def _make_orders(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(CREATE)
    await connection.close()
