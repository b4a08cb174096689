"""A notifier on PostgreSQL: LISTEN on a separate connection, NOTIFY after the commit.

Not NOTIFY inside the transaction: PostgreSQL takes one lock for the whole database before each such
commit and holds it through the fsync, so transactions that enqueue would commit one by one. A
separate NOTIFY writes nothing to disk. The first is sent at once; those of the next 10 ms are
combined into one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from onceward.errors import StoreError
from onceward.stores.notifier import LocalNotifier
from onceward_protocol.ids import new_request_id

# Listens on a connection to a channel, and raises when the connection is lost. The first function
# gets the payloads; the second is called once, when nothing can be missed any more.
Listen = Callable[[Any, str, Callable[[str], None], Callable[[], None]], Awaitable[None]]

_RECONNECT_SECONDS: Final = 1.0
# Between two notifications of one process. Each makes workers look for all jobs.
_INTERVAL_SECONDS: Final = 0.01

_log = logging.getLogger("onceward.jobs")


class PostgresNotifier(LocalNotifier):
    """Wakes the workers of every process that uses the database."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        run: Callable[[str], Awaitable[Any]],
        *,
        listen: Listen,
        channel: str,
        errors: tuple[type[BaseException], ...],
    ) -> None:
        """Listen on a connection from ``connect``; notify with ``run``.

        ``errors`` are those that a driver raises: of the server, and if it is unavailable.
        """
        super().__init__()
        self._listen_on = listen
        self._errors = errors
        self._channel = channel
        self._connect = connect
        self._run = run
        self._sender_id = new_request_id()
        self._listener: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._send_again = False
        self._last_sent = 0.0

    async def open(self) -> None:
        """Start to listen; reconnects when the connection is lost."""
        if self._listener is None:
            await super().open()
            self._sending = None
            listening = asyncio.get_running_loop().create_future()
            self._listener = asyncio.create_task(self._listen(listening))
            await listening

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
        if self._sending is not None:
            # It may have been cancelled, with all tasks of the event loop, before it began.
            await asyncio.wait({self._sending}, timeout=2)
            self._sending = None

    def notify(self) -> None:
        """Wake this process at once, and the others within 10 ms."""
        super().notify()
        if self._sending is not None:
            self._send_again = True
            return
        self._sending = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._last_sent + _INTERVAL_SECONDS - time.monotonic())
                self._send_again = False
                self._last_sent = time.monotonic()
                with suppress(StoreError, *self._errors):  # other processes poll
                    await self._run(f"SELECT pg_notify('{self._channel}', '{self._sender_id}')")
                if not self._send_again:
                    return
        finally:
            self._sending = None

    async def _listen(self, listening: asyncio.Future[None]) -> None:
        def ready() -> None:
            LocalNotifier.notify(self)  # one may have been missed meanwhile
            if not listening.done():
                listening.set_result(None)

        while True:
            connection = None
            try:
                connection = await self._connect()
                await self._listen_on(connection, self._channel, self._receive, ready)
            except self._errors as error:
                _log.info("not listening for jobs, polling once a second instead: %s", error)
                if not listening.done():
                    listening.set_result(None)
            finally:
                if connection is not None:
                    connection.terminate()
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _receive(self, sender: str) -> None:
        if sender != self._sender_id:  # this process was woken already
            LocalNotifier.notify(self)
