"""Translate errors of a commit, and outages, whatever the driver."""

from typing import Final, NoReturn

from onceward.core.storable_text import UNSTORABLE
from onceward.errors import (
    BodyInvalidError,
    CommitUnknownError,
    LeaseLostError,
    OncewardError,
    StoreUnavailableError,
    SupersededError,
)
from onceward.stores.sqlstates import is_unstorable_state, unstorable_error
from onceward.stores.transaction_control import aborted

__all__ = [
    "SAVEPOINT",
    "is_read_only",
    "refuse_unstorable",
    "statement_error",
    "translate_commit_error",
    "unavailable",
]

_SUPERSEDED_STATE: Final = "HF002"
_LEASE_LOST_STATE: Final = "HF003"
_ABORTED_STATE: Final = "25P02"
_READ_ONLY_STATE: Final = "25006"
# Classes of errors that a statement without data may raise: resources, locks, cancellation, system.
_CLEANING_CLASSES: Final = frozenset({"53", "55", "57", "58", "XX"})

# How a handler with plain SQL writes a savepoint.
SAVEPOINT: Final = "SAVEPOINT a; after the error ROLLBACK TO a"


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Return the error that becomes a response with status 503."""
    reason = str(error) or type(error).__name__
    return StoreUnavailableError(f"PostgreSQL is unavailable: {reason}")


def is_read_only(error: BaseException) -> bool:
    """Check whether a statement failed because the server is a standby, or read-only."""
    return any(
        getattr(each, "sqlstate", None) == _READ_ONLY_STATE for each in (error, error.__cause__)
    )


def statement_error(error: BaseException) -> OncewardError:
    """Return what to raise for an error of one of Onceward's statements, which is no outage."""
    if is_unstorable_state(getattr(error, "sqlstate", None)):
        return BodyInvalidError(UNSTORABLE)
    return StoreUnavailableError(f"PostgreSQL refused a statement: {error}", is_outage=False)


def refuse_unstorable(error: Exception) -> None:
    """Raise ``BodyInvalidError`` if a value of a handler's statement cannot be stored."""
    refused = unstorable_error(error)
    if refused is not None:
        raise refused


def translate_commit_error(
    error: Exception,
    outages: tuple[type[BaseException], ...],
    *,
    is_cleaned: bool,
    is_cut: bool = False,
) -> NoReturn:
    """Raise why a transaction was not committed, or ``CommitUnknownError``.

    With ``is_cleaned``, statements that clean the session were sent after COMMIT. One of them may
    have been cancelled or have found no memory, after the commit. With ``is_cut``, the connection
    was closed at its deadline.
    """
    state = getattr(error, "sqlstate", None)
    if state == _SUPERSEDED_STATE:
        raise SupersededError("another request with this key was committed first") from None
    if state == _LEASE_LOST_STATE:
        raise LeaseLostError("the lease was lost before the commit") from None
    if isinstance(error, outages):
        raise CommitUnknownError(str(error), is_cut=is_cut) from error
    if state == _ABORTED_STATE:
        raise aborted(SAVEPOINT) from error
    if is_unstorable_state(state):
        raise BodyInvalidError(UNSTORABLE) from error
    if is_cleaned and str(state)[:2] in _CLEANING_CLASSES:
        raise CommitUnknownError(str(error)) from error
    raise error
