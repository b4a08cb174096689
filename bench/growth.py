"""Look-up and sweep with millions of records in the table, on both databases."""

import asyncio
import sqlite3
import statistics
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg

from holdfast.core.record import RecordId
from holdfast.ports import Store
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.sqlite import SqliteStore

ENDPOINT = "POST /orders"
# A tenth of all records is past its time when the sweep begins.
EXPIRED_SHARE = 10
LOOKUPS = 300
ROUNDS = 15

_POSTGRES_FILL = """
INSERT INTO idempotency_records
SELECT 'tenant-' || n % 1000, $2, gen_random_uuid()::text,
       repeat('a', 64), repeat('b', 64), 201, convert_to(repeat('x', 80), 'UTF8'),
       '{"content-type":"application/json"}'::jsonb, repeat('r', 32), repeat('r', 32), NULL,
       now(), now() + CASE WHEN n % $3 = 0 THEN interval '-1 minute' ELSE interval '1 day' END
  FROM generate_series(1, $1::bigint) AS n
"""
_SQLITE_FILL = """
WITH RECURSIVE count(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM count WHERE n < :rows)
INSERT INTO idempotency_records
SELECT 'tenant-' || (n % 1000), :endpoint, lower(hex(randomblob(16))),
       :hash, :hash, 201, zeroblob(80), '{"content-type":"application/json"}', :id, :id, NULL,
       :now, CASE WHEN n % :share = 0 THEN :past ELSE :future END
  FROM count
"""


async def postgres(full_url: str, empty_url: str, rows: int) -> dict[str, float]:
    """Measure on PostgreSQL: a filled database beside an empty one."""
    full = PostgresStore(full_url, min_connections=2)
    empty = PostgresStore(empty_url, min_connections=2)
    await full.open()
    await empty.open()
    try:
        connection = await asyncpg.connect(full_url)
        await fill_postgres(connection, rows)
        size = await connection.fetchval("SELECT pg_total_relation_size('idempotency_records')")
        await connection.close()
        about = {"rows": rows, "bytes_per_record": size / rows}
        return {**about, **await _compared(full, empty), **await _sweep(full)}
    finally:
        await full.close()
        await empty.close()


async def fill_postgres(connection: Any, rows: int) -> None:
    """Add this many records."""
    for done in range(0, rows, 500_000):
        await connection.execute(
            _POSTGRES_FILL, min(500_000, rows - done), ENDPOINT, EXPIRED_SHARE, timeout=900
        )
    await connection.execute("VACUUM ANALYZE idempotency_records", timeout=900)


async def sqlite(folder: str, rows: int) -> dict[str, float]:
    """Measure on SQLite: a filled file beside an empty one."""
    full, empty = SqliteStore(f"{folder}/full.db"), SqliteStore(f"{folder}/empty.db")
    await full.open()
    await empty.open()
    try:
        await asyncio.to_thread(fill_sqlite, f"{folder}/full.db", rows)
        size = await asyncio.to_thread(_bytes_of, f"{folder}/full.db")
        about = {"rows": rows, "bytes_per_record": size / rows}
        return {**about, **await _compared(full, empty), **await _sweep(full)}
    finally:
        await full.close()
        await empty.close()


def fill_sqlite(path: str, rows: int) -> None:
    """Add this many records."""
    now = datetime.now(UTC)

    def text(moment: datetime) -> str:
        return moment.isoformat(timespec="microseconds")[:26] + "Z"

    values = {
        "rows": rows,
        "endpoint": ENDPOINT,
        "hash": "a" * 64,
        "id": "r" * 32,
        "share": EXPIRED_SHARE,
        "now": text(now),
        "past": text(now - timedelta(minutes=1)),
        "future": text(now + timedelta(days=1)),
    }
    with sqlite3.connect(path, timeout=60) as db:
        db.execute("PRAGMA cache_size=-400000")
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


async def lookup_seconds(store: Store) -> float:
    """Return what one look-up takes: the median of several rounds' medians."""
    return statistics.median([statistics.median(await _lookups(store)) for _ in range(ROUNDS)])


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

    watcher = asyncio.create_task(look())
    while True:
        batch = await store.sweep(datetime.now(UTC), 500)
        gone += batch
        if batch == 0 or time.perf_counter() - started > 20:
            break
    seconds = time.perf_counter() - started
    await watcher
    return {
        "swept_rows": gone,
        "swept_per_second": gone / seconds,
        "lookup_during_sweep_ratio": statistics.median(busy) / statistics.median(quiet),
    }
