"""A bell on PostgreSQL: LISTEN on a connection of its own, NOTIFY after the commit.

Not NOTIFY inside the transaction: PostgreSQL then takes one lock for the whole database before
each such commit and holds it through the fsync, so that commits which enqueue would line up one
by one. A ring of its own, after the commit, writes nothing and waits for no disk. The first is sent
at once; those of the next moment become one more, at its end.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import asyncpg

from holdfast.errors import StoreError
from holdfast.ids import new_request_id
from holdfast.stores.notifier import LocalNotifier
from holdfast.stores.postgres.errors import OUTAGES

__all__ = ["PostgresNotifier"]

_CHANNEL: Final = "holdfast_jobs"
_RECONNECT_SECONDS: Final = 1.0
_ALIVE_SECONDS: Final = 10.0
# Between two rings of one process. Who hears one looks for all jobs, so more would only cost.
_BETWEEN_SECONDS: Final = 0.01

_log = logging.getLogger("holdfast.jobs")


class PostgresNotifier(LocalNotifier):
    """Rings in every process that works on the database."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        run: Callable[[str], Awaitable[Any]],
    ) -> None:
        """Listen on a connection of its own; ring with the store's."""
        super().__init__()
        self._connect = connect
        self._run = run
        self._own_voice = new_request_id()
        self._listener: asyncio.Task[None] | None = None
        self._ringing: asyncio.Task[None] | None = None
        self._ring_again = False
        self._last_rung = 0.0

    async def open(self) -> None:
        """Listen, and go on trying whenever the connection is lost."""
        if self._listener is None:
            await super().open()
            self._ringing = None
            listening = asyncio.get_running_loop().create_future()
            self._listener = asyncio.create_task(self._listen(listening))
            await listening

    async def close(self) -> None:
        """Stop listening; finish the ring that is on its way."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
        if self._ringing is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._ringing), 2)

    def notify(self) -> None:
        """Wake this process at once, and the others in a moment."""
        super().notify()
        if self._ringing is not None:
            self._ring_again = True
            return
        self._ringing = asyncio.create_task(self._notify())

    async def _notify(self) -> None:
        try:
            while True:
                await asyncio.sleep(self._last_rung + _BETWEEN_SECONDS - time.monotonic())
                self._ring_again = False
                self._last_rung = time.monotonic()
                with suppress(StoreError, asyncpg.PostgresError):  # others look by themselves
                    await self._run(f"SELECT pg_notify('{_CHANNEL}', '{self._own_voice}')")
                if not self._ring_again:
                    return
        finally:
            self._ringing = None

    async def _listen(self, listening: asyncio.Future[None]) -> None:
        while True:
            connection = None
            try:
                connection = await self._connect()
                cut_off = asyncio.Event()
                connection.add_termination_listener(lambda _connection, end=cut_off.set: end())
                await connection.add_listener(_CHANNEL, self._heard)
                LocalNotifier.notify(self)  # something may have been rung while nobody listened
                if not listening.done():
                    listening.set_result(None)
                while not cut_off.is_set():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(cut_off.wait(), _ALIVE_SECONDS)
                    await connection.fetchval("SELECT 1", timeout=_ALIVE_SECONDS)
            except (asyncpg.PostgresError, *OUTAGES) as error:
                _log.info("not listening for jobs, looking once a second instead: %s", error)
                if not listening.done():
                    listening.set_result(None)
            finally:
                if connection is not None:
                    connection.terminate()
            await asyncio.sleep(_RECONNECT_SECONDS)

    def _heard(self, _connection: Any, _process: int, _channel: str, voice: str) -> None:
        if voice != self._own_voice:  # that one has rung here already
            LocalNotifier.notify(self)
