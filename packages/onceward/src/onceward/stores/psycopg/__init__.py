"""The PostgreSQL store with psycopg 3 in place of asyncpg, for async and for sync handlers."""

from onceward_protocol.extras import needs_extra

with needs_extra("psycopg"):
    from onceward.stores.psycopg.drivers import PsycopgSyncTransaction, PsycopgTransaction
    from onceward.stores.psycopg.store import PsycopgStore, PsycopgSyncStore

__all__ = ["PsycopgStore", "PsycopgSyncStore", "PsycopgSyncTransaction", "PsycopgTransaction"]
