"""The PostgreSQL store's driver asyncpg."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, NoReturn

import asyncpg

from onceward.stores.errors import unavailable
from onceward.stores.postgres.driver import NEVER, Deadlines
from onceward.stores.postgres.hosts import (
    COMPARE_SECONDS,
    READ_TIMELINE,
    connect_to_writable,
    host_urls,
)
from onceward.stores.postgres.notifier import PostgresNotifier
from onceward.stores.postgres.pool import ConnectionPool, PoolTime
from onceward.stores.postgres.session import IDLE_TIMEOUT, STARTUP_PARAMETERS
from onceward.stores.postgres.unit_of_work import PostgresTransaction
from onceward.stores.replication import is_replication_warning

_ROLLBACK_SECONDS: Final = 5.0
_ALIVE_SECONDS: Final = 10.0
# Attributes of asyncpg's connections. Its public methods only add and remove.
_CALLBACKS: Final = (*("_listeners", "_log_listeners", "_termination_listeners", "_query_loggers"),)


class _Connection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """Is cut where asyncpg would ask the server to cancel, and notes warnings during COMMIT.

    asyncpg's protocol calls both methods. Public ways cost more: a listener is called in a
    later iteration of the event loop, and a handler that is cancelled may do anything before its
    transaction ends.
    """

    deadline = NEVER
    has_warned = False
    was_cut = False
    is_read_only = False
    backend = 0

    @property
    def _config(self) -> Any:
        """The configuration; without a time limit for a statement that has a deadline.

        asyncpg's timer costs several microseconds for each statement.
        """
        return self._timed if self.deadline is NEVER else self._untimed

    @_config.setter
    def _config(self, config: Any) -> None:
        self._timed = config
        self._untimed = config._replace(command_timeout=None)

    def _cancel_current_command(self, _waiter: Any, _cancel_waiter: Any = None) -> None:
        # Not now: the protocol is about to change its state. Its futures end with the connection.
        self._loop.call_soon(self.terminate)

    async def _execute(self, *arguments: Any, **options: Any) -> Any:
        """Run a statement with parameters.

        asyncpg prepares and binds it in two steps. Cut in between, it fails with an AttributeError.
        """
        try:
            return await super()._execute(*arguments, **options)
        except AttributeError as error:
            if self.is_closed():
                raise asyncpg.InterfaceError("the connection was closed meanwhile") from error
            raise

    def _process_log_message(self, fields: dict[str, str], last_query: str | None) -> None:
        if is_replication_warning(fields.get("V") or fields.get("S"), fields.get("C")):
            self.has_warned = True
        super()._process_log_message(fields, last_query)


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

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        self._urls = host_urls(url)
        self.deadlines = deadlines
        self.time = PoolTime()
        # Of a pooler that passes no such parameter on.
        self._refuses_timeout = False

    async def connect(self, *, is_limited: bool = True) -> Any:
        limit = self.deadlines.statement_seconds
        limit_or_none = limit if is_limited and limit < math.inf else None
        is_first = self.deadlines.timelines.is_empty

        idle = self.deadlines.idle_seconds if is_limited else math.inf

        async def open_one(url: str) -> Any:
            parameters = {"application_name": "onceward", **STARTUP_PARAMETERS}
            if idle < math.inf and not self._refuses_timeout:
                parameters[IDLE_TIMEOUT] = f"{idle * 1000:.0f}"
            return await asyncpg.connect(
                url,
                timeout=self.deadlines.connect_seconds,
                command_timeout=limit_or_none,
                connection_class=_Connection,
                server_settings=parameters,
            )

        async def connect(url: str) -> tuple[int, Any]:
            try:
                connection = await open_one(url)
            except asyncpg.PostgresError as error:
                if IDLE_TIMEOUT not in str(error) or self._refuses_timeout:
                    raise
                self._refuses_timeout = True
                connection = await open_one(url)
            connection.backend = connection.get_server_pid()
            if len(self._urls) == 1:
                return 0, connection
            try:
                async with asyncio.timeout(self.deadlines.connect_seconds):
                    row = await connection.fetchrow(READ_TIMELINE)
                return self.deadlines.timelines.check(row), connection
            except (asyncpg.InsufficientPrivilegeError, asyncpg.UndefinedFunctionError):
                return 0, connection
            except BaseException:
                connection.terminate()
                raise

        wait = COMPARE_SECONDS if is_first else 0.0
        return await connect_to_writable(self._urls, connect, compare_seconds=wait)

    def new_pool(
        self,
        limit: int,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> ConnectionPool:
        return ConnectionPool(
            self.connect,
            limit=limit,
            on_wait=on_wait,
            on_connect=on_connect,
            on_silence=on_silence,
            time=self.time,
        )

    async def roll_back(self, connection: Any, message: str) -> str:
        tag: str = await connection.execute(message, timeout=_ROLLBACK_SECONDS)
        return tag

    def restore(self, connection: Any) -> bool:
        """Return False if a handler has left callbacks, which the next one would trigger."""
        return not any(getattr(connection, name, None) for name in _CALLBACKS)

    def raw(self, connection: Any) -> Any:
        return connection

    def handler_transaction(self, statements: PostgresTransaction) -> PostgresTransaction:
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
        return PostgresNotifier(
            self.connect,
            run,
            listen=_listen,
            channel=channel,
            errors=(*self.errors, *self.outages),
        )

    async def is_notified(
        self,
        connection: Any,
        channel: str,
        notify: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> bool:
        arrived = asyncio.Event()

        def receive(*_: Any) -> None:
            arrived.set()

        await connection.add_listener(channel, receive)
        await notify()
        try:
            async with asyncio.timeout(seconds):
                await arrived.wait()
        except TimeoutError:
            await connection.execute("SELECT 1")
            await asyncio.sleep(0)  # asyncpg calls listeners in the next iteration of the loop
        await connection.remove_listener(channel, receive)
        return arrived.is_set()


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
