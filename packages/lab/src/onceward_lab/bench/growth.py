"""Look-up and sweep with millions of records, on PostgreSQL and SQLite.

The table grows in steps; at each step look-ups alternate with those in an empty table. The
measurement is taken at half of the last step, the sweep at the end.
"""

import asyncio
import sqlite3
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from onceward.ports import Store
from onceward.records import RecordId
from onceward.stores.postgres import PostgresStore
from onceward.stores.sqlite import SqliteStore
from onceward_lab.bench.curves import Point, sizes

ENDPOINT = "POST /orders"
# One record in ten has expired when the sweep begins.
EXPIRED_SHARE = 10
LOOKUPS = 300
ROUNDS = 15
_MAX_SWEEP_SECONDS = 5

OnStep = Callable[[str], None]
Growth = tuple[dict[str, float], list[Point]]
"""The figures at half size and of the sweep, and the look-ups at every step."""

# Indexes are dropped and rebuilt at each step: updating them takes about twice as long.
# md5 of the number is as random as a UUID, and ten times as fast.
_POSTGRES_FILL = """
ALTER TABLE onceward.idempotency_records DROP CONSTRAINT idempotency_records_pkey;
DROP INDEX onceward.idx_idempotency_records_expires_at;
INSERT INTO onceward.idempotency_records
SELECT 'tenant-' || n % 1000, '{endpoint}', md5(n::text)::uuid::text,
       repeat('a', 64), repeat('b', 64), 201, convert_to(repeat('x', 80), 'UTF8'),
       '{{"content-type":"application/json"}}'::jsonb, repeat('r', 32), repeat('r', 32), NULL,
       now(), now() + CASE WHEN n % {share} = 0 THEN interval '-1 minute' ELSE interval '1 day' END
  FROM generate_series({first}, {last}) AS n;
ALTER TABLE onceward.idempotency_records ADD PRIMARY KEY (tenant, endpoint, idempotency_key);
CREATE INDEX idx_idempotency_records_expires_at
    ON onceward.idempotency_records (expires_at);
"""
# In the order of the index: inserting keys at random takes several times as long.
_SQLITE_FILL = """
WITH RECURSIVE
count(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM count WHERE n < :last),
sorted AS MATERIALIZED (
    SELECT 'tenant-' || (n % 1000) AS tenant, lower(hex(randomblob(16))) AS key, n
      FROM count ORDER BY 1, 2
)
INSERT INTO onceward_idempotency_records
SELECT tenant, :endpoint, key,
       :hash, :hash, 201, zeroblob(80), '{"content-type":"application/json"}', :id, :id, NULL,
       :now, CASE WHEN n % :share = 0 THEN :past ELSE :future END, NULL
  FROM sorted
"""


def _ignore(_step: str) -> None:
    """Do nothing."""


@dataclass
class _Pair:
    """A database that grows, and an empty one to compare with."""

    full: Store
    empty: Store
    fill: Callable[[int, int], Awaitable[None]]
    size: Callable[[], Awaitable[int]]
    found: dict[str, float] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)


async def measure(
    full_url: str, empty_url: str, directory: str, rows: int, on_step: OnStep = _ignore
) -> dict[str, Growth]:
    """Measure on PostgreSQL and SQLite, which are filled at the same time."""
    connection = await asyncpg.connect(full_url)
    pairs = {
        "PostgreSQL": _on_postgres(full_url, empty_url, connection),
        "SQLite": _on_sqlite(directory),
    }
    stores = [store for pair in pairs.values() for store in (pair.full, pair.empty)]
    for store in stores:
        await store.open()
    try:
        await _grow(pairs.values(), rows, on_step)
        for name, pair in pairs.items():
            on_step(f"{name}: sweep")
            pair.found["bytes_per_record"] = await pair.size() / rows
            pair.found |= await _sweep(pair.full)
        return {name: (pair.found, pair.points) for name, pair in pairs.items()}
    finally:
        await connection.close()
        for store in stores:
            await store.close()


async def _grow(pairs: Collection[_Pair], rows: int, on_step: OnStep) -> None:
    half, filled = rows // 2, 0
    for step in sorted({*sizes(min(10_000, rows), rows), half}):
        on_step(f"{step:,} records")
        await asyncio.gather(*(pair.fill(filled + 1, step) for pair in pairs))
        filled = step
        for pair in pairs:
            compared = await _compare(pair.full, pair.empty)
            point = Point(step, compared["lookup_full_us"], compared["lookup_ratio"])
            pair.points.append(point)
            if step == half:
                pair.found |= {"rows": half, **compared}


def _on_postgres(full_url: str, empty_url: str, connection: Any) -> _Pair:
    async def fill(first: int, last: int) -> None:
        await connection.execute("SET maintenance_work_mem = '512MB'")
        of = {"endpoint": ENDPOINT, "share": EXPIRED_SHARE, "first": first, "last": last}
        await connection.execute(_POSTGRES_FILL.format(**of), timeout=900)
        await connection.execute("VACUUM ANALYZE onceward.idempotency_records", timeout=900)
        # Otherwise pending writes would disturb the look-ups.
        await connection.execute("CHECKPOINT", timeout=900)

    async def size() -> int:
        sql = "SELECT pg_total_relation_size('onceward.idempotency_records')"
        return int(await connection.fetchval(sql))

    return _Pair(
        PostgresStore(full_url, min_connections=2),
        PostgresStore(empty_url, min_connections=2),
        fill,
        size,
    )


def _on_sqlite(directory: str) -> _Pair:
    path = f"{directory}/full.db"
    full = SqliteStore(path)

    async def fill(first: int, last: int) -> None:
        await full.close()
        await asyncio.to_thread(_fill_sqlite, path, first, last)
        await full.open()

    async def size() -> int:
        return await asyncio.to_thread(_bytes_of, path)

    return _Pair(full, SqliteStore(f"{directory}/empty.db"), fill, size)


def _fill_sqlite(path: str, first: int, last: int) -> None:
    """Add the records ``first`` to ``last``, without a journal: no other connection may be open."""
    now = datetime.now(UTC)

    def text(at: datetime) -> str:
        return at.isoformat(timespec="microseconds")[:26] + "Z"

    values = {
        "first": first,
        "last": last,
        "endpoint": ENDPOINT,
        "hash": "a" * 64,
        "id": "r" * 32,
        "share": EXPIRED_SHARE,
        "now": text(now),
        "past": text(now - timedelta(minutes=1)),
        "future": text(now + timedelta(days=1)),
    }
    with sqlite3.connect(path, timeout=60) as db:
        for setting in ("cache_size=-400000", "locking_mode=EXCLUSIVE", "journal_mode=OFF"):
            db.execute(f"PRAGMA {setting}")
        db.execute(_SQLITE_FILL, values)
    db.close()


def _bytes_of(path: str) -> int:
    with sqlite3.connect(path) as db:
        (pages,), (each,) = (
            db.execute(f"PRAGMA {what}").fetchone() for what in ("page_count", "page_size")
        )
    db.close()
    return int(pages * each)


async def _lookups(store: Store) -> list[float]:
    """Return the times of look-ups of unknown keys, which every new request needs."""
    now = datetime.now(UTC)
    times = []
    for number in range(LOOKUPS + 50):
        wanted = RecordId(f"tenant-{number % 1000}", ENDPOINT, str(uuid.uuid4()))
        started = time.perf_counter()
        await store.find(wanted, now)
        times.append(time.perf_counter() - started)
    return times[50:]


async def _compare(full: Store, empty: Store) -> dict[str, float]:
    """Look up in both in turns; the result is the median ratio of the rounds."""
    rounds = [
        (statistics.median(await _lookups(full)), statistics.median(await _lookups(empty)))
        for _ in range(ROUNDS)
    ]
    return {
        "lookup_empty_us": statistics.median(e for _, e in rounds) * 1e6,
        "lookup_full_us": statistics.median(f for f, _ in rounds) * 1e6,
        "lookup_ratio": statistics.median(f / e for f, e in rounds),
    }


async def _sweep(store: Store) -> dict[str, float]:
    """Sweep for some seconds during look-ups."""
    quiet = await _lookups(store)
    swept = 0
    started = time.perf_counter()
    busy: list[float] = []

    async def look_up() -> None:
        busy.extend(await _lookups(store))

    looking = asyncio.create_task(look_up())
    while True:
        batch = await store.sweep(datetime.now(UTC), 500)
        swept += batch
        if batch == 0 or time.perf_counter() - started > _MAX_SWEEP_SECONDS:
            break
    seconds = time.perf_counter() - started
    await looking
    return {
        "swept_rows": swept,
        "swept_per_second": swept / seconds,
        "lookup_during_sweep_ratio": statistics.median(busy) / statistics.median(quiet),
    }
