"""Several statements in one message on a connection of psycopg 3, of Django or SQLAlchemy.

psycopg sends BEGIN, each statement and COMMIT one after the other and waits for each. Without
parameters PostgreSQL takes several statements in one message, so a guarded request has as many
round trips as one without a guard.
"""

from collections.abc import Generator
from typing import Any

__all__ = ["can_begin", "can_send_messages", "send", "send_message"]


def can_send_messages(connection: Any) -> bool:
    """Return whether a transaction of this Django connection can begin with a message."""
    return can_begin(connection.connection)


def can_begin(raw: Any) -> bool:
    """Return whether a transaction of a driver's connection can begin with a message.

    Not with psycopg 2, not inside a transaction, and not where BEGIN needs options.
    """
    pgconn = getattr(raw, "pgconn", None)
    if pgconn is None:
        return False
    from psycopg.pq import TransactionStatus  # noqa: PLC0415 - an optional dependency

    is_idle: bool = pgconn.transaction_status == TransactionStatus.IDLE
    return is_idle and raw.isolation_level is None and not raw.read_only and not raw.deferrable


def send_message(connection: Any, statements: str) -> Any:
    """Run statements in one round trip; return the result of the last. Raises Django's errors."""
    with connection.wrap_database_errors:
        return send(connection.connection, statements)


def send(raw: Any, statements: str) -> Any:
    """Run statements in one round trip; return the result of the last. Raises psycopg's errors."""
    with raw.lock:
        return raw.wait(_exchange(raw.pgconn, statements.encode()))


def _exchange(pgconn: Any, message: bytes) -> Generator[Any, Any, Any]:
    from psycopg import OperationalError, generators  # noqa: PLC0415 - an optional dependency
    from psycopg.errors import error_from_result  # noqa: PLC0415
    from psycopg.pq import ConnStatus, ExecStatus  # noqa: PLC0415

    pgconn.send_query(message)
    results = yield from generators.execute(pgconn)
    for result in results:
        if result.status == ExecStatus.FATAL_ERROR:
            if pgconn.status == ConnStatus.BAD and not result.error_field(_SQLSTATE):
                raise OperationalError(result.get_error_message())
            raise error_from_result(result, encoding="utf-8")
    return results[-1]


# PG_DIAG_SQLSTATE of libpq.
_SQLSTATE = ord("C")
