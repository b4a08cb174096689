"""A guarded handler compared with the bare one and with idemkit, over HTTP."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from onceward_lab.bench.races import Contender, compared

CREATE = "CREATE TABLE orders (id text PRIMARY KEY, item text NOT NULL, quantity integer NOT NULL)"


def postgres(url: str, rounds: int, seconds: float, step: Callable[[], None]) -> dict[str, Any]:
    asyncio.run(create_orders(url))
    idemkit = Path(sys.executable).parent / "idemkit"
    subprocess.run([idemkit, "init-pg", url], check=True, capture_output=True)
    contenders = [
        Contender("bare", "bare_postgres", url),
        Contender("bare, pool tuned", "tuned_postgres", url),
        Contender("guarded", "guarded", url),
        Contender("guarded, no audit event", "guarded_without_audit", url),
        Contender("replays from the store", "guarded_without_memory", url, replay=True),
        Contender("replays from memory", "guarded", url, replay=True),
        Contender("idemkit", "idemkit_postgres", url),
        Contender("idemkit, replays", "idemkit_postgres", url, replay=True),
    ]
    return compared(contenders, rounds, seconds, step)


def sqlalchemy(url: str, rounds: int, seconds: float, step: Callable[[], None]) -> dict[str, Any]:
    asyncio.run(create_orders(url))
    contenders = [
        Contender("bare", "bare_sqlalchemy", url),
        Contender("guarded", "guarded_sqlalchemy", url),
        Contender("guarded, claimed late", "guarded_sqlalchemy_after_dependencies", url),
    ]
    return compared(contenders, rounds, seconds, step)


def sqlite(
    directory: Path, rounds: int, seconds: float, step: Callable[[], None]
) -> dict[str, Any]:
    contenders = [
        Contender("bare", "bare_sqlite", ""),
        Contender("bare, one hop to a thread", "tuned_sqlite", ""),
        Contender("guarded", "guarded", ""),
        Contender("guarded, no audit event", "guarded_without_audit", ""),
        Contender("replays from the store", "guarded_without_memory", "", replay=True),
        Contender("replays from memory", "guarded", "", replay=True),
    ]
    for number, contender in enumerate(contenders):
        path = directory / f"{number}.db"
        with sqlite3.connect(path) as db:
            db.execute(CREATE)
        db.close()
        contender.database = f"sqlite:///{path}"
    return compared(contenders, rounds, seconds, step)


async def create_orders(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(CREATE)
    await connection.close()
