"""Empty a database between tests, which is faster than creating one."""

__all__ = ["empty_postgres"]


async def empty_postgres(url: str) -> None:
    """Close all connections and delete all rows; the schema stays."""
    import asyncpg  # programs that use SQLite need not import it

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
        tables = await connection.fetch(
            "SELECT quote_ident(tablename) AS name FROM pg_tables WHERE schemaname = 'public'"
            " AND tablename NOT IN ('holdfast_migrations', 'holdfast_secret')"
        )
        for table in tables:
            await connection.execute(f"DELETE FROM {table['name']}")
    finally:
        await connection.close()
