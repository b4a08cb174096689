"""Several statements in one message on a connection of psycopg 3, of Django or SQLAlchemy.

psycopg sends BEGIN, each statement and COMMIT one after the other and waits for each. Without
parameters PostgreSQL takes several statements in one message, so a guarded request has as many
round trips as one without a guard.
"""

from collections.abc import Generator
from functools import cache
from typing import Any, Final

__all__ = ["begin_statement", "can_send_messages", "exchange", "send", "send_message"]

# Constants of libpq. psycopg is imported only when it is needed: Django may use another driver.
_TRANSACTION_IDLE: Final = 0
_CONNECTION_BAD: Final = 1
_FATAL_ERROR: Final = 7
_SQLSTATE: Final = ord("C")
# Of psycopg's IsolationLevel.
_READ_COMMITTED: Final = 2


def can_send_messages(connection: Any) -> bool:
    """Return whether a transaction of this Django connection can begin with a message."""
    return begin_statement(connection.connection) == "BEGIN"


def begin_statement(raw: Any) -> str | None:
    """Return the BEGIN that psycopg would send on this connection, to share a message with it.

    None with psycopg 2, inside a transaction, and where a transaction is read-only, deferrable or
    stricter than READ COMMITTED. SQLAlchemy names that level on each connection that was in
    AUTOCOMMIT mode for a while.
    """
    pgconn = getattr(raw, "pgconn", None)
    if pgconn is None or pgconn.transaction_status != _TRANSACTION_IDLE:
        return None
    if raw.read_only or raw.deferrable:
        return None
    level = raw.isolation_level
    if level is None:
        return "BEGIN"
    return "BEGIN ISOLATION LEVEL READ COMMITTED" if level == _READ_COMMITTED else None


def send_message(connection: Any, statements: str) -> Any:
    """Run statements in one round trip; return the result of the last. Raises Django's errors."""
    with connection.wrap_database_errors:
        return send(connection.connection, statements)


def send(raw: Any, statements: str) -> Any:
    """Run statements in one round trip; return the result of the last. Raises psycopg's errors."""
    with raw.lock:
        return raw.wait(exchange(raw.pgconn, statements.encode()))


def exchange(pgconn: Any, message: bytes) -> Generator[Any, Any, Any]:
    """Send a message and return the last result; for ``wait`` of psycopg's connections."""
    pgconn.send_query(message)
    results = yield from _execute()(pgconn)
    for result in results:
        if result.status == _FATAL_ERROR:
            raise _error_of(pgconn, result)
    return results[-1]


@cache
def _execute() -> Any:
    from psycopg.generators import execute  # noqa: PLC0415 - an optional dependency

    return execute


def _error_of(pgconn: Any, result: Any) -> Exception:
    from psycopg import OperationalError  # noqa: PLC0415
    from psycopg.errors import error_from_result  # noqa: PLC0415

    if pgconn.status == _CONNECTION_BAD and not result.error_field(_SQLSTATE):
        return OperationalError(result.get_error_message())
    return error_from_result(result, encoding="utf-8")
