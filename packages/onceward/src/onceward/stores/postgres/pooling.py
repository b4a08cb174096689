"""Refuse a connection pooler that gives each transaction another server connection.

Onceward remembers facts about a connection: the timeline of its server, its backend, prepared
statements, ``LISTEN``. With transaction pooling they are about a server connection that the next
transaction may not get.

Which server connection a pooler takes for a transaction cannot be controlled from outside: two
statements may reach the same one by chance. A notification can tell. PostgreSQL sends it to the
server connection that has run ``LISTEN``, at any time; a pooler can pass it on to the client only
if the two belong together while the client is idle, which is session pooling.
"""

import secrets
from typing import Any, Final

from onceward.errors import ConfigurationError
from onceward.stores.postgres.driver import Driver

__all__ = ["refuse_transaction_pooling"]

# The process id alone may be the same on two servers behind one proxy.
_BACKEND: Final = "SELECT pg_backend_pid(), pg_postmaster_start_time()::text"
# How long a notification may take. If it is late because the server is slow, it comes with the
# response to the next statement.
_NOTIFICATION_SECONDS: Final = 2.0
# Poolers without support of prepared statements: the statement of another client is there, or
# one's own is not.
_FOREIGN_STATEMENTS: Final = ("26000", "42P05")

_MESSAGE: Final = (
    "the connection pooler in front of PostgreSQL gives each transaction another connection: "
    "use session pooling (PgBouncer: pool_mode = session), or connect without the pooler"
)


async def refuse_transaction_pooling(driver: Driver, first: Any) -> int:
    """Raise ``ConfigurationError`` unless a connection keeps its backend while it is idle.

    ``first`` is a connection of the driver, which nothing else uses; a second one is opened and
    closed. Returns the process id of the backend of ``first``. Raises what the driver raises.
    """
    second = await driver.connect()
    try:
        backend = await _kept_backend(driver, first, second)
    except Exception as error:
        if getattr(error, "sqlstate", None) not in _FOREIGN_STATEMENTS:
            raise
        backend = None
    finally:
        second.terminate()
    if backend is None:
        raise ConfigurationError(_MESSAGE)
    return backend


async def _kept_backend(driver: Driver, first: Any, second: Any) -> int | None:
    """Return the backend of ``first``; None if it belongs to other clients, too."""
    backend = tuple(await first.fetchrow(_BACKEND))
    # Mostly enough to see a pooler: it gives the server connection that was used last to the next
    # client.
    if tuple(await second.fetchrow(_BACKEND)) == backend:
        return None
    channel = f"onceward_pooling_{secrets.token_hex(8)}"

    async def notify() -> None:
        # Not like other commits: it would wait for a synchronous standby that is away.
        await second.execute(
            f"BEGIN;SET LOCAL synchronous_commit = off;SELECT pg_notify('{channel}', '');COMMIT"
        )

    is_kept = await driver.is_notified(first, channel, notify, _NOTIFICATION_SECONDS)
    return int(backend[0]) if is_kept else None
