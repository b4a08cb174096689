"""Reads of users with a long history: `/sync`, `/walker/energy` and `/api/v1/changes`.

One user has a million rows in each table that grows, the others have one. Every request reads a
page of one entry, at the beginning, in the middle and at the end of the history: the responses have
one size, and only the history differs.
"""

import asyncio
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg

from onceward.sign_in.jwt_auth import mint_token
from onceward_lab.bench.in_process import call, spread
from onceward_services.app import create_app
from onceward_services.settings import load_settings

__all__ = ["ROWS", "measure"]

ROWS = 1_000_000
# Requests for each page in a round; each from another user with one row.
_REQUESTS = 12
_SECRET = "a secret for the benchmark, long enough for HS256"

_AT = {"postgres": "now()", "sqlite": "'2026-03-01T12:00:00.000000Z'"}
_DAY = {
    "postgres": "to_char(date '0001-01-01' + n, 'YYYY-MM-DD')",
    "sqlite": "date('0001-01-01', '+' || n || ' days')",
}
_NUMBERS = {
    "postgres": "FROM generate_series(1, {rows}) AS numbers (n)",
    "sqlite": "FROM (WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers"
    " WHERE n < {rows}) SELECT n FROM numbers) AS numbers",
}
# For each user: its name, the number of its rows, and statements that add them.
_FILL = (
    """
INSERT INTO walkers (tenant, points_banked, energy_balance, allocation_seq, ledger_seq, event_seq,
                     created_at, updated_at)
VALUES ('{user}', 1, 1, 0, {rows}, {rows}, {at}, {at})""",
    """
INSERT INTO walker_events (tenant, seq, type, data, created_at)
SELECT '{user}', n, 'tree.allocated', '{{"nodeIds":["node.even-stride"]}}', {at} {numbers}""",
    """
INSERT INTO energy_ledger (tenant, seq, delta, reason, reference, balance_after, created_at)
SELECT '{user}', n, 1, 'steps', CAST(n AS text), n, {at} {numbers}""",
    """
INSERT INTO step_logs (tenant, day, status, reported_count, source, source_bundle_id, tz,
                       span_start, span_end, reports, streak_length, streak_tier, reported_at)
SELECT '{user}', {day}, 'ACCEPTED', 6000, 'HealthKit', 'com.apple.health', 'UTC', {at}, {at}, 1, 1,
       0, {at} {numbers}""",
    """
INSERT INTO field_counters (tenant, seq, changed_at) VALUES ('{user}', {rows}, {at})""",
    """
INSERT INTO field_items (tenant, kind, id, version, document, seq, created_at, updated_at)
SELECT '{user}', 'activities', 'item-' || n, 1, '{{"title":"an activity"}}', n, {at}, {at}
       {numbers}""",
)


async def measure(url: str, rows: int = ROWS, rounds: int = 20) -> dict[str, dict[str, Any]]:
    """Return, for each read, the time with ``rows`` rows of history ÷ that with one."""
    with tempfile.TemporaryDirectory(prefix="onceward-bench-") as directory:
        settings = load_settings(
            database_url=url,
            jwt_secret=_SECRET,
            home=Path(directory),
            run_jobs=False,
            log_level="CRITICAL",
            walk_rate_limit="0",
            field_rate_limit="0",
        )
        app = create_app(settings, only=["walk", "field"])
        onceward = app.state.onceward
        await onceward.open()  # creates the tables
        await _fill(url, rows)
        try:
            found = {}
            for name, pages in _pages(rows).items():
                ratios, milliseconds = [], []
                for number in range(rounds + 1):
                    short, long = await _round(app, pages)
                    if number:  # the first round warms up connections and prepared statements
                        ratios.append(long / short)
                        milliseconds.append(long * 1e3)
                found[name] = spread(ratios) | {"ms": round(statistics.median(milliseconds), 3)}
            return found
        finally:
            await onceward.close()


def _pages(rows: int) -> dict[str, Sequence[str]]:
    """Return the path for users with one row, then those for the user with many."""
    middle = rows // 2
    return {
        "/sync": [f"/sync?limit=1&after={after}" for after in (0, 0, middle, rows - 1)],
        "/walker/energy": [
            "/walker/energy?limit=1",
            "/walker/energy?limit=1",
            f"/walker/energy?limit=1&after={middle}",
            "/walker/energy?limit=1&after=2",
        ],
        "/api/v1/changes": [
            f"/api/v1/changes?limit=1&after=0-{after}" for after in (0, 0, middle, rows - 1)
        ],
    }


async def _round(app: Any, pages: Sequence[str]) -> tuple[float, float]:
    """Return the median seconds with a short and with a long history, read in turns."""
    times: dict[str, list[float]] = {"short": [], "long": []}
    for number in range(_REQUESTS):
        for page in pages[1:]:
            turns = [("short", pages[0]), ("long", page)]
            for kind, path in turns if number % 2 else reversed(turns):
                user = "long" if kind == "long" else f"short-{number}"
                times[kind].append(await _seconds(app, path, user))
    return statistics.median(times["short"]), statistics.median(times["long"])


async def _seconds(app: Any, path: str, user: str) -> float:
    now = datetime.now(UTC)
    token = mint_token(_SECRET, sub=user, org=None, roles=[], lifetime=timedelta(hours=1), now=now)
    headers = {"authorization": f"Bearer {token}"}
    started = time.perf_counter()
    status, body = await call(app, "GET", path, b"", headers)
    took = time.perf_counter() - started
    if status != 200:
        raise RuntimeError(f"{path}: {status} {body!r}")
    return took


async def _fill(url: str, rows: int) -> None:
    kind = "sqlite" if url.startswith("sqlite:") else "postgres"
    users = {"long": rows} | {f"short-{number}": 1 for number in range(_REQUESTS)}
    statements = [
        sql.format(
            user=user,
            rows=count,
            at=_AT[kind],
            day=_DAY[kind],
            numbers=_NUMBERS[kind].format(rows=count),
        )
        for user, count in users.items()
        for sql in _FILL
    ]
    if kind == "sqlite":
        await asyncio.to_thread(_fill_sqlite, url.removeprefix("sqlite:///"), statements)
        return
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            for statement in statements:
                await connection.execute(statement, timeout=600)
        await connection.execute("VACUUM ANALYZE", timeout=600)
        # Otherwise pending writes would disturb the reads.
        await connection.execute("CHECKPOINT", timeout=600)
    finally:
        await connection.close()


def _fill_sqlite(path: str, statements: Sequence[str]) -> None:
    db = sqlite3.connect(path, timeout=60)
    try:
        with db:
            db.execute("PRAGMA cache_size = -400000")
            for statement in statements:
                db.execute(statement)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
