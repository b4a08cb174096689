"""The PostgreSQL store, with asyncpg by default: for several processes and machines."""

from holdfast.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
