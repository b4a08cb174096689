"""psycopg as a driver of the PostgreSQL store: on the event loop, and in threads."""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict

from onceward.ports import Params, Row
from onceward.stores.errors import raise_unstorable, unavailable
from onceward.stores.postgres.driver import NEVER, Deadlines
from onceward.stores.postgres.hosts import (
    COMPARE_SECONDS,
    READ_TIMELINE,
    connect_blocking_to_writable,
    connect_to_writable,
    host_urls,
)
from onceward.stores.postgres.notifier import PostgresNotifier
from onceward.stores.postgres.params import positional, rows_changed
from onceward.stores.postgres.pool import ConnectionPool, PoolTime
from onceward.stores.postgres.session import IDLE_TIMEOUT, STARTUP_PARAMETERS
from onceward.stores.postgres.unit_of_work import PostgresTransaction
from onceward.stores.psycopg.connections import (
    AsyncConnection,
    GuardedAsyncConnection,
    GuardedConnection,
    ThreadConnection,
    ThreadTime,
    execute,
    fetch,
    timeline_of,
)
from onceward.stores.psycopg.messages import ServerLostError, translating_connect_errors
from onceward.stores.psycopg.notifier import SyncPostgresNotifier
from onceward.stores.psycopg.thread_pool import ThreadConnectionPool
from onceward.stores.threads import StoreThreads

T = TypeVar("T")

_ROLLBACK_SECONDS: Final = 5.0
_ALIVE_SECONDS: Final = 10.0
# For notifications that have arrived with a response: psycopg returns them at once.
_PENDING_SECONDS: Final = 0.01
_NAME: Final = "onceward"
_STRINGS: Final = "standard_conforming_strings"
# What a proxy says of a connection with options that it does not pass on.
_REFUSED: Final = re.compile(r"startup parameter|options", re.IGNORECASE)
# Attributes of psycopg's connections. Its public methods only add and remove.
_CALLBACKS: Final = ("_notify_handlers", "_notifies_backlog")


class _Driver:
    errors: tuple[type[Exception], ...] = (psycopg.Error,)
    outages: tuple[type[BaseException], ...] = (OSError, TimeoutError)

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        self._urls = host_urls(url)
        self.deadlines = deadlines
        # Of a proxy in front of PostgreSQL.
        self._refuses_options = False
        self._parameters: dict[str, Any] = {
            "autocommit": True,
            "application_name": _NAME,
            "client_encoding": STARTUP_PARAMETERS["client_encoding"],
        }

    def _limited(self, url: str, *, is_limited: bool) -> dict[str, Any]:
        """Return the parameters of a connection, with the limit of idle transactions."""
        idle = self.deadlines.idle_seconds
        if not is_limited or idle == math.inf or self._refuses_options:
            return self._parameters
        options = self._parameters.get("options", conninfo_to_dict(url).get("options")) or ""
        return self._parameters | {"options": f"{options} -c {IDLE_TIMEOUT}={idle * 1000:.0f}"}

    def _note_refusal(self, error: psycopg.OperationalError) -> None:
        """Raise the error, unless a proxy has refused the options of a connection."""
        if self._refuses_options or not _REFUSED.search(str(error)):
            raise error
        self._refuses_options = True

    def _has_startup_parameters(self, raw: Any) -> bool:
        """Check what libpq has no parameter for; if it is wrong, connections get it as an option.

        Not always as an option: some proxies in front of PostgreSQL refuse connections with one.
        """
        if raw.pgconn.parameter_status(_STRINGS.encode()) == STARTUP_PARAMETERS[_STRINGS].encode():
            return True
        options = raw.info.get_parameters().get("options", "")
        self._parameters["options"] = f"{options} -c {_STRINGS}={STARTUP_PARAMETERS[_STRINGS]}"
        return False

    def raw(self, connection: Any) -> Any:
        return connection.raw

    def restore(self, connection: Any) -> bool:
        """Reset what a handler may set; False if it has left callbacks or notifications."""
        raw = connection.raw
        for name, value in connection.settings.items():
            setattr(raw, name, value)
        own = connection.own_notice_handlers
        return len(raw._notice_handlers) == own and not any(  # noqa: SLF001 - no public way
            getattr(raw, name, None) for name in _CALLBACKS
        )

    def translate_error(self, error: BaseException) -> NoReturn:
        raise unavailable(error) from error

    async def is_notified(
        self, connection: Any, channel: str, notify: Callable[[], Awaitable[None]], seconds: float
    ) -> bool:
        await connection.execute(f"LISTEN {channel}")
        await notify()
        found = await connection.notifications(seconds, stop_after=1)
        if not found:
            await connection.execute("SELECT 1")
            found = await connection.notifications(_PENDING_SECONDS)
        await connection.execute(f"UNLISTEN {channel}")
        return bool(found)


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
        return rows_changed(self._run(execute, sql, params))

    def fetch_all(self, sql: str, params: Params = None) -> Sequence[Row]:
        """Return all rows of a query."""
        return [dict(row) for row in self._run(fetch, sql, params)]

    def fetch_one(self, sql: str, params: Params = None) -> Row | None:
        """Return the first row of a query, or None."""
        rows = self.fetch_all(sql, params)
        return rows[0] if rows else None

    def _run(
        self, run: Callable[[GuardedConnection, str, Sequence[Any]], T], sql: str, params: Params
    ) -> T:
        text, values = positional(sql, params)
        self._statements.used.note_statement(sql)
        try:
            with self._lock:
                return run(self._statements.raw, text, values)
        except ServerLostError as error:
            raise unavailable(error) from error
        except psycopg.Error as error:
            raise_unstorable(error)
            raise


class PsycopgDriver(_Driver):
    """psycopg's ``AsyncConnection``."""

    is_sync = False

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        super().__init__(url, deadlines)
        self.time = PoolTime()

    async def connect(self, *, is_limited: bool = True) -> AsyncConnection:
        is_first = self.deadlines.timelines.is_empty

        async def connect(url: str) -> tuple[int, AsyncConnection]:
            with translating_connect_errors():
                async with asyncio.timeout(self.deadlines.connect_seconds):
                    options = self._limited(url, is_limited=is_limited)
                    try:
                        raw = await GuardedAsyncConnection.connect(url, **options)
                    except psycopg.OperationalError as error:
                        self._note_refusal(error)
                        raw = await GuardedAsyncConnection.connect(url, **self._parameters)
                    if not self._has_startup_parameters(raw):
                        await raw.close()
                        options = self._limited(url, is_limited=is_limited)
                        raw = await GuardedAsyncConnection.connect(url, **options)
                    return await self._prepare(AsyncConnection(raw), is_limited=is_limited)

        wait = COMPARE_SECONDS if is_first else 0.0
        return await connect_to_writable(self._urls, connect, compare_seconds=wait)

    async def _prepare(
        self, connection: AsyncConnection, *, is_limited: bool
    ) -> tuple[int, AsyncConnection]:
        raw = connection.raw
        raw.time = self.time
        if is_limited:
            raw.statement_seconds = self.deadlines.statement_seconds
        if len(self._urls) == 1:
            return 0, connection
        try:
            return self.deadlines.timelines.check(
                await connection.fetchrow(READ_TIMELINE)
            ), connection
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.UndefinedFunction):
            return 0, connection
        except BaseException:
            connection.terminate()
            raise

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

    async def roll_back(self, connection: AsyncConnection, message: str) -> str:
        return await asyncio.wait_for(connection.execute(message), timeout=_ROLLBACK_SECONDS)

    def handler_transaction(self, statements: PostgresTransaction) -> PsycopgTransaction:
        return PsycopgTransaction(statements)

    def notifier(self, run: Callable[[str], Awaitable[Any]], channel: str) -> PostgresNotifier:
        errors = (*self.errors, *self.outages)
        return PostgresNotifier(self.connect, run, listen=_listen, channel=channel, errors=errors)


class PsycopgThreadDriver(_Driver):
    """psycopg's ``Connection``, used in threads."""

    is_sync = True

    time = ThreadTime()

    def __init__(self, url: str, deadlines: Deadlines) -> None:
        super().__init__(url, deadlines)
        self._parameters["connect_timeout"] = math.ceil(deadlines.connect_seconds)
        self._threads = StoreThreads(1, wait_seconds=deadlines.connect_seconds)

    async def connect(self, *, is_limited: bool = True) -> ThreadConnection:
        opened: list[GuardedConnection] = []
        try:
            await self._threads.run(
                lambda: opened.append(self.connect_blocking(is_limited=is_limited))
            )
        except BaseException:
            for connection in opened:  # cancelled meanwhile
                connection.close()
            raise
        return ThreadConnection(opened[0], self._threads)

    def connect_blocking(self, *, is_limited: bool = True) -> GuardedConnection:
        is_first = self.deadlines.timelines.is_empty
        wait = COMPARE_SECONDS if is_first else 0.0
        return connect_blocking_to_writable(
            self._urls,
            lambda url: self._connect_to(url, is_limited=is_limited),
            compare_seconds=wait,
        )

    def _connect_to(self, url: str, *, is_limited: bool) -> tuple[int, GuardedConnection]:
        with translating_connect_errors():
            try:
                raw = GuardedConnection.connect(url, **self._limited(url, is_limited=is_limited))
            except psycopg.OperationalError as error:
                self._note_refusal(error)
                raw = GuardedConnection.connect(url, **self._parameters)
            if not self._has_startup_parameters(raw):
                raw.close()
                raw = GuardedConnection.connect(url, **self._limited(url, is_limited=is_limited))
        timeline = 0
        if len(self._urls) > 1:
            raw.statement_seconds = self.deadlines.connect_seconds
            timeline = timeline_of(raw, self.deadlines.timelines)
        raw.statement_seconds = self.deadlines.statement_seconds if is_limited else NEVER
        return timeline, raw

    def new_pool(
        self,
        limit: int,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> ThreadConnectionPool:
        self._threads = StoreThreads(limit, wait_seconds=math.inf)
        return ThreadConnectionPool(self.connect, self._threads, on_wait, on_connect, on_silence)

    async def roll_back(self, connection: ThreadConnection, message: str) -> str:
        return await connection.execute(message)

    def handler_transaction(self, statements: PostgresTransaction) -> PsycopgSyncTransaction:
        return PsycopgSyncTransaction(statements)

    def notifier(self, _run: Callable[[str], Awaitable[Any]], channel: str) -> SyncPostgresNotifier:
        """Return a notifier that may be called in any thread."""
        return SyncPostgresNotifier(self.connect_blocking, channel=channel)


async def _listen(
    connection: AsyncConnection,
    channel: str,
    receive: Callable[[str], None],
    ready: Callable[[], None],
) -> None:
    """Listen until the connection is lost, then raise."""
    await connection.execute(f"LISTEN {channel}")
    ready()
    while True:
        async for notification in connection.raw.notifies(timeout=_ALIVE_SECONDS):
            receive(notification.payload)
        async with asyncio.timeout(_ALIVE_SECONDS):
            await connection.execute("SELECT 1")
