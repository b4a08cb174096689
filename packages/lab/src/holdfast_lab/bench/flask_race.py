"""A guarded Flask view compared with the bare one, over HTTP, on PostgreSQL."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import asyncpg

from holdfast_lab.bench.races import Contender, free_port, race, ratio, wait_until_up

CREATE = "CREATE TABLE orders (id text PRIMARY KEY, item text NOT NULL, quantity integer NOT NULL)"
THREADS = 16


def postgres(url: str, rounds: int, seconds: float, step: Callable[[], None]) -> dict[str, Any]:
    """Return the ratios of guarded to bare, with SQLAlchemy and with psycopg alone."""
    asyncio.run(_create(url))
    pairs = [
        (Contender("SQLAlchemy, bare", "bare_sqlalchemy", url), None),
        (Contender("SQLAlchemy, guarded", "guarded_sqlalchemy", url), 0),
        (Contender("psycopg, bare", "bare_psycopg", url), None),
        (Contender("psycopg, guarded", "guarded_psycopg", url), 2),
    ]
    contenders = [contender for contender, _ in pairs]
    with _served(contenders):
        race(contenders, rounds, seconds, step)
    results = {}
    for contender, bare in pairs:
        middle, least, most = ratio(contender, contender if bare is None else contenders[bare])
        results[contender.name] = {
            "ratio": round(middle, 3),
            "least": round(least, 3),
            "most": round(most, 3),
            "per_second": round(contender.median, 1),
        }
    return results


async def _create(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(CREATE)
    await connection.close()


@contextmanager
def _served(contenders: list[Contender]) -> Iterator[None]:
    """Start one gunicorn per contender; all stay up, and one at a time is under load."""
    processes = []
    try:
        for contender in contenders:
            contender.port = free_port()
            command = [
                *(sys.executable, "-m", "gunicorn"),
                *("--worker-class", "gthread", "--threads", str(THREADS)),
                *("--bind", f"127.0.0.1:{contender.port}", "--log-level", "warning"),
                f"holdfast_lab.bench.flask_apps:{contender.app}()",
            ]
            environment = {**os.environ, "BENCH_DATABASE": contender.database}
            processes.append(subprocess.Popen(command, env=environment))
        for contender in contenders:
            wait_until_up(contender.port)
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
