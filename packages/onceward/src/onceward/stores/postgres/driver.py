"""Port of the PostgreSQL store to a driver. Implemented for asyncpg and for psycopg."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

from onceward.ports import Notifier
from onceward.stores.postgres.hosts import Timelines

# The deadline of a connection on which nothing runs.
NEVER: Final = math.inf


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long the server may be silent, in seconds, before a connection is cut; inf: for ever."""

    connect_seconds: float = 5.0
    claim_seconds: float = 5.0
    statement_seconds: float = 30.0
    commit_seconds: float = 10.0
    # How long a transaction may be between two statements before the server ends it.
    idle_seconds: float = math.inf
    # Shared by all connections of a store.
    timelines: Timelines = field(default_factory=Timelines, compare=False)


class Time(Protocol):
    """A monotonic time for deadlines. It may be behind by a fraction of a second."""

    @property
    def now(self) -> float:
        """Seconds."""


class Connection(Protocol):
    """A connection in autocommit mode: BEGIN and COMMIT are sent as statements.

    It has these methods of asyncpg's connections: ``execute``, ``fetch``, ``fetchrow``,
    ``is_closed``, ``terminate`` and ``close``. Parameters are numbered (``$1``). Without values,
    ``execute`` takes several statements at once, and returns the command tag of the last one.

    A caller that sets ``deadline`` sets it to ``NEVER`` afterwards. Without one, a statement has
    the limit ``statement_seconds``. Past its deadline a connection is cut: closed without a word to
    the server. A cancelled caller cuts it, too. A request to cancel is never sent: it would make
    PostgreSQL report a COMMIT that waits for a standby as a success.
    """

    # When the running statement is cut, by the driver's time.
    deadline: float
    # A warning has arrived that may be about the replication of a commit.
    has_warned: bool
    # It was cut at its deadline.
    was_cut: bool
    # A statement has failed because the server, or the session, is read-only.
    is_read_only: bool
    # The process id of its backend.
    backend: int


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

    def renew(self, *, cut: bool = False) -> None:
        """Close idle connections now, and those in use when they are released.

        With ``cut``, those on which a statement runs are cut now.
        """

    def is_outdated(self, connection: Any) -> bool:
        """Check whether a connection in use was opened before ``renew``."""

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
    def time(self) -> Time:
        """The time of deadlines."""

    # The limits.
    deadlines: Deadlines

    @property
    def outages(self) -> tuple[type[BaseException], ...]:
        """Exceptions that mean an unavailable server."""

    async def connect(self, *, is_limited: bool = True) -> Any:
        """Open a connection to a writable server, which has the methods of ``Connection``.

        Without ``is_limited``, statements may take any time.
        """

    def new_pool(
        self,
        limit: int,
        on_wait: Callable[[float], None] | None = None,
        on_connect: Callable[[Any], Awaitable[None]] | None = None,
        on_silence: Callable[[], None] | None = None,
    ) -> Pool:
        """Return an empty pool, for the running event loop.

        ``on_wait`` gets the seconds of each wait for a free connection, ``on_connect`` each new
        connection before it is used. ``on_silence`` is called while the server does not respond to
        a statement for a second or more, and after a connection was cut.
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
        """Return the transaction for the handler."""

    def translate_error(self, error: BaseException) -> NoReturn:
        """Raise one of ``outages`` as ``StoreUnavailableError``, a programming error unchanged."""

    def notifier(self, run: Callable[[str], Awaitable[Any]], channel: str) -> Notifier:
        """Return a notifier of a channel. ``run`` runs a statement of the store."""

    async def is_notified(
        self,
        connection: Any,
        channel: str,
        notify: Callable[[], Awaitable[None]],
        seconds: float,
    ) -> bool:
        """Listen, call ``notify``, and return whether ``connection`` gets a notification.

        It is idle for up to ``seconds``, and runs one statement afterwards, with which PostgreSQL
        sends what is pending. Stops listening before it returns.
        """


# Makes a driver for a URL.
DriverMaker = Callable[[str, Deadlines], Driver]
