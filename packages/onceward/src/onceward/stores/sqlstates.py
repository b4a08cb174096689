"""SQLSTATEs of PostgreSQL: which mean that the server is unavailable, and which blame the data."""

from typing import Final

from onceward.core.storable_text import UNSTORABLE
from onceward.errors import BodyInvalidError

__all__ = ["is_denied", "is_outage_state", "is_unstorable_state", "unstorable_error"]

# Shutdown, crash, starting up, database dropped, idle session; too many connections; a standby.
# Class 08 are connection errors. Everything else is about one statement: a conflict, a timeout, a
# value, a missing table.
_OUTAGE_STATES: Final = frozenset(
    {"57P01", "57P02", "57P03", "57P04", "57P05", "53300", "25006"},
)
# A character that does not exist in the database's encoding, and \u0000 in jsonb.
_UNSTORABLE_STATES: Final = frozenset({"22021", "22P05"})
# psycopg refuses NUL by itself, without a SQLSTATE.
_REFUSED_BY_PSYCOPG: Final = "NUL (0x00)"


def is_outage_state(state: str) -> bool:
    """Check whether the server cannot serve anyone now."""
    return state.startswith("08") or state in _OUTAGE_STATES


def is_unstorable_state(state: str | None) -> bool:
    """Check whether a text has a character that the database cannot store."""
    return state in _UNSTORABLE_STATES


def is_denied(error: BaseException) -> bool:
    """Check whether a driver raised ``error`` for a statement that the role may not run."""
    return any(getattr(each, "sqlstate", None) == "42501" for each in _errors_of(error))


def unstorable_error(error: BaseException) -> BodyInvalidError | None:
    """Return the client's error, if a driver raised ``error`` for a text that it cannot store."""
    for each in _errors_of(error):
        is_psycopg = type(each).__module__.partition(".")[0] == "psycopg"
        if is_unstorable_state(getattr(each, "sqlstate", None)) or (
            is_psycopg and _REFUSED_BY_PSYCOPG in str(each)
        ):
            found = BodyInvalidError(UNSTORABLE)
            found.__cause__ = error
            return found
    return None


def _errors_of(error: BaseException) -> list[BaseException]:
    """Return an error and the driver's: SQLAlchemy has it in ``orig``, Django in ``__cause__``."""
    found = (error, getattr(error, "orig", None), error.__cause__)
    return [each for each in found if each is not None]
