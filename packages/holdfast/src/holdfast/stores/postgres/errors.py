"""What goes wrong with PostgreSQL, told apart: the server, the statement, or the commit."""

from typing import Final, NoReturn

import asyncpg

from holdfast.errors import CommitUnknownError, StoreUnavailableError, SupersededError

__all__ = ["OUTAGES", "SPOILT", "raise_not_committed", "raise_told", "unavailable"]

_SUPERSEDED_STATE: Final = "HF002"

# COMMIT undoes such a transaction; to answer as if it had been kept would be a lie.
SPOILT: Final = "a statement failed, the handler went on, and PostgreSQL rolled everything back"


def _outages() -> tuple[type[BaseException], ...]:
    """Return what asyncpg raises when the server, not the statement, is the trouble."""
    return (
        OSError,
        TimeoutError,
        asyncpg.InterfaceError,
        # "cannot switch to state": the server died while the connection was idle.
        asyncpg.InternalClientError,
        asyncpg.PostgresConnectionError,
        asyncpg.CannotConnectNowError,
        asyncpg.AdminShutdownError,
        asyncpg.CrashShutdownError,
        asyncpg.TooManyConnectionsError,
        asyncpg.ReadOnlySQLTransactionError,
    )


OUTAGES: Final = _outages()


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Make the error that is answered with 503."""
    reason = str(error) or type(error).__name__
    return StoreUnavailableError(f"PostgreSQL does not answer: {reason}")


def raise_not_committed(error: asyncpg.PostgresError) -> NoReturn:
    """Raise why a transaction did not commit, or that nobody knows."""
    if error.sqlstate == _SUPERSEDED_STATE:
        raise SupersededError("another request with this key was committed first") from None
    if isinstance(error, OUTAGES):
        raise CommitUnknownError(str(error)) from error
    if isinstance(error, asyncpg.InFailedSQLTransactionError):
        raise StoreUnavailableError(SPOILT) from error
    raise error


def raise_told(error: BaseException) -> NoReturn:
    """Raise an outage as such; what the statement's author got wrong is raised as it came.

    asyncpg says ``InterfaceError`` for both: to a value of the wrong type, or to two statements
    at once on one connection, "try again" would be the wrong answer, for ever.
    """
    is_mistake = isinstance(error, ValueError) or "another operation is in progress" in str(error)
    if is_mistake and isinstance(error, asyncpg.InterfaceError):
        raise error
    raise unavailable(error) from error
