"""Lets statements of Holdfast share a message with the BEGIN and COMMIT of SQLAlchemy's sessions.

SQLAlchemy's adapter for asyncpg sends BEGIN, each statement and COMMIT separately. Claim and record
would be two more messages, and each costs about as much as the handler's insert. So the first
message of a guarded transaction is BEGIN and the claim, the last one is the record and COMMIT
(docs/decisions/0021-guard-after-dependencies.md has the numbers).

The adapter keeps its transaction in ``_transaction`` and calls ``commit`` and ``rollback`` of it;
``SharedTransaction`` takes that place, so everything else works as with SQLAlchemy's own. An
adapter that has begun already, has another isolation level or no such attribute gets separate
messages.
"""

from typing import Any, Protocol

from sqlalchemy import Connection
from sqlalchemy.util import await_only

__all__ = ["SharedTransaction", "begin_with"]


class _Guard(Protocol):
    """Decides who may end the transaction; a ``GuardedUnit``."""

    def refuse_connection_commit(self) -> None:
        """Raise if the handler commits the session's connection."""

    def note_connection_rollback(self) -> None:
        """Note a rollback of the connection."""


class SharedTransaction:
    """The transaction of an asyncpg connection, as SQLAlchemy's adapter uses it."""

    __slots__ = ("_driver", "_guard", "last_statement")

    def __init__(self, driver: Any, guard: _Guard) -> None:
        self._driver = driver
        self._guard = guard
        # Sent in one message with COMMIT.
        self.last_statement: str | None = None

    async def commit(self) -> None:
        """Send the last statement and COMMIT. If the statement fails, nothing is committed.

        A commit of the handler is refused, and rolls back.
        """
        last, driver = self.last_statement, self._driver
        try:
            self._guard.refuse_connection_commit()
            await driver.execute("COMMIT" if last is None else f"{last};COMMIT")
        except BaseException:
            # The adapter forgets this transaction, and its connection goes back to the pool.
            try:
                if not driver.is_closed() and driver.is_in_transaction():
                    await driver.execute("ROLLBACK")
            except BaseException:
                driver.terminate()
                raise
            raise

    async def rollback(self) -> None:
        """Send ROLLBACK."""
        self._guard.note_connection_rollback()
        await self._driver.execute("ROLLBACK")


def begin_with(
    connection: Connection, statement: str, guard: _Guard
) -> tuple[SharedTransaction, str] | None:
    """Send BEGIN and a statement in one message; return the transaction and the command tag.

    ``guard`` is asked before each COMMIT, and gets each ROLLBACK of the connection.
    Returns None if this connection cannot do it. Runs in SQLAlchemy's greenlet.
    """
    adapter: Any = connection.connection.dbapi_connection
    if (
        getattr(adapter, "_transaction", adapter) is not None  # begun, or no such attribute
        or getattr(adapter, "isolation_level", adapter) not in (None, "read_committed")
        or adapter.readonly
        or adapter.deferrable
    ):
        return None
    driver = adapter.driver_connection
    shared = SharedTransaction(driver, guard)
    adapter._transaction = shared  # noqa: SLF001 - see the first lines of this module
    if hasattr(adapter, "_started"):  # SQLAlchemy 2.0
        adapter._started = True  # noqa: SLF001
    try:
        return shared, await_only(driver.execute(f"BEGIN;{statement}"))
    except Exception:
        if driver.is_closed():
            # Let SQLAlchemy find out, so that it discards the connections of the same age.
            adapter._transaction = None  # noqa: SLF001
            if hasattr(adapter, "_started"):
                adapter._started = False  # noqa: SLF001
            connection.exec_driver_sql("SELECT 1")
        raise
