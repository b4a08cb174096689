"""Which errors of psycopg mean that the server is unavailable."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from onceward.stores.errors import is_outage_state

__all__ = [
    "ServerLostError",
    "is_refusal",
    "raise_outage",
    "translating_connect_errors",
    "translating_outages",
]

# libpq reports no SQLSTATE if the server refuses a connection, only its message.
_REFUSED: Final = re.compile(r"FATAL:")
_TRANSIENT: Final = re.compile(
    r"starting up|shutting down|recovery mode|not yet accepting|too many (?:clients|connections)"
    r"|connection slots|terminating connection|conflict with recovery"
)


class ServerLostError(ConnectionError):
    """The server is unavailable. The cause is psycopg's error."""


def raise_outage(connection: Any, error: psycopg.Error) -> None:
    """Raise an outage as ``ServerLostError``; return if it is an error of a statement."""
    state = error.sqlstate
    if connection.closed if state is None else is_outage_state(state):
        raise ServerLostError(str(error)) from error


class translating_outages:  # noqa: N801 - used like a function; a generator would cost more
    """Raise outages as ``ServerLostError`` and errors of a statement unchanged."""

    __slots__ = ("_connection",)

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, psycopg.Error):
            raise_outage(self._connection, error)


def is_refusal(error: psycopg.OperationalError) -> bool:
    """Check whether the server has refused to connect: no such database, or a wrong password."""
    message = str(error)
    return _REFUSED.search(message) is not None and _TRANSIENT.search(message) is None


@contextmanager
def translating_connect_errors() -> Iterator[None]:
    """Raise ``ServerLostError``, but psycopg's error if the server has refused the connection."""
    try:
        yield
    except psycopg.OperationalError as error:
        if is_refusal(error):
            raise
        raise ServerLostError(str(error).strip()) from error
