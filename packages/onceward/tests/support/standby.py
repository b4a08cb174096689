"""PostgreSQL servers that wait for a standby."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

HANG_SECONDS = 60
WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


async def set_standbys(connection: asyncpg.Connection, names: str) -> None:
    """Change ``synchronous_standby_names``, and wait until it is in force."""
    await connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    await connection.execute("SELECT pg_reload_conf()")
    async with asyncio.timeout(HANG_SECONDS):
        while await connection.fetchval("SHOW synchronous_standby_names") != names:
            await asyncio.sleep(0.02)
    if names:
        # The checkpointer lets commits wait; it reads new settings before it begins a checkpoint.
        await connection.execute("CHECKPOINT")


@asynccontextmanager
async def absent_standby(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Make every COMMIT of the server wait for a standby that does not exist.

    After ``set_standbys(connection, "")`` commits wait no more.
    """
    connection = await asyncpg.connect(url)
    try:
        await set_standbys(connection, "absent")
        yield connection
    finally:
        if connection.is_closed():  # the server was restarted
            connection = await asyncpg.connect(url)
        await set_standbys(connection, "")
        await connection.close()


async def until_waiting(connection: asyncpg.Connection, count: int = 1) -> list[int]:
    """Return the backends that wait for the standby, as soon as there are so many."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            found = [row["pid"] for row in await connection.fetch(WAITING)]
            if len(found) >= count:
                return found
            await asyncio.sleep(0.02)
