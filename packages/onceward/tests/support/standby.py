"""PostgreSQL servers that wait for a standby."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

HANG_SECONDS = 60
WAITING = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
_COMMIT_ANYTHING = "SELECT pg_logical_emit_message(true, 'test', '')"


async def set_standbys(connection: asyncpg.Connection, names: str) -> None:
    """Change ``synchronous_standby_names``, and wait until it is in force."""
    await connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    await connection.execute("SELECT pg_reload_conf()")
    async with asyncio.timeout(HANG_SECONDS):
        while await connection.fetchval("SHOW synchronous_standby_names") != names:
            await asyncio.sleep(0.02)


async def until_commits_wait(url: str, observer: asyncpg.Connection) -> None:
    """Return when a new COMMIT waits for the standby.

    The checkpointer decides it, and may read a new setting later than ``observer`` does.
    """
    probe = await asyncpg.connect(url)
    pid = probe.get_server_pid()
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            commit = asyncio.create_task(probe.fetch(_COMMIT_ANYTHING))
            while not commit.done():
                if pid in [row["pid"] for row in await observer.fetch(WAITING)]:
                    await observer.fetch("SELECT pg_cancel_backend($1)", pid)
                    await commit
                    await probe.close()
                    return
                await asyncio.sleep(0.01)
            await commit


@asynccontextmanager
async def absent_standby(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Make every COMMIT of the server wait for a standby that does not exist.

    After ``set_standbys(connection, "")`` commits wait no more.
    """
    connection = await asyncpg.connect(url)
    try:
        await set_standbys(connection, "absent")
        await until_commits_wait(url, connection)
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
