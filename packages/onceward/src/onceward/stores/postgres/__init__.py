"""The PostgreSQL store, with asyncpg by default: for several processes and machines."""

from onceward.stores.postgres.store import PostgresStore

__all__ = ["PostgresStore"]
