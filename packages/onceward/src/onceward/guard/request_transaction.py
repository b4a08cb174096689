"""The transaction of a request before its key is claimed, or of a request that is not guarded."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from onceward.errors import NoTransactionError, StoreUnavailableError
from onceward.guard.execution import Execution, RequestTransaction
from onceward.ports import Params, Row, Store, Transaction, UnitOfWork

_log = logging.getLogger("onceward.request")


def open_transaction(store: Store, sessions: Store | None) -> RequestTransaction:
    """Return the transaction of one request. It takes a connection at its first statement."""
    return Statements(store) if sessions is None else SessionOfRequest(sessions)


class _Begins(Protocol):
    """Begins transactions: a store, or the chunk of a batch."""

    async def begin(self) -> UnitOfWork:
        """Open a transaction without a key."""


class Statements:
    """A transaction with plain SQL. It begins with its first statement."""

    def __init__(self, store: _Begins) -> None:
        self._store = store
        self._unit: UnitOfWork | None = None
        self._guarded: Transaction | None = None
        self._beginning = asyncio.Lock()
        self._has_written = False
        self._is_ended = False

    @property
    def handle(self) -> Transaction:
        return self

    async def execute(self, sql: str, params: Params = None) -> int:
        transaction = await self._transaction()
        self._has_written = True
        return await transaction.execute(sql, params)

    async def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        return await (await self._transaction()).fetch_all(sql, params)

    async def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        return await (await self._transaction()).fetch_one(sql, params)

    async def _transaction(self) -> Transaction:
        if self._guarded is not None:
            return self._guarded
        async with self._beginning:
            if self._is_ended:
                raise NoTransactionError("the transaction of this request has ended")
            if self._unit is None:
                self._unit = await self._store.begin()
            return self._unit.statements

    async def release(self, endpoint: str) -> Mapping[str, Any]:
        """Roll back what dependencies have done: on a replay it must leave no trace."""
        unit, self._unit = self._unit, None
        if unit is not None:
            await unit.rollback()
            if self._has_written:
                _warn(endpoint)
        return {}

    def join(self, execution: Execution) -> None:
        self._guarded = execution.statements

    async def finish(self, *, is_success: bool) -> None:
        self._is_ended = True
        unit, self._unit = self._unit, None
        if unit is not None:
            await (unit.commit(None, None) if is_success else unit.rollback())

    async def close(self) -> None:
        await self.finish(is_success=False)

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        """Return an outage, which the transaction raises as what it is."""
        return error if isinstance(error, StoreUnavailableError) else None


class SessionOfRequest:
    """A session of the app. Outside a guarded handler, the app commits it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._session = store.new_session()

    @property
    def handle(self) -> Any:
        return self._session

    async def release(self, endpoint: str) -> Mapping[str, Any]:
        """End the session's transaction; what it has loaded stays usable in the handler."""
        if not await self._store.release_session(self._session):
            _warn(endpoint)
        return {"session": self._session}

    def join(self, execution: Execution) -> None:
        """Do nothing: the execution uses the same session."""

    async def finish(self, *, is_success: bool) -> None:
        """Do nothing: the app commits."""

    async def close(self) -> None:
        await self._store.close_session(self._session)

    def outage_of(self, error: Exception) -> StoreUnavailableError | None:
        return self._store.outage_of(self._session, error)


def _warn(endpoint: str) -> None:
    _log.warning(
        "a dependency of %s wrote in Onceward's transaction before the key was claimed; this was "
        "rolled back: write in the handler, or commit in the dependency",
        endpoint,
    )
