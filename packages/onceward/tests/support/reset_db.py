"""Empty a database between tests, which is faster than creating one."""

from typing import Final

__all__ = ["drop_postgres_tables", "empty_postgres"]

_END_OTHERS: Final = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid();"
)
# One message for all tables: a message each would take longer than the statements.
_EMPTY_TABLES: Final = """
DO $$
DECLARE found record;
BEGIN
    FOR found IN SELECT schemaname, tablename FROM pg_tables
        WHERE schemaname IN ('public', 'onceward') AND tablename NOT IN ('migrations', 'secret')
    LOOP
        EXECUTE format('DELETE FROM %I.%I', found.schemaname, found.tablename);
    END LOOP;
END $$;
"""
_DROP_OTHER_TABLES: Final = """
DO $$
DECLARE found name;
BEGIN
    FOR found IN SELECT tablename FROM pg_tables WHERE schemaname = 'public'
    LOOP
        EXECUTE format('DROP TABLE %I CASCADE', found);
    END LOOP;
END $$;
"""
_DROP_SCHEMAS: Final = """
DO $$
DECLARE found name;
BEGIN
    FOR found IN SELECT nspname FROM pg_namespace
        WHERE NOT starts_with(nspname, 'pg_') AND nspname <> 'information_schema'
    LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', found);
    END LOOP;
    EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
END $$;
CREATE SCHEMA public;
GRANT USAGE ON SCHEMA public TO PUBLIC;
"""


async def empty_postgres(url: str, *, keep_tables: bool = True) -> None:
    """Close all other connections and delete all rows; the schema stays.

    Without ``keep_tables`` all tables but Onceward's are dropped.
    """
    others = "" if keep_tables else _DROP_OTHER_TABLES
    import asyncpg  # programs that use SQLite need not import it

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_END_OTHERS + others + _EMPTY_TABLES)
    finally:
        await connection.close()


def drop_postgres_tables(url: str) -> None:
    """Close all other connections and drop all schemas: the database is as new."""
    import psycopg  # this one blocks, so that fixtures without an event loop can use it

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_END_OTHERS + _DROP_SCHEMAS)
