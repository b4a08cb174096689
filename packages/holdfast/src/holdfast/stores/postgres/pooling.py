"""Refuse a connection pooler that gives each transaction another server connection.

Holdfast remembers facts about a connection: the timeline of its server, its backend, prepared
statements, ``LISTEN``. With transaction pooling they are about a server connection that the next
transaction may not get.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.errors import ConfigurationError

__all__ = ["refuse_transaction_pooling"]

# The process id alone may be the same on two servers behind one proxy.
_BACKEND: Final = "SELECT pg_backend_pid(), pg_postmaster_start_time()::text"
_ROUNDS: Final = 3
# Poolers without support of prepared statements: the statement of another client is there, or
# one's own is not.
_FOREIGN_STATEMENTS: Final = ("26000", "42P05")

_MESSAGE: Final = (
    "the connection pooler in front of PostgreSQL gives each transaction another connection: "
    "use session pooling (PgBouncer: pool_mode = session), or connect without the pooler"
)


async def refuse_transaction_pooling(connect: Callable[[], Awaitable[Any]]) -> None:
    """Raise ``ConfigurationError`` if two open connections are seen on the same backend.

    Opens two connections of its own. Without a pooler, and with session pooling, a backend belongs
    to one connection until that is closed, so this refuses nothing by mistake. A pooler with
    several idle server connections may go unnoticed.
    """
    first = await connect()
    try:
        second = await connect()
        try:
            is_shared = await _share_a_backend(first, second)
        finally:
            second.terminate()
    finally:
        first.terminate()
    if is_shared:
        raise ConfigurationError(_MESSAGE)


async def _share_a_backend(first: Any, second: Any) -> bool:
    try:
        for _ in range(_ROUNDS):
            before = tuple(await first.fetchrow(_BACKEND))
            # The pooler has the backend of ``first`` back, and gives the latest to the next client.
            async with second.transaction():
                other = tuple(await second.fetchrow(_BACKEND))
                after = tuple(await first.fetchrow(_BACKEND))
            if other == before or after != before:
                return True
    except Exception as error:
        if getattr(error, "sqlstate", None) in _FOREIGN_STATEMENTS:
            return True
        raise
    return False
