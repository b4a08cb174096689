"""Which errors of SQLAlchemy mean that the database is unavailable."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sqlalchemy import exc as sa_errors

from holdfast.errors import StoreUnavailableError
from holdfast.stores.sqlite.rows import is_outage as is_sqlite_outage

__all__ = ["SUPERSEDED_STATES", "is_outage", "translating_outages"]

# Holdfast's SQLSTATE, and the one of PostgreSQL if the engine is REPEATABLE READ.
SUPERSEDED_STATES: Final = frozenset({"HF002", "40001"})

# SQLSTATEs: shutdown, starting up, too many connections, a standby; and an aborted transaction.
_OUTAGE_STATES: Final = frozenset({"57P01", "57P02", "57P03", "53300", "25006", "25P02"})


def is_outage(error: BaseException) -> bool:
    """Check whether an error is about the database, not about a statement."""
    if isinstance(error, OSError | sa_errors.TimeoutError | sa_errors.PendingRollbackError):
        return True
    cause: BaseException | None = error
    if isinstance(error, sa_errors.DBAPIError):
        if error.connection_invalidated:
            return True
        cause = error.orig
    if isinstance(cause, sqlite3.OperationalError):
        return is_sqlite_outage(cause) or "no such savepoint: holdfast" in str(cause)
    state = getattr(cause, "sqlstate", None)
    if state is None:  # psycopg knows no SQLSTATE if it cannot connect
        return isinstance(error, sa_errors.OperationalError)
    return state.startswith("08") or state in _OUTAGE_STATES


@contextmanager
def translating_outages() -> Iterator[None]:
    """Raise outages as ``StoreUnavailableError`` and other errors unchanged."""
    try:
        yield
    except Exception as error:
        if is_outage(error):
            raise StoreUnavailableError(f"the database is unavailable: {error}") from error
        raise
