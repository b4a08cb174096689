"""Growth curves: what one look costs as the tables grow tenfold, and tenfold again."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg

from bench import growth, job_growth, outbox_lines
from bench.world import World
from holdfast.jobs.table import JobTable
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.sqlite import SqliteStore

__all__ = ["CURVES", "Curve"]


@dataclass(frozen=True)
class Curve:
    """How many there were, and the microseconds of one look beside them."""

    name: str
    unit: str
    points: Sequence[tuple[int, float]]

    def as_json(self) -> dict[str, Any]:
        first = self.points[0][1]
        return {
            "name": self.name,
            "unit": self.unit,
            "points": [
                {"rows": rows, "us": round(us, 2), "ratio": round(us / first, 3)}
                for rows, us in self.points
            ],
        }


def sizes(least: int, most: int) -> list[int]:
    """Return tenfold steps."""
    found = [least]
    while found[-1] * 10 <= most:
        found.append(found[-1] * 10)
    return found


def records(world: World) -> list[Curve]:
    """Look-ups of a key that is not there: what every fresh request pays."""
    steps = sizes(10_000, world.rows)
    by_postgres = asyncio.run(_postgres_records(world.database(), steps, world.say))
    by_sqlite = asyncio.run(_sqlite_records(world.new_folder("curve"), steps, world.say))
    return [
        Curve("look-up of a key, PostgreSQL", "records", by_postgres),
        Curve("look-up of a key, SQLite", "records", by_sqlite),
    ]


async def _postgres_records(
    url: str, steps: Sequence[int], say: Callable[[str], None]
) -> list[tuple[int, float]]:
    store = PostgresStore(url, min_connections=1)
    await store.open()
    connection = await asyncpg.connect(url)
    points, there = [], 0
    try:
        for rows in steps:
            say(f"PostgreSQL: {rows:,} records")
            await growth.fill_postgres(connection, rows - there)
            there = rows
            points.append((rows, await growth.lookup_seconds(store) * 1e6))
    finally:
        await connection.close()
        await store.close()
    return points


async def _sqlite_records(
    folder: Path, steps: Sequence[int], say: Callable[[str], None]
) -> list[tuple[int, float]]:
    path = str(folder / "records.db")
    store = SqliteStore(path)
    await store.open()
    points, there = [], 0
    try:
        for rows in steps:
            say(f"SQLite: {rows:,} records")
            await asyncio.to_thread(growth.fill_sqlite, path, rows - there)
            there = rows
            points.append((rows, await growth.lookup_seconds(store) * 1e6))
    finally:
        await store.close()
    return points


def jobs(world: World) -> list[Curve]:
    """Claims of 16 jobs beside finished ones."""

    async def points(url: str) -> list[tuple[int, float]]:
        store = PostgresStore(url, min_connections=1)
        await store.open()
        connection = await asyncpg.connect(url)
        found, there = [], 0
        try:
            for rows in sizes(1_000, min(world.rows, 1_000_000)):
                world.say(f"PostgreSQL: {rows:,} finished jobs")
                await job_growth.fill_finished(connection, rows - there)
                there = rows
                took = [await job_growth.claim_seconds(JobTable(store)) for _ in range(7)]
                found.append((rows, statistics.median(took) * 1e6))
        finally:
            await connection.close()
            await store.close()
        return found

    name = "claim of 16 jobs, PostgreSQL"
    return [Curve(name, "finished jobs", asyncio.run(points(world.database())))]


def queue(world: World) -> list[Curve]:
    """The next entry of a device's queue beside all that wait."""
    folder = world.new_folder("queue")
    points = []
    for rows in sizes(1_000, min(world.rows, 1_000_000)):
        world.say(f"outbox: {rows:,} entries")
        started = time.perf_counter()
        points.append((rows, outbox_lines.claim_us(folder, rows)))
        world.say(f"outbox: {rows:,} entries took {time.perf_counter() - started:.0f} s")
    return [Curve("claim of the next entry, outbox", "queued entries", points)]


CURVES: dict[str, Callable[[World], list[Curve]]] = {
    "records": records,
    "queue": queue,
    "jobs": jobs,
}
