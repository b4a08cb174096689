"""PostgreSQL, by asyncpg: for more than one process, and for more than one machine."""

from holdfast.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
