"""Jobs compared with procrastinate, pgqueuer and a bare loop, in interleaved rounds."""

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

from onceward_lab.bench.job_apps import CREATE
from onceward_testing.servers import RealPostgres

JOBS = 3000
# At least this many rounds of jobs that write: each waits for the disk, so ratios vary most.
WRITE_ROUNDS = 9
# The fastest of these is the baseline.
PEERS = ("procrastinate", "pgqueuer", "bare")
# Gets an eighth of the jobs, because it would take most of the run.
SLOW = ("procrastinate",)

ENQUEUE = (
    ("Onceward", "onceward", 64),
    ("procrastinate", "procrastinate", 64),
    ("pgqueuer", "pgqueuer", 64),
)
WORK = (
    ("Onceward, concurrency 64", "onceward", 64),
    ("Onceward, concurrency 512", "onceward", 512),
    ("Onceward, concurrency 512, without marker", "onceward_without_marker", 512),
    ("procrastinate, concurrency 64", "procrastinate", 64),
    ("pgqueuer, batches of 64", "pgqueuer", 64),
    ("pgqueuer, batches of 512", "pgqueuer", 512),
)
WRITE = (
    ("Onceward, in the job's transaction", "onceward_writing", 64),
    ("procrastinate, in a separate transaction", "procrastinate_writing", 64),
    ("pgqueuer, in a separate transaction", "pgqueuer_writing", 64),
)
SQLITE = (
    ("bare claim and completion", "bare_sqlite", 1),
    ("Onceward, concurrency 64", "onceward", 64),
    ("Onceward, each writes a row", "onceward_writing", 64),
)


@dataclass
class Queue:
    name: str
    app: str
    concurrency: int
    process: "subprocess.Popen[str]"
    rates: list[float] = field(default_factory=list)

    def run(self, task: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{task}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


# Returns the task for a queue.
Task = Callable[[Queue], str]


def postgres(
    server: RealPostgres,
    *,
    rounds: int,
    seconds: float,
    jobs: int = JOBS,
    step: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Compare on PostgreSQL: enqueue, no-op jobs, and jobs that write a row."""

    def database() -> str:
        url = server.create_database()
        asyncio.run(_create_orders(url))
        return url

    found = {}
    with _open(ENQUEUE, database) as queues:
        for connections in (1, 8):
            task = f"enqueue {connections} {seconds}"
            found[f"jobs_enqueue_{connections}"] = _race(queues, _always(task), rounds, step)
    with _open(WORK, database) as queues:
        found["jobs_worked"] = _race(queues, _work(jobs), rounds, step)
    with _open(WRITE, database) as queues:
        found["jobs_that_write"] = _race(queues, _work(jobs // 4), max(rounds, WRITE_ROUNDS), step)
    return found


def sqlite(
    directory: Path, *, rounds: int, jobs: int = JOBS, step: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Compare on SQLite, each queue with its own file."""
    files = iter(range(len(SQLITE)))

    def database() -> str:
        path = directory / f"jobs-{next(files)}.db"
        with sqlite3.connect(path) as db:
            db.execute(CREATE)
        db.close()
        return f"sqlite:///{path}"

    with _open(SQLITE, database) as queues:
        return {"jobs_sqlite": _race(queues, _work(jobs // 4), rounds, step)}


def steps(rounds: int) -> int:
    """Return how often ``step`` is called by both functions."""
    others = 2 * len(ENQUEUE) + len(WORK) + len(SQLITE)
    return rounds * others + max(rounds, WRITE_ROUNDS) * len(WRITE)


@contextmanager
def _open(
    contenders: Sequence[tuple[str, str, int]], database: Callable[[], str]
) -> Iterator[list[Queue]]:
    queues: list[Queue] = []
    try:
        for name, app, concurrency in contenders:
            command = [
                sys.executable,
                "-m",
                "onceward_lab.bench.job_apps",
                app,
                str(concurrency),
                database(),
            ]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            queues.append(Queue(name, app, concurrency, process))
            assert process.stdout is not None
            if process.stdout.readline() != "open\n":
                raise RuntimeError(f"{name} did not open")
        yield queues
    finally:
        for queue in queues:
            queue.process.communicate()


def _always(task: str) -> Task:
    return lambda _queue: task


def _work(jobs: int) -> Task:
    return lambda queue: f"work {jobs // 8 if queue.app.startswith(SLOW) else jobs}"


def _race(
    queues: list[Queue], task: Task, rounds: int, step: Callable[[], None]
) -> dict[str, dict[str, float]]:
    for queue in queues:
        queue.rates.clear()
        queue.run(task(queue))  # warms up connections, caches and prepared statements
    for number in range(rounds):
        # Every other round in reverse: not always the same queue runs first after a checkpoint.
        for queue in queues if number % 2 == 0 else reversed(queues):
            queue.rates.append(queue.run(task(queue)))
            step()
    peers = [queue for queue in queues if queue.app.startswith(PEERS)]
    best = max(peers, key=lambda queue: statistics.median(queue.rates))
    return {queue.name: _compare(queue, best) for queue in queues}


def _compare(queue: Queue, best: Queue) -> dict[str, float]:
    ratios = [a / b for a, b in zip(queue.rates, best.rates, strict=True)]
    middle, best_middle = statistics.median(queue.rates), statistics.median(best.rates)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_of_medians": round(middle / best_middle, 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
        "per_second": round(middle, 1),
    }


async def _create_orders(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(CREATE)
    await connection.close()
