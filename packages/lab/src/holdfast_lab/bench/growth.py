"""Look-up and sweep with millions of records in the table, on both databases.

The table grows in steps, and at each it is compared with an empty one, by turns: that is the curve.
The line is drawn at half of the last step; at the end the sweep is measured.
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

from holdfast.core.idempotency_record import RecordId
from holdfast.ports import Store
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.sqlite import SqliteStore
from holdfast_lab.bench.curves import Point, sizes

ENDPOINT = "POST /orders"
# A tenth of all records is past its time when the sweep begins.
EXPIRED_SHARE = 10
LOOKUPS = 300
ROUNDS = 15
_LONGEST_SWEEP_SECONDS = 5

Say = Callable[[str], None]
Grown = tuple[dict[str, float], list[Point]]
"""Figures beside half of the records and of the sweep, and the look-ups at every step."""

# Without indexes, which are made anew at each step: to keep them up takes about twice as long.
# A hash of the number is as random as a UUID, and ten times as cheap to make.
_POSTGRES_FILL = """
ALTER TABLE idempotency_records DROP CONSTRAINT idempotency_records_pkey;
DROP INDEX idx_idempotency_records_expires_at;
INSERT INTO idempotency_records
SELECT 'tenant-' || n % 1000, '{endpoint}', md5(n::text)::uuid::text,
       repeat('a', 64), repeat('b', 64), 201, convert_to(repeat('x', 80), 'UTF8'),
       '{{"content-type":"application/json"}}'::jsonb, repeat('r', 32), repeat('r', 32), NULL,
       now(), now() + CASE WHEN n % {share} = 0 THEN interval '-1 minute' ELSE interval '1 day' END
  FROM generate_series({first}, {last}) AS n;
ALTER TABLE idempotency_records ADD PRIMARY KEY (tenant, endpoint, idempotency_key);
CREATE INDEX idx_idempotency_records_expires_at ON idempotency_records (expires_at);
"""
# In the order of the index: to put millions of keys into it at random takes several times as long.
_SQLITE_FILL = """
WITH RECURSIVE
count(n) AS (SELECT :first UNION ALL SELECT n + 1 FROM count WHERE n < :last),
sorted AS MATERIALIZED (
    SELECT 'tenant-' || (n % 1000) AS tenant, lower(hex(randomblob(16))) AS key, n
      FROM count ORDER BY 1, 2
)
INSERT INTO idempotency_records
SELECT tenant, :endpoint, key,
       :hash, :hash, 201, zeroblob(80), '{"content-type":"application/json"}', :id, :id, NULL,
       :now, CASE WHEN n % :share = 0 THEN :past ELSE :future END
  FROM sorted
"""


def _quiet(_what: str) -> None:
    """Tell nobody how far it is."""


@dataclass
class _Place:
    """A database that is filled, beside one that stays empty."""

    full: Store
    empty: Store
    fill: Callable[[int, int], Awaitable[None]]
    size: Callable[[], Awaitable[int]]
    found: dict[str, float] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)


async def measure(
    full_url: str, empty_url: str, folder: str, rows: int, say: Say = _quiet
) -> dict[str, Grown]:
    """Measure on PostgreSQL and on SQLite; they are filled at the same time, to save some."""
    connection = await asyncpg.connect(full_url)
    places = {
        "PostgreSQL": _on_postgres(full_url, empty_url, connection),
        "SQLite": _on_sqlite(folder),
    }
    stores = [store for place in places.values() for store in (place.full, place.empty)]
    for store in stores:
        await store.open()
    try:
        await _grow(places.values(), rows, say)
        for name, place in places.items():
            say(f"{name}: sweep")
            place.found["bytes_per_record"] = await place.size() / rows
            place.found |= await _sweep(place.full)
        return {name: (place.found, place.points) for name, place in places.items()}
    finally:
        await connection.close()
        for store in stores:
            await store.close()


async def _grow(places: Collection[_Place], rows: int, say: Say) -> None:
    half, there = rows // 2, 0
    for step in sorted({*sizes(min(10_000, rows), rows), half}):
        say(f"{step:,} records")
        await asyncio.gather(*(place.fill(there + 1, step) for place in places))
        there = step
        for place in places:
            compared = await _compared(place.full, place.empty)
            point = Point(step, compared["lookup_full_us"], compared["lookup_ratio"])
            place.points.append(point)
            if step == half:
                place.found |= {"rows": half, **compared}


def _on_postgres(full_url: str, empty_url: str, connection: Any) -> _Place:
    async def fill(first: int, last: int) -> None:
        await connection.execute("SET maintenance_work_mem = '512MB'")
        of = {"endpoint": ENDPOINT, "share": EXPIRED_SHARE, "first": first, "last": last}
        await connection.execute(_POSTGRES_FILL.format(**of), timeout=900)
        await connection.execute("VACUUM ANALYZE idempotency_records", timeout=900)
        # What is left to write would be written while look-ups are measured.
        await connection.execute("CHECKPOINT", timeout=900)

    async def size() -> int:
        about = "SELECT pg_total_relation_size('idempotency_records')"
        return int(await connection.fetchval(about))

    return _Place(
        PostgresStore(full_url, min_connections=2),
        PostgresStore(empty_url, min_connections=2),
        fill,
        size,
    )


def _on_sqlite(folder: str) -> _Place:
    path = f"{folder}/full.db"
    full = SqliteStore(path)

    async def fill(first: int, last: int) -> None:
        await full.close()
        await asyncio.to_thread(_fill_sqlite, path, first, last)
        await full.open()

    async def size() -> int:
        return await asyncio.to_thread(_bytes_of, path)

    return _Place(full, SqliteStore(f"{folder}/empty.db"), fill, size)


def _fill_sqlite(path: str, first: int, last: int) -> None:
    """Add the records with these numbers. Without a journal, so nobody else has the file open."""
    now = datetime.now(UTC)

    def text(moment: datetime) -> str:
        return moment.isoformat(timespec="microseconds")[:26] + "Z"

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
    """Time single look-ups of keys that are not there: what every fresh request pays."""
    now = datetime.now(UTC)
    times = []
    for number in range(LOOKUPS + 50):
        wanted = RecordId(f"tenant-{number % 1000}", ENDPOINT, str(uuid.uuid4()))
        started = time.perf_counter()
        await store.find(wanted, now)
        times.append(time.perf_counter() - started)
    return times[50:]


async def _compared(full: Store, empty: Store) -> dict[str, float]:
    """Look up in both by turns; the ratio is the median of the rounds' own ratios."""
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
    """Sweep for some seconds while look-ups go on beside it."""
    quiet = await _lookups(store)
    gone = 0
    started = time.perf_counter()
    busy: list[float] = []

    async def look() -> None:
        busy.extend(await _lookups(store))

    metrics = asyncio.create_task(look())
    while True:
        batch = await store.sweep(datetime.now(UTC), 500)
        gone += batch
        if batch == 0 or time.perf_counter() - started > _LONGEST_SWEEP_SECONDS:
            break
    seconds = time.perf_counter() - started
    await metrics
    return {
        "swept_rows": gone,
        "swept_per_second": gone / seconds,
        "lookup_during_sweep_ratio": statistics.median(busy) / statistics.median(quiet),
    }
