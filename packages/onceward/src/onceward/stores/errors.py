"""The meaning of database errors, whatever the driver: one table of PostgreSQL's SQLSTATEs."""

import sqlite3
from collections.abc import Iterator
from typing import Final, NoReturn

from onceward.errors import (
    AbortedTransactionError,
    BodyInvalidError,
    CommitUnknownError,
    LeaseLostError,
    OncewardError,
    StoreUnavailableError,
    SupersededError,
    TransactionConflictError,
)
from onceward.stores.rows import UNSTORABLE

# Of Onceward's functions.
SUPERSEDED_STATE: Final = "HF002"
_LEASE_LOST_STATE: Final = "HF003"
# A statement in a transaction in which another one has failed.
_ABORTED_STATE: Final = "25P02"
# A write on a standby, or on a primary that was made one.
_READ_ONLY_STATE: Final = "25006"
# Shutdown, crash, starting up, database dropped, idle session; too many connections; a standby.
# Class 08 are connection errors. Everything else is about one statement: a conflict, a timeout, a
# value, a missing table.
_OUTAGE_STATES: Final = frozenset(
    {"25P03", "57P01", "57P02", "57P03", "57P04", "57P05", "53300", _READ_ONLY_STATE},
)
# The connection was lost, or the server is stopping.
LOST_STATES: Final = ("08", "57P", "25P03")
# Insufficient privilege, undefined function, feature not supported.
DENIED_STATES: Final = frozenset({"42501", "42883", "0A000"})
# Undefined table or schema: not migrated yet, or just being restored.
NO_TABLE_STATES: Final = frozenset({"42P01", "3F000"})
# No such database, no such user, a wrong password.
REFUSAL_STATES: Final = frozenset({"3D000", "28000", "28P01"})
# A character that does not exist in the database's encoding, and \u0000 in jsonb.
_UNSTORABLE_STATES: Final = frozenset({"22021", "22P05"})
# Classes of errors after which a COMMIT may have happened: connection, operator, system.
_UNKNOWN_CLASSES: Final = frozenset({"08", "57", "58", "XX"})
# Classes of errors that a statement without data may raise: resources, locks, cancellation, system.
_CLEANING_CLASSES: Final = frozenset({"53", "55", "57", "58", "XX"})

# Serialization failure, deadlock.
_CONFLICT_STATES: Final = frozenset({"40001", "40P01"})
# Resources (a full disk, no memory), cancelled, a lock that was not free in time, system errors:
# the same statement may succeed later.
_PASSING_STATES: Final = ("53", "57014", "55P03", "58")

# psycopg refuses NUL by itself, without a SQLSTATE.
_REFUSED_BY_PSYCOPG: Final = "NUL (0x00)"

SUPERSEDED: Final = "another request with this key was committed first"
# How a handler with plain SQL writes a savepoint.
_SAVEPOINT: Final = "SAVEPOINT a; after the error ROLLBACK TO a"


def _errors_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the driver's: SQLAlchemy has it in ``orig``, Django in ``__cause__``."""
    yield error
    for other in (getattr(error, "orig", None), error.__cause__):
        if other is not None:
            yield other


def state_of(error: BaseException) -> str:
    """Return the SQLSTATE of an error of any driver, SQLAlchemy or Django; empty without one."""
    for each in _errors_of(error):
        state = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if state:
            return str(state)
    return ""


def is_outage_state(state: str) -> bool:
    """Check whether the server cannot serve anyone now."""
    return state.startswith("08") or state in _OUTAGE_STATES


def is_read_only(error: BaseException) -> bool:
    """Check whether a statement failed because the server is a standby, or read-only."""
    return state_of(error) == _READ_ONLY_STATE


def is_aborted(error: BaseException) -> bool:
    """Check whether a statement failed because an earlier one has, and its error was ignored."""
    return state_of(error) == _ABORTED_STATE


def is_denied(error: BaseException) -> bool:
    """Check whether a driver raised ``error`` for a statement that the role may not run."""
    return state_of(error) == "42501"


def is_unknown_commit(error: BaseException) -> bool:
    """Check whether a COMMIT that has failed with a SQLSTATE may have happened."""
    return state_of(error)[:2] in _UNKNOWN_CLASSES


def unavailable(error: BaseException) -> StoreUnavailableError:
    """Return the error that becomes a response with status 503."""
    reason = str(error) or type(error).__name__
    return StoreUnavailableError(f"PostgreSQL is unavailable: {reason}")


def aborted(savepoint: str = _SAVEPOINT) -> AbortedTransactionError:
    """Return the error for a handler that ignored a failed statement; how to write a savepoint."""
    return AbortedTransactionError(
        "a statement failed, the handler went on and returned success, and the database rolled "
        f"everything back: put a statement whose error you handle into a savepoint ({savepoint})"
    )


def statement_error(error: BaseException) -> OncewardError:
    """Return the exception for an error of one of Onceward's statements, which is no outage."""
    if state_of(error) in _UNSTORABLE_STATES:
        return BodyInvalidError(UNSTORABLE)
    if state_of(error) in _CONFLICT_STATES:
        return TransactionConflictError(str(error))
    return StoreUnavailableError(f"PostgreSQL refused a statement: {error}", is_outage=False)


def unstorable_error(error: BaseException) -> BodyInvalidError | None:
    """Return the client's error, if a driver raised ``error`` for a text that it cannot store."""
    for each in _errors_of(error):
        is_psycopg = type(each).__module__.partition(".")[0] == "psycopg"
        if getattr(each, "sqlstate", None) in _UNSTORABLE_STATES or (
            is_psycopg and _REFUSED_BY_PSYCOPG in str(each)
        ):
            found = BodyInvalidError(UNSTORABLE)
            found.__cause__ = error
            return found
    return None


def refusal_of(error: BaseException) -> BodyInvalidError | StoreUnavailableError | None:
    """Return the client's error for a handler's statement; None: an error of the handler."""
    state = state_of(error)
    found: StoreUnavailableError
    if state in _CONFLICT_STATES:
        found = TransactionConflictError(str(error))
    elif state.startswith(_PASSING_STATES):
        found = StoreUnavailableError(str(error), is_outage=False, reason="statement_failed")
    else:
        return unstorable_error(error)
    found.__cause__ = error
    return found


def raise_unstorable(error: Exception) -> None:
    """Raise ``BodyInvalidError`` if a value of a handler's statement cannot be stored."""
    refused = unstorable_error(error)
    if refused is not None:
        raise refused


def raise_commit_error(
    error: BaseException,
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
    if state == SUPERSEDED_STATE:
        raise SupersededError(SUPERSEDED) from None
    if state == _LEASE_LOST_STATE:
        raise LeaseLostError("the lease was lost before the commit") from None
    if isinstance(error, outages):
        raise CommitUnknownError(str(error), is_cut=is_cut) from error
    if state == _ABORTED_STATE:
        raise aborted() from error
    if state in _UNSTORABLE_STATES:
        raise BodyInvalidError(UNSTORABLE) from error
    if is_cleaned and str(state)[:2] in _CLEANING_CLASSES:
        raise CommitUnknownError(str(error)) from error
    raise error


def is_sqlite_busy(error: Exception) -> bool:
    """Check whether an error means that the database is locked."""
    return (getattr(error, "sqlite_errorcode", 0) & 0xFF) == sqlite3.SQLITE_BUSY


def is_sqlite_outage(error: sqlite3.OperationalError) -> bool:
    """Check whether an error is about the file, not about the statement."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return (code & 0xFF) not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT)
