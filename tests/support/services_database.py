"""The PostgreSQL database of all services: migrated once, emptied for each test."""

import asyncpg

from holdfast import open_store
from holdfast.services.catalogue import rooms

__all__ = ["empty", "migrate"]


async def migrate(url: str) -> None:
    """Make everyone's tables."""
    store = open_store(url, rooms=rooms())
    await store.open()
    await store.close()


async def empty(url: str) -> None:
    """Empty every table, whatever the test before has left behind."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        tables = await connection.fetch(
            "SELECT quote_ident(tablename) AS name FROM pg_tables WHERE schemaname = 'public'"
            " AND tablename NOT IN ('holdfast_migrations', 'holdfast_secret')"
        )
        await connection.execute(";".join(f"DELETE FROM {table['name']}" for table in tables))
    finally:
        await connection.close()
