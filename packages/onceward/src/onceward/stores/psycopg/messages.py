"""Several statements in one message on a connection of psycopg 3.

psycopg sends BEGIN, each statement and COMMIT one after the other and waits for each. Without
parameters PostgreSQL takes several statements in one message, so a guarded request has as many
round trips as one without a guard. Also which errors mean that the server is unavailable.
"""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import IsolationLevel, OperationalError
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, TransactionStatus

from onceward.stores.errors import is_outage_state

# Looking an enumeration up takes as long as the rest.
_IDLE: Final = TransactionStatus.IDLE
_FATAL_ERROR: Final = ExecStatus.FATAL_ERROR
_READ_COMMITTED: Final = IsolationLevel.READ_COMMITTED
# libpq reports no SQLSTATE if the server refuses a connection, only its message.
_REFUSED: Final = re.compile(r"FATAL:")
_TRANSIENT: Final = re.compile(
    r"starting up|shutting down|recovery mode|not yet accepting|too many (?:clients|connections)"
    r"|connection slots|terminating connection|conflict with recovery"
)


def begin_statement(raw: Any) -> str | None:
    """Return the BEGIN that psycopg would send on this connection, to share a message with it.

    None inside a transaction, and where a transaction is read-only, deferrable or stricter than
    READ COMMITTED. SQLAlchemy names that level on each connection that was in AUTOCOMMIT mode for a
    while.
    """
    if raw.pgconn.transaction_status != _IDLE or raw.read_only or raw.deferrable:
        return None
    level = raw.isolation_level
    if level is None:
        return "BEGIN"
    return "BEGIN ISOLATION LEVEL READ COMMITTED" if level == _READ_COMMITTED else None


def send(raw: Any, statements: str) -> Any:
    """Run statements in one round trip; return the result of the last. Raises psycopg's errors."""
    with raw.lock:
        return raw.wait(exchange(raw.pgconn, statements.encode()))


def exchange(pgconn: Any, message: bytes) -> Generator[Any, Any, Any]:
    """Send a message and return the last result; for ``wait`` of psycopg's connections."""
    pgconn.send_query(message)
    results = yield from execute(pgconn)
    for result in results:
        if result.status == _FATAL_ERROR:
            raise _error_of(pgconn, result)
    return results[-1]


def _error_of(pgconn: Any, result: Any) -> Exception:
    if pgconn.status == ConnStatus.BAD and not result.error_field(DiagnosticField.SQLSTATE):
        return OperationalError(result.get_error_message())
    return error_from_result(result, encoding="utf-8")


class ServerLostError(ConnectionError):
    """The server is unavailable. The cause is psycopg's error."""


def raise_outage(connection: Any, error: psycopg.Error) -> None:
    """Raise an outage as ``ServerLostError``; return if it is an error of a statement."""
    state = error.sqlstate
    if connection.closed if state is None else is_outage_state(state):
        raise ServerLostError(str(error)) from error


class translating_outages:  # noqa: N801 - used like a function; a generator would cost more
    """Raise outages as ``ServerLostError`` and errors of a statement unchanged."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, psycopg.Error):
            raise_outage(self._connection, error)


def is_refusal(error: OperationalError) -> bool:
    """Check whether the server has refused to connect: no such database, or a wrong password."""
    message = str(error)
    return _REFUSED.search(message) is not None and _TRANSIENT.search(message) is None


@contextmanager
def translating_connect_errors() -> Iterator[None]:
    """Raise ``ServerLostError``, but psycopg's error if the server has refused the connection."""
    try:
        yield
    except OperationalError as error:
        if is_refusal(error):
            raise
        raise ServerLostError(str(error).strip()) from error
