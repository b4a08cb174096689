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
from onceward_protocol.ids import new_request_id

__all__ = ["SyncPostgresNotifier"]

_RECONNECT_SECONDS: Final = 1.0
_ALIVE_SECONDS: Final = 10.0
# Between two notifications of one process. Each makes workers look for all jobs.
_INTERVAL_SECONDS: Final = 0.01
_CLOSE_SECONDS: Final = 2.0

_log = logging.getLogger("onceward.jobs")


class SyncPostgresNotifier(LocalNotifier):
    """Wakes the workers of every process that uses the database.

    It listens on one connection, which the event loop watches, and notifies on another one in a
    short-lived thread. See ``postgres.notifier`` for why not in the transaction.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]], *, channel: str) -> None:
        """``connect`` opens a connection in autocommit mode; it blocks."""
        super().__init__()
        self._connect = connect
        self._channel = channel
        self._sender_id = new_request_id()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: asyncio.Task[None] | None = None
        self._lock = threading.Lock()
        self._sender: threading.Thread | None = None
        self._send_again = False
        self._last_sent = 0.0
        self._sending_on: psycopg.Connection[Any] | None = None

    async def open(self) -> None:
        """Start to listen; reconnects when the connection is lost."""
        if self._listener is None:
            await super().open()
            self._loop = asyncio.get_running_loop()
            listening = self._loop.create_future()
            self._listener = asyncio.create_task(self._listen(listening))
            await listening

    async def close(self) -> None:
        """Stop listening; wait for a notification that is being sent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
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
            super().notify()
            return
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(super().notify)

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
                    self._sending_on = self._connect()
                self._sending_on.execute(
                    "SELECT pg_notify(%s, %s)", (self._channel, self._sender_id)
                )
            except (OSError, psycopg.Error) as error:  # other processes poll
                _log.info("could not notify other processes of jobs: %s", error)

    async def _listen(self, listening: asyncio.Future[None]) -> None:
        while True:
            connection = None
            try:
                connection = await asyncio.to_thread(self._connect)
                await asyncio.to_thread(connection.execute, f"LISTEN {self._channel}")
                super().notify()  # one may have been missed meanwhile
                if not listening.done():
                    listening.set_result(None)
                while True:
                    await self._receive(connection)
                    await asyncio.to_thread(connection.execute, "SELECT 1")
            except (OSError, psycopg.Error) as error:
                _log.info("not listening for jobs, polling once a second instead: %s", error)
                if not listening.done():
                    listening.set_result(None)
            finally:
                if connection is not None:
                    connection.close()
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _receive(self, connection: psycopg.Connection[Any]) -> None:
        """Read notifications for a while, without a thread. Raises if the connection is lost."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[None] = loop.create_future()
        handle = super().notify

        def read() -> None:
            try:
                connection.pgconn.consume_input()
                while notification := connection.pgconn.notifies():
                    # This process was woken already by its own.
                    if notification.extra.decode() != self._sender_id:
                        handle()
            except psycopg.Error as error:
                if not lost.done():
                    lost.set_exception(error)

        read()
        loop.add_reader(connection.fileno(), read)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(lost, _ALIVE_SECONDS)
        finally:
            loop.remove_reader(connection.fileno())
