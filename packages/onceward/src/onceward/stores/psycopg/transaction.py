"""What handlers get as their transaction from the stores on psycopg."""

from collections.abc import Sequence

import psycopg

from onceward.ports import Params, Row
from onceward.stores.errors import raise_unstorable, unavailable
from onceward.stores.postgres.params import positional, rows_changed
from onceward.stores.postgres.unit_of_work import PostgresTransaction
from onceward.stores.psycopg.connections import (
    GuardedAsyncConnection,
    GuardedConnection,
    execute,
    fetch,
)
from onceward.stores.psycopg.errors import ServerLostError

__all__ = ["PsycopgSyncTransaction", "PsycopgTransaction"]


class PsycopgTransaction:
    """The ``Transaction`` of an async handler.

    ``connection`` is psycopg's ``AsyncConnection``, for everything else. It must not be committed
    or rolled back.
    """

    def __init__(self, statements: PostgresTransaction) -> None:
        self._statements = statements

    @property
    def connection(self) -> GuardedAsyncConnection:
        """The connection. Raises ``NoTransactionError`` after the end when it is used."""
        connection: GuardedAsyncConnection = self._statements.connection
        return connection

    async def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        return await self._statements.execute(sql, params)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        return await self._statements.fetch_all(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        return await self._statements.fetch_one(sql, params)


class PsycopgSyncTransaction:
    """The ``Transaction`` of a sync handler: the same methods without ``await``.

    ``connection`` is psycopg's ``Connection``, for everything else. It must not be committed or
    rolled back.
    """

    def __init__(self, statements: PostgresTransaction) -> None:
        self._statements = statements
        self._lock = statements.raw.statement_lock

    @property
    def connection(self) -> GuardedConnection:
        """The connection. Raises ``NoTransactionError`` after the end when it is used."""
        connection: GuardedConnection = self._statements.connection
        return connection

    def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        text, values = positional(sql, params)
        self._statements.used.note_statement(sql)
        try:
            with self._lock:
                return rows_changed(execute(self._statements.raw, text, values))
        except ServerLostError as error:
            raise unavailable(error) from error
        except psycopg.Error as error:
            raise_unstorable(error)
            raise

    def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        text, values = positional(sql, params)
        self._statements.used.note_statement(sql)
        try:
            with self._lock:
                return [dict(row) for row in fetch(self._statements.raw, text, values)]
        except ServerLostError as error:
            raise unavailable(error) from error
        except psycopg.Error as error:
            raise_unstorable(error)
            raise

    def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = self.fetch_all(sql, params)
        return rows[0] if rows else None
