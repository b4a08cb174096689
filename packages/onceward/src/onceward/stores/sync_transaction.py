"""A ``Transaction`` without ``await``, for handlers that run in a thread."""

from collections.abc import Callable, Sequence
from typing import Any

from onceward.ports import Params, Row, Transaction

__all__ = ["SyncTransaction"]


class SyncTransaction:
    """The statements of a ``Transaction``; each returns when it has run."""

    def __init__(self, wait: Callable[[Any], Any], transaction: Transaction) -> None:
        """``wait`` runs a coroutine to its end and returns its result."""
        self._wait = wait
        self._transaction = transaction

    def execute(self, sql: str, params: Params = None) -> int:
        """Run a statement and return how many rows it changed."""
        changed: int = self._wait(self._transaction.execute(sql, params))
        return changed

    def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        rows: Sequence[Row] = self._wait(self._transaction.fetch_all(sql, params))
        return rows

    def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        row: Row | None = self._wait(self._transaction.fetch_one(sql, params))
        return row
