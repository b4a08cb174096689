"""Several statements in one message on a connection of psycopg 3, of Django or SQLAlchemy.

psycopg sends BEGIN, each statement and COMMIT one after the other and waits for each. Without
parameters PostgreSQL takes several statements in one message, so a guarded request has as many
round trips as one without a guard.
"""

from collections.abc import Generator
from typing import Any, Final

__all__ = ["can_begin", "can_send_messages", "exchange", "send", "send_message"]

# Constants of libpq. psycopg is imported only when it is needed: Django may use another driver.
_TRANSACTION_IDLE: Final = 0
_CONNECTION_BAD: Final = 1
_FATAL_ERROR: Final = 7
_SQLSTATE: Final = ord("C")


def can_send_messages(connection: Any) -> bool:
    """Return whether a transaction of this Django connection can begin with a message."""
    return can_begin(connection.connection)


def can_begin(raw: Any) -> bool:
    """Return whether a transaction of a driver's connection can begin with a message.

    Not with psycopg 2, not inside a transaction, and not where BEGIN needs options.
    """
    pgconn = getattr(raw, "pgconn", None)
    if pgconn is None or pgconn.transaction_status != _TRANSACTION_IDLE:
        return False
    return raw.isolation_level is None and not raw.read_only and not raw.deferrable


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
    from psycopg.generators import execute  # noqa: PLC0415 - an optional dependency

    pgconn.send_query(message)
    results = yield from execute(pgconn)
    for result in results:
        if result.status == _FATAL_ERROR:
            raise _error_of(pgconn, result)
    return results[-1]


def _error_of(pgconn: Any, result: Any) -> Exception:
    from psycopg import OperationalError  # noqa: PLC0415
    from psycopg.errors import error_from_result  # noqa: PLC0415

    if pgconn.status == _CONNECTION_BAD and not result.error_field(_SQLSTATE):
        return OperationalError(result.get_error_message())
    return error_from_result(result, encoding="utf-8")
