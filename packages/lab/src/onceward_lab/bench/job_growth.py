"""Claims with a million finished jobs, and with a million scheduled ones."""

import asyncio
import sqlite3
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg

from onceward.jobs.enqueue import Cause, new_job
from onceward.jobs.job_store import JobStore
from onceward.ports import Store
from onceward.stores.parts import JOBS
from onceward.stores.postgres import PostgresStore
from onceward.stores.sqlite import SqliteStore
from onceward_lab.bench.curves import Point, sizes

ROWS = 1_000_000
ROUNDS = 9
CLAIMS = 20
BATCH = 16

_DONE = "tenant, job_id, key, queue, type, payload_hash, attempts, request_id, correlation_id"
_SCHEDULED = (
    "tenant, id, key, queue, type, payload, payload_hash, max_attempts, actor, request_id,"
    " correlation_id"
)
_POSTGRES = {
    "finished": f"""
        INSERT INTO onceward.job_completions ({_DONE}, enqueued_at)
        SELECT 'tenant-' || n % 1000, gen_random_uuid(), 'job:' || n, 'default', 'order.placed',
               repeat('a', 64), 1, repeat('r', 32), repeat('r', 32), now()
          FROM generate_series(1, $1::bigint) AS n""",
    "scheduled": f"""
        INSERT INTO onceward.jobs ({_SCHEDULED}, visible_at, run_at)
        SELECT 'tenant-' || n % 1000, gen_random_uuid(), 'job:' || n, 'default', 'order.placed',
               '{{}}', repeat('a', 64), 5, 'someone', repeat('r', 32), repeat('r', 32),
               now() + interval '1 day', now() + interval '1 day'
          FROM generate_series(1, $1::bigint) AS n""",
}
_COUNT = "WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < :rows) "
_SQLITE = {
    "finished": f"""{_COUNT}
        INSERT INTO onceward_job_completions ({_DONE}, enqueued_at, completed_at)
        SELECT 'tenant-' || (n % 1000), lower(hex(randomblob(16))), 'job:' || n, 'default',
               'order.placed', :hash, 1, 'r', 'r', :now, :now
          FROM count""",
    "scheduled": f"""{_COUNT}
        INSERT INTO onceward_jobs ({_SCHEDULED}, visible_at, run_at, enqueued_at)
        SELECT 'tenant-' || (n % 1000), lower(hex(randomblob(16))), 'job:' || n, 'default',
               'order.placed', '{{}}', :hash, 5, 'someone', 'r', 'r',
               :now + 86400000, :now + 86400000, :now
          FROM count""",
}


async def postgres(
    urls: Sequence[str], rows: int = ROWS, rounds: int = ROUNDS
) -> tuple[dict[str, float], list[Point]]:
    """Measure on three databases: empty, with finished jobs, with scheduled jobs.

    Returns the comparison, and the claims at a growing number of finished jobs.
    """
    stores = [PostgresStore(url, min_connections=1) for url in urls]
    for store in stores:
        store.schema.want(JOBS)
        await store.open()
    empty, finished, scheduled = [await asyncpg.connect(url) for url in urls]
    points: list[Point] = []
    try:
        filled = 0
        for step in sizes(min(1_000, rows), rows):
            await _fill_postgres(finished, "finished", step - filled)
            await _vacuum(empty)
            filled = step
            points.append(await _point(step, stores[0], stores[1], min(7, rounds)))
        await _fill_postgres(scheduled, "scheduled", rows)
        for connection in (empty, finished):
            await _vacuum(connection)
        return {"rows": rows, **await _compare(stores, rounds)}, points
    finally:
        for connection in (empty, finished, scheduled):
            await connection.close()
        for store in stores:
            await store.close()


async def _fill_postgres(connection: Any, what: str, rows: int) -> None:
    await connection.execute(_POSTGRES[what], rows, timeout=900)
    await _vacuum(connection)


async def _vacuum(connection: Any) -> None:
    """Remove the dead rows of earlier claims, which would slow down one side only."""
    for table in ("onceward.jobs", "onceward.job_completions"):
        await connection.execute(f"VACUUM ANALYZE {table}", timeout=900)


async def sqlite(directory: Path, rows: int = ROWS, rounds: int = ROUNDS) -> dict[str, float]:
    """Measure on three files."""
    paths = [str(directory / f"claims-{state}.db") for state in ("empty", "finished", "scheduled")]
    stores = [SqliteStore(path) for path in paths]
    for store in stores:
        store.schema.want(JOBS)
        await store.open()
    try:
        for path, what in zip(paths[1:], ("finished", "scheduled"), strict=True):
            await asyncio.to_thread(_fill_sqlite, path, _SQLITE[what], rows)
        return {"rows": rows, **await _compare(stores, rounds)}
    finally:
        for store in stores:
            await store.close()


def _fill_sqlite(path: str, statement: str, rows: int) -> None:
    with sqlite3.connect(path, timeout=60) as db:
        db.execute("PRAGMA cache_size=-400000")
        db.execute(statement, {"rows": rows, "hash": "a" * 64, "now": int(time.time() * 1000)})
    db.close()


async def _compare(stores: Sequence[Store], rounds: int) -> dict[str, float]:
    """Claim in all three in turns; a ratio is the median of the rounds."""
    tables = [JobStore(store) for store in stores]
    for table in tables:
        await claim_seconds(table)  # warms up prepared statements and caches
    times = [[await claim_seconds(table) for table in tables] for _ in range(rounds)]
    found = {"claim_empty_ms": statistics.median(empty for empty, _, _ in times) * 1e3}
    for at, what in ((1, "finished"), (2, "scheduled")):
        found[f"claim_{what}_ms"] = statistics.median(row[at] for row in times) * 1e3
        ratios = sorted(row[at] / row[0] for row in times)
        found[f"claim_{what}_ratio"] = statistics.median(ratios)
        found[f"claim_{what}_ratio_least"] = ratios[0]
        found[f"claim_{what}_ratio_most"] = ratios[-1]
    return found


async def _point(rows: int, empty: Store, full: Store, rounds: int) -> Point:
    """Claim in both in turns."""
    times = [
        (await claim_seconds(JobStore(empty)), await claim_seconds(JobStore(full)))
        for _ in range(rounds)
    ]
    return Point(
        rows,
        statistics.median(mine for _, mine in times) * 1e6,
        statistics.median(mine / other for other, mine in times),
    )


async def claim_seconds(table: JobStore) -> float:
    """Enqueue jobs, claim them, and return the median time of a claim."""
    unit = await table.store.begin()
    for number in range(CLAIMS * BATCH):
        id_ = f"{time.time_ns()}-{number}"
        cause = Cause("bench", "someone", id_, id_)
        await table.enqueue(
            unit.statements, new_job("order.placed", {}, cause=cause, resource_id=id_)
        )
    await unit.commit(None, None)
    times = []
    for _ in range(CLAIMS):
        started = time.perf_counter()
        claimed = await table.claim(("default",), worker="w", limit=BATCH, lease_seconds=60)
        times.append(time.perf_counter() - started)
        assert len(claimed) == BATCH
        await table.complete_alone([(job.lease, None) for job in claimed], worker="w")
    return statistics.median(times)
