"""A notifier on PostgreSQL for stores with sync connections: it may be called in any thread."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from onceward_protocol.extras import needs_extra

with needs_extra("psycopg"):
    import psycopg

from onceward.stores.notifier import LocalNotifier
from onceward.stores.postgres.notifier import PostgresNotifier

_ALIVE_SECONDS: Final = 10.0
# Between two notifications of one process. Each makes workers look for all jobs.
_INTERVAL_SECONDS: Final = 0.01
_CLOSE_SECONDS: Final = 2.0

_log = logging.getLogger("onceward.jobs")


async def _run_nothing(_sql: str) -> None:
    """Not called: ``notify`` sends in a thread."""


class SyncPostgresNotifier(PostgresNotifier):
    """Wakes the workers of every process that uses the database.

    It listens on one connection, which the event loop watches, and notifies on another one in a
    short-lived thread. See ``postgres.notifier`` for why not in the transaction.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], *, channel: str) -> None:
        """``connect`` opens a connection in autocommit mode; it blocks."""

        async def connect_listener() -> Any:
            raw: Any = await asyncio.to_thread(connect)
            raw.terminate = raw.close  # the name that asyncpg has for it
            return raw

        super().__init__(
            connect_listener,
            _run_nothing,
            listen=_listen,
            channel=channel,
            errors=(OSError, psycopg.Error),
        )
        self._connect_blocking = connect
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None
        self._sending_on: psycopg.Connection[Any] | None = None

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().open()

    async def close(self) -> None:
        await super().close()
        self._loop = None
        sender = self._sender
        if sender is not None:
            await asyncio.to_thread(sender.join, _CLOSE_SECONDS)
        with self._lock:
            connection, self._sending_on = self._sending_on, None
        if connection is not None:
            connection.close()

    def notify(self) -> None:
        """Wake this process at once, and the others within 10 ms. Call it in any thread."""
        self._wake()
        with self._lock:
            self._send_again = True
            if self._sender is not None:
                return
            self._sender = threading.Thread(target=self._send, name="onceward-notify", daemon=True)
        self._sender.start()

    def _wake(self) -> None:
        loop = self._loop
        if loop is None:
            LocalNotifier.notify(self)
            return
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(LocalNotifier.notify, self)

    def _send(self) -> None:
        while True:
            time.sleep(max(0.0, self._last_sent + _INTERVAL_SECONDS - time.monotonic()))
            with self._lock:
                if not self._send_again:
                    self._sender = None
                    return
                self._send_again = False
            self._last_sent = time.monotonic()
            try:
                if self._sending_on is None or self._sending_on.closed:
                    self._sending_on = self._connect_blocking()
                self._sending_on.execute(
                    "SELECT pg_notify(%s, %s)", (self._channel, self._sender_id)
                )
            except (OSError, psycopg.Error) as error:  # other processes poll
                _log.info("could not notify other processes of jobs: %s", error)


async def _listen(
    raw: Any, channel: str, receive: Callable[[str], None], ready: Callable[[], None]
) -> None:
    """Listen until the connection is lost, then raise."""
    await asyncio.to_thread(raw.execute, f"LISTEN {channel}")
    ready()
    while True:
        await _receive(raw, receive)
        await asyncio.to_thread(raw.execute, "SELECT 1")


async def _receive(raw: psycopg.Connection[Any], receive: Callable[[str], None]) -> None:
    """Read notifications for a while, without a thread. Raises if the connection is lost."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        try:
            raw.pgconn.consume_input()
            while notification := raw.pgconn.notifies():
                receive(notification.extra.decode())
        except psycopg.Error as error:
            if not lost.done():
                lost.set_exception(error)

    read()
    loop.add_reader(raw.fileno(), read)
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(lost, _ALIVE_SECONDS)
    finally:
        loop.remove_reader(raw.fileno())
