"""Translate asyncpg's errors: of the server, of a statement, of a commit."""

from typing import Final, NoReturn

import asyncpg

from holdfast.errors import CommitUnknownError, StoreUnavailableError, SupersededError

__all__ = ["ABORTED", "OUTAGES", "translate_commit_error", "translate_error", "unavailable"]

_SUPERSEDED_STATE: Final = "HF002"

# PostgreSQL rolls an aborted transaction back at COMMIT, without an error.
ABORTED: Final = "a statement failed, the handler went on, and PostgreSQL rolled everything back"


# What asyncpg raises if the server is unavailable.
OUTAGES: Final[tuple[type[BaseException], ...]] = (
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


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Return the error that becomes a response with status 503."""
    reason = str(error) or type(error).__name__
    return StoreUnavailableError(f"PostgreSQL is unavailable: {reason}")


def translate_commit_error(error: asyncpg.PostgresError) -> NoReturn:
    """Raise why a transaction was not committed, or ``CommitUnknownError``."""
    if error.sqlstate == _SUPERSEDED_STATE:
        raise SupersededError("another request with this key was committed first") from None
    if isinstance(error, OUTAGES):
        raise CommitUnknownError(str(error)) from error
    if isinstance(error, asyncpg.InFailedSQLTransactionError):
        raise StoreUnavailableError(ABORTED) from error
    raise error


def translate_error(error: BaseException) -> NoReturn:
    """Raise an outage as ``StoreUnavailableError``, and a programming error unchanged.

    asyncpg raises ``InterfaceError`` for both. A value of the wrong type, or two statements at
    once on one connection, would fail again after every retry.
    """
    is_mistake = isinstance(error, ValueError) or "another operation is in progress" in str(error)
    if is_mistake and isinstance(error, asyncpg.InterfaceError):
        raise error
    raise unavailable(error) from error
