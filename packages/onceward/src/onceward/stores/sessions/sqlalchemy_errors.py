"""The meaning of SQLAlchemy's errors."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NoReturn

from sqlalchemy import Connection
from sqlalchemy import exc as sa_errors

from onceward.errors import ConfigurationError, StoreUnavailableError
from onceward.stores.errors import (
    REFUSAL_STATES,
    SUPERSEDED_STATE,
    aborted,
    is_outage_state,
    is_sqlite_outage,
    raise_unstorable,
)
from onceward.stores.errors import is_aborted as is_aborted_statement

__all__ = [
    "SUPERSEDED_STATES",
    "driver_error",
    "is_outage",
    "raise_outage",
    "raise_without_statement",
    "refuse_connection",
    "translating_outages",
    "translating_refusals",
]

# Onceward's SQLSTATE, and the one of PostgreSQL if the engine is REPEATABLE READ.
SUPERSEDED_STATES: Final = frozenset({SUPERSEDED_STATE, "40001"})
# SQLAlchemy's code for a session that was rolled back because a flush failed.
_FAILED_FLUSH: Final = "7s2a"
# How a handler writes a savepoint.
_SAVEPOINT: Final = "`session.begin_nested()`"


def refuse_connection(bind: Any) -> None:
    """Raise if sessions are bound to a connection, not to an engine."""
    if isinstance(bind, Connection):
        raise ConfigurationError(
            "the sessions are bound to one Connection, and Onceward would commit the transaction "
            "that was begun on it: bind them to the engine. In tests, do not roll back an outer "
            "transaction, but create a database for each test or delete its rows"
        )


def is_outage(error: BaseException) -> bool:
    """Check whether an error is about the database, not about a statement."""
    if isinstance(error, OSError | sa_errors.TimeoutError | sa_errors.PendingRollbackError):
        return not _is_aborted(error)
    cause: BaseException | None = error
    if isinstance(error, sa_errors.DBAPIError):
        if error.connection_invalidated:
            return True
        cause = error.orig
    if isinstance(cause, sqlite3.OperationalError):
        return is_sqlite_outage(cause) or "no such savepoint: onceward" in str(cause)
    if type(cause).__name__ == "InternalClientError":
        # asyncpg's "cannot switch to state": the server died while the connection was idle.
        return True
    state = getattr(cause, "sqlstate", None)
    if state is None:  # psycopg knows no SQLSTATE if it cannot connect
        return isinstance(error, sa_errors.OperationalError)
    return is_outage_state(state)


def driver_error(error: BaseException) -> BaseException:
    """Return the driver's error of an error of SQLAlchemy, or the error itself.

    SQLAlchemy's contains the statement and its parameters, which may be a caller's secret. Messages
    and causes of outages are logged, so they are made of this one.
    """
    return getattr(error, "orig", None) or error


def raise_without_statement(known: BaseException, error: BaseException) -> NoReturn:
    """Raise ``known`` because of the driver's error of ``error``, without a reference to that."""
    try:
        raise known from driver_error(error)
    finally:
        known.__context__ = None  # Python sets it to SQLAlchemy's error


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Return the client's error for an outage."""
    found = StoreUnavailableError(f"the database is unavailable: {driver_error(error)}")
    found.__cause__ = driver_error(error)
    return found


def _is_aborted(error: BaseException) -> bool:
    """Check whether an earlier statement or flush has failed, and its error was ignored."""
    if isinstance(error, sa_errors.PendingRollbackError):
        return error.code == _FAILED_FLUSH
    return is_aborted_statement(error)


def raise_aborted(error: BaseException) -> None:
    """Raise ``AbortedTransactionError`` if an earlier error was ignored."""
    if _is_aborted(error):
        raise aborted(_SAVEPOINT) from error


def raise_outage(error: Exception) -> None:
    """Raise an outage as ``StoreUnavailableError``; return if it is another error."""
    if is_outage(error):
        raise_without_statement(unavailable(error), error)
    raise_aborted(error)
    raise_unstorable(error)


class translating_outages:  # noqa: N801 - used like a function; a generator would cost more
    """Raise outages as ``StoreUnavailableError`` and other errors unchanged."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise_outage(error)


@contextmanager
def translating_refusals() -> Iterator[None]:
    """Raise ``ConfigurationError`` if the server refuses the first connection for good."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if _is_refusal(cause):
                why = str(getattr(cause, "orig", cause)).strip()
                raise ConfigurationError(f"cannot connect to PostgreSQL: {why}") from error
            cause = cause.__cause__
        raise


def _is_refusal(error: BaseException) -> bool:
    error = getattr(error, "orig", None) or error
    if type(error).__module__.partition(".")[0] == "psycopg":
        from psycopg import OperationalError  # noqa: PLC0415 - psycopg is optional

        from onceward.stores.psycopg.errors import is_refusal  # noqa: PLC0415

        return isinstance(error, OperationalError) and is_refusal(error)
    return getattr(error, "sqlstate", None) in REFUSAL_STATES
