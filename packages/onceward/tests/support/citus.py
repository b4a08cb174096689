"""A database of Citus for the tests: only if ``ONCEWARD_TEST_CITUS_URL`` is set.

The URL is that of a database on the coordinator, with the extension and without tables of others.
All tests share it, so they run in one process: ``pytest -k citus`` without ``-n``.
"""

import os
from dataclasses import replace
from typing import Final

import asyncpg

from onceward import open_store
from onceward.cli.database import installed_migrations
from onceward.stores.parts import LIBRARY_PARTS, distribute_store, installed_parts
from onceward.stores.table_names import TableNames
from onceward.stores.tenant_tables import covered_tables
from onceward_protocol.cli.plugins import declared_by_packages

__all__ = ["CITUS_URL", "ON_CITUS", "empty_citus", "functions_for_citus"]

CITUS_URL: Final = os.environ.get("ONCEWARD_TEST_CITUS_URL", "")
# One more parameter for tests of all databases: no test is collected without a server.
ON_CITUS: Final = ("citus",) if CITUS_URL else ()
# The table that is distributed last; a test of migrations replaces it.
IS_DISTRIBUTED: Final = """
SELECT count(*) > 0 FROM pg_dist_partition WHERE logicalrelid = to_regclass('onceward.migrations')
"""
END_OTHERS: Final = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
FILLED_TABLES: Final = """
SELECT quote_ident(schemaname) || '.' || quote_ident(tablename) AS name FROM pg_tables
 WHERE schemaname IN ('public', 'onceward') AND tablename NOT IN ('migrations', 'secret')
"""
# Those of the library on the coordinator stay: console_sessions, for example.
LOCAL_TABLES: Final = """
SELECT quote_ident(tablename) AS name FROM pg_tables
 WHERE schemaname = 'public' AND NOT EXISTS (
       SELECT 1 FROM pg_dist_partition WHERE logicalrelid = to_regclass(quote_ident(tablename)))
"""


async def empty_citus() -> str:
    """Distribute the tables of the library and of all services, if needed; delete all rows."""
    connection = await asyncpg.connect(CITUS_URL)
    try:
        if await connection.fetchval("SELECT to_regclass('onceward.migrations') IS NOT NULL"):
            # A test of migrations may have recorded one that no version knows.
            await connection.execute("DELETE FROM onceward.migrations WHERE number > 999")
        if not await connection.fetchval(IS_DISTRIBUTED):
            await _distribute()
        await connection.execute(END_OTHERS)
        # Each in its own transaction: one for tables of both kinds is refused.
        for table in await connection.fetch(FILLED_TABLES):
            await connection.execute(f"DELETE FROM {table['name']}")
        for table in await connection.fetch(LOCAL_TABLES):  # of tests
            await connection.execute(f"DROP TABLE {table['name']}")
    finally:
        await connection.close()
    return CITUS_URL


def functions_for_citus() -> list[str]:
    """Return the statements that create the functions of distributed tables."""
    names = replace(TableNames.chosen(None, None, is_sqlite=False), is_distributed=True)
    return [sql for part in LIBRARY_PARTS for sql in part.functions(names)]


async def _distribute() -> None:
    store = open_store(CITUS_URL, migration_packages=installed_migrations())
    store.schema.want(*installed_parts().values())
    await store.open()
    try:
        declared = [table for of in declared_by_packages("tenant_tables").values() for table in of]
        covered = await covered_tables(store, declared)
        await distribute_store(store, [(table.name, table.column) for table in covered])
    finally:
        await store.close()
