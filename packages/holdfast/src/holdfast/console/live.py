"""Tells open pages that something has changed, as server-sent events.

One task listens to the database for all pages of the process, while there are any. It says that
there is something new, not what: each page loads itself again, with its own rights.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Final

from holdfast.console.page import ConsoleError
from holdfast.ports import Notifier, Store
from holdfast.server.shutdown import server_is_stopping

__all__ = ["LiveUpdates"]

# Pages are loaded again at most this often, and at least this often.
_DEBOUNCE_SECONDS: Final = 1.0
_EVERY_SECONDS: Final = 5.0
_CHECK_SECONDS: Final = 1.0
_MAX_STREAMS: Final = 64
_CHANGED: Final = b"event: changed\ndata: \n\n"


class LiveUpdates:
    """The streams of one process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: set[asyncio.Event] = set()
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise ``ConsoleError`` if there are too many streams already."""
        if len(self._waiting) >= _MAX_STREAMS:
            raise ConsoleError("too many live pages are open")

    async def stream(self, *, until: float) -> AsyncIterator[bytes]:
        """Yield an event for each change, until the time of the event loop is ``until``.

        Ends earlier if the server is shutting down, which would wait for it.
        """
        changed = asyncio.Event()
        self._waiting.add(changed)
        if self._task is None:
            self._task = asyncio.create_task(self._listen())
        loop = asyncio.get_running_loop()
        try:
            yield b"retry: 5000\n\n"
            while loop.time() < until and not server_is_stopping():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_CHECK_SECONDS):
                        await changed.wait()
                if changed.is_set():
                    changed.clear()
                    yield _CHANGED
        finally:
            self._waiting.discard(changed)
            if not self._waiting and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _listen(self) -> None:
        notifier: Notifier = self._store.notifier()
        await notifier.open()
        try:
            while True:
                await notifier.wait(_EVERY_SECONDS)
                await asyncio.sleep(_DEBOUNCE_SECONDS)
                for changed in self._waiting:
                    changed.set()
        finally:
            with suppress(Exception):
                await notifier.close()
