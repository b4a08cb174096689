"""The time from a commit in one process to the start of the handler in another; idle queries."""

import asyncio
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import asyncpg

from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job_store import JobStore
from onceward.jobs.registry import JobRegistry
from onceward.jobs.worker import Worker
from onceward.stores.factory import open_store
from onceward.stores.parts import JOBS

WAKES = 30
IDLE_SECONDS = 5.0


async def work(url: str) -> None:
    """Run the worker; prints the monotonic time, shared by all processes, of each handler start."""
    jobs = JobRegistry()

    @jobs.handler("order.placed")
    async def placed(_job: Any) -> None:
        print(time.monotonic(), flush=True)

    store = open_store(url)
    await store.open()
    worker = Worker(store, jobs)
    await worker.start()
    print("open", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()
    await store.close()


async def measure(
    url: str, *, wakes: int = WAKES, idle_seconds: float = IDLE_SECONDS
) -> dict[str, float]:
    """Measure with a worker in another process."""
    command = [sys.executable, "-m", "onceward_lab.bench.job_wake", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    store = open_store(url)
    store.schema.want(JOBS)
    await store.open()
    try:
        process.stdout.readline()
        found = await _wakes(store, process.stdout, wakes)
        if url.startswith("postgresql"):
            found["idle_statements_per_second"] = await _statements(url, idle_seconds)
    finally:
        await asyncio.to_thread(process.communicate)
        await store.close()
    return found


async def _wakes(store: Any, started: Any, wakes: int) -> dict[str, float]:
    table, notifier = JobStore(store), store.notifier()
    times = []
    for number in range(wakes):
        await asyncio.sleep(random.uniform(0.05, 0.4))  # the worker is idle again
        id_ = f"{time.time_ns()}-{number}"
        cause = Cause("bench", "someone", id_, id_)
        unit = await store.begin()
        await table.enqueue(
            unit.statements, new_job("order.placed", {}, cause=cause, resource_id=id_)
        )
        await unit.commit(None, None)
        committed = time.monotonic()
        notifier.notify()
        times.append(float(await asyncio.to_thread(started.readline)) - committed)
    await notifier.close()
    times.sort()
    return {
        "wake_ms": statistics.median(times) * 1e3,
        "wake_least_ms": times[0] * 1e3,
        "wake_most_ms": times[-1] * 1e3,
    }


async def _statements(url: str, seconds: float) -> float:
    """Return the statements per second of an idle worker; each one is a transaction."""
    server, _, name = url.rpartition("/")
    connection = await asyncpg.connect(f"{server}/postgres")
    count = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"
    try:
        await asyncio.sleep(1.2 * seconds)  # idle backends report their statistics late
        before = await connection.fetchval(count, name)
        await asyncio.sleep(seconds)
        return float(await connection.fetchval(count, name) - before) / seconds
    finally:
        await connection.close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(work(sys.argv[1]))
