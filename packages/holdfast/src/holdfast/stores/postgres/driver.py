"""What the PostgreSQL store needs of a driver. Implemented for asyncpg and for psycopg."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NoReturn, Protocol

from holdfast.ports import Notifier

__all__ = ["Connection", "Driver", "DriverMaker", "Pool"]


class Connection(Protocol):
    """A connection in autocommit mode: BEGIN and COMMIT are sent as statements.

    Parameters are numbered (``$1``). Without values, ``execute`` takes several statements at once.
    """

    async def execute(self, sql: str, *values: Any) -> str:
        """Run a statement and return the command tag of the last one, such as ``UPDATE 2``."""

    async def fetch(self, sql: str, *values: Any) -> Sequence[Any]:
        """Return rows, which have positions and, by ``dict(row)``, names."""

    async def fetchrow(self, sql: str, *values: Any) -> Any:
        """Return the first row, or None."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Commit what runs inside, or roll it back after an exception."""

    def is_closed(self) -> bool:
        """Return whether it is closed or broken."""

    def terminate(self) -> None:
        """Close at once. What runs on it fails."""

    async def close(self, *, timeout: float) -> None:  # noqa: ASYNC109 - asyncpg's name
        """Close in an orderly way."""


class Pool(Protocol):
    """Lends connections up to a limit."""

    async def fill(self, count: int) -> None:
        """Open connections in advance."""

    def take(self) -> Any:
        """Return a connection that is free now, or None: then use ``acquire``."""

    async def acquire(self, timeout_seconds: float) -> Any:
        """Return an open connection. Raises ``TimeoutError`` if none is free in time."""

    def release(self, connection: Any) -> None:
        """Return a connection."""

    def renew(self) -> None:
        """Close idle connections now, and those in use when they are released."""

    async def close(self, timeout_seconds: float) -> None:
        """Wait for connections in use, then close all."""


class Driver(Protocol):
    """A library that connects to one PostgreSQL database."""

    @property
    def is_sync(self) -> bool:
        """True if handlers use their transaction without ``await``."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Every error that the server reports."""

    @property
    def outages(self) -> tuple[type[BaseException], ...]:
        """What is raised if the server is unavailable."""

    async def connect(self) -> Any:
        """Open a connection, which has the methods of ``Connection``."""

    def new_pool(
        self,
        limit: int,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
    ) -> Pool:
        """Return an empty pool, for the running event loop.

        ``on_wait`` gets the seconds of each wait for a free connection, ``on_connect`` each new
        connection before it is used.
        """

    async def roll_back(self, connection: Any, message: str) -> str:
        """Send a message that begins with ROLLBACK, and return the command tag.

        Raises if it fails or takes more than a few seconds.
        """

    def restore(self, connection: Any) -> bool:
        """Undo what a handler has changed in the connection object; False if it must be closed."""

    def raw(self, connection: Any) -> Any:
        """Return the library's own connection object."""

    def handler_transaction(self, statements: Any) -> Any:
        """Return what a handler gets as its transaction."""

    def translate_error(self, error: BaseException) -> NoReturn:
        """Raise one of ``outages`` as ``StoreUnavailableError``, a programming error unchanged."""

    def notifier(self, run: Callable[[str], Awaitable[Any]], channel: str) -> Notifier:
        """Return a notifier of a channel. ``run`` runs a statement of the store."""


# Makes a driver for a URL, and a limit in seconds for opening a connection.
DriverMaker = Callable[[str, float], Driver]
