"""The PostgreSQL store's driver asyncpg."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import asyncpg

from holdfast.stores.postgres.errors import unavailable
from holdfast.stores.postgres.notifier import PostgresNotifier
from holdfast.stores.postgres.pool import ConnectionPool
from holdfast.stores.postgres.session import STARTUP_PARAMETERS
from holdfast.stores.postgres.unit_of_work import PostgresTransaction

__all__ = ["AsyncpgDriver"]

_ROLLBACK_SECONDS: Final = 5.0
_ALIVE_SECONDS: Final = 10.0
# Attributes of asyncpg's connections. Its public methods only add and remove.
_CALLBACKS: Final = (*("_listeners", "_log_listeners", "_termination_listeners", "_query_loggers"),)


class AsyncpgDriver:
    """Connections are asyncpg's own."""

    is_sync = False
    errors: tuple[type[Exception], ...] = (asyncpg.PostgresError,)
    outages: tuple[type[BaseException], ...] = (
        OSError,
        TimeoutError,
        asyncpg.InterfaceError,
        # "cannot switch to state": the server died while the connection was idle.
        asyncpg.InternalClientError,
        asyncpg.PostgresConnectionError,
        asyncpg.CannotConnectNowError,
        asyncpg.AdminShutdownError,
        asyncpg.CrashShutdownError,
        asyncpg.DatabaseDroppedError,
        asyncpg.IdleSessionTimeoutError,
        asyncpg.TooManyConnectionsError,
        asyncpg.ReadOnlySQLTransactionError,
    )

    def __init__(self, url: str, connect_seconds: float) -> None:
        self._url = url
        self._connect_seconds = connect_seconds

    async def connect(self) -> Any:
        """Open a connection."""
        return await asyncpg.connect(
            self._url,
            timeout=self._connect_seconds,
            server_settings={"application_name": "holdfast", **STARTUP_PARAMETERS},
        )

    def new_pool(
        self,
        limit: int,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
    ) -> ConnectionPool:
        """Return an empty pool."""
        return ConnectionPool(self.connect, limit=limit, on_wait=on_wait, on_connect=on_connect)

    async def roll_back(self, connection: Any, message: str) -> str:
        """Send ROLLBACK, and wait at most five seconds."""
        tag: str = await asyncio.wait_for(connection.execute(message), timeout=_ROLLBACK_SECONDS)
        return tag

    def restore(self, connection: Any) -> bool:
        """Return False if a handler has left callbacks, which the next one would trigger."""
        return not any(getattr(connection, name, None) for name in _CALLBACKS)

    def raw(self, connection: Any) -> Any:
        """Return the connection, which is asyncpg's."""
        return connection

    def handler_transaction(self, statements: PostgresTransaction) -> PostgresTransaction:
        """Return the same transaction."""
        return statements

    def translate_error(self, error: BaseException) -> NoReturn:
        """Raise an outage as ``StoreUnavailableError``, and a programming error unchanged.

        asyncpg raises ``InterfaceError`` for both. A value of the wrong type, or two statements at
        once on one connection, would fail again after every retry.
        """
        message = str(error)
        is_mistake = isinstance(error, ValueError) or "another operation is in progress" in message
        if is_mistake and isinstance(error, asyncpg.InterfaceError):
            raise error
        raise unavailable(error) from error

    def notifier(self, run: Callable[[str], Awaitable[Any]], channel: str) -> PostgresNotifier:
        """Return a notifier that uses asyncpg's listeners."""
        return PostgresNotifier(
            self.connect,
            run,
            listen=_listen,
            channel=channel,
            errors=(*self.errors, *self.outages),
        )


async def _listen(
    connection: Any, channel: str, receive: Callable[[str], None], ready: Callable[[], None]
) -> None:
    """Listen until the connection is lost, then raise."""
    lost = asyncio.Event()
    connection.add_termination_listener(lambda _connection: lost.set())
    await connection.add_listener(
        channel, lambda _connection, _process, _channel, payload: receive(payload)
    )
    ready()
    while True:  # until a query fails
        with suppress(TimeoutError):
            await asyncio.wait_for(lost.wait(), _ALIVE_SECONDS)
        await connection.fetchval("SELECT 1", timeout=_ALIVE_SECONDS)
