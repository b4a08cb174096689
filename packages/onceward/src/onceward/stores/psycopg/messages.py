"""Several statements in one message on a connection of psycopg 3.

psycopg sends BEGIN, each statement and COMMIT one after the other and waits for each. Without
parameters PostgreSQL takes several statements in one message, so a guarded request has as many
round trips as one without a guard.
"""

from collections.abc import Generator
from typing import Any, Final

from psycopg import IsolationLevel, OperationalError
from psycopg.errors import error_from_result
from psycopg.generators import execute
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, TransactionStatus

__all__ = ["begin_statement", "exchange", "send"]

# Looking an enumeration up takes as long as the rest.
_IDLE: Final = TransactionStatus.IDLE
_FATAL_ERROR: Final = ExecStatus.FATAL_ERROR
_READ_COMMITTED: Final = IsolationLevel.READ_COMMITTED


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
