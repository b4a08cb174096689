"""Tells open pages that what they show has changed, as server-sent events.

One task renders the open pages of the process again, while there are any: once for all that show
the same to operators with the same rights. A page whose content has changed gets an event, and
loads it with its own session.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from onceward.errors import StoreError
from onceward.frameworks.asgi import server_is_stopping
from onceward.ports import Notifier, Store
from onceward.tenants import AllTenants
from onceward_operator.console.access import Role
from onceward_operator.console.page import ConsoleError

__all__ = ["LiveUpdates", "View"]

# Notifications that come together are answered together.
_GATHER_SECONDS: Final = 0.2
# Pages are rendered at most this often, and at least this often.
_PAUSE_SECONDS: Final = 2.0
_EVERY_SECONDS: Final = 5.0
# Of the time of the process, at most this share is used for rendering, unless a slow database would
# make pages older than this.
_MAX_SHARE: Final = 0.02
_MAX_PAUSE_SECONDS: Final = 15.0
# How soon a stream notices that the server is stopping.
_CHECK_SECONDS: Final = 1.0
_MAX_STREAMS: Final = 64
# Proxies close silent connections, and some servers notice only by this that a page is gone.
_ALIVE_SECONDS: Final = 15.0
_ALIVE: Final = b":\n\n"
_CHANGED: Final = b"event: changed\ndata: \n\n"

_log = logging.getLogger("onceward_operator.console")


@dataclass(frozen=True, slots=True)
class View:
    """Content of a live page: the same to all operators with the same rights."""

    # The console's own path, for links.
    root: str
    # Below it.
    path: str
    # Sorted by name.
    query: tuple[tuple[str, str], ...]
    role: Role
    tenants: tuple[str, ...] | AllTenants
    sees_payloads: bool


@dataclass(slots=True)
class _Rendered:
    """The content of a view, and the streams of the pages that show it."""

    # None: not rendered yet, or that has failed.
    html: str | None = None
    # Counts changes of the content.
    version: int = 0
    streams: "set[_Stream]" = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Stream:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    # A page that has just connected may be older than the content.
    version: int = -1


class LiveUpdates:
    """The open pages of one process. ``render`` returns the content of a view."""

    def __init__(self, store: Store, render: Callable[[View], Awaitable[str]]) -> None:
        self._store = store
        self._render = render
        self._views: dict[View, _Rendered] = {}
        self._task: asyncio.Task[None] | None = None

    def check(self) -> None:
        """Raise ``ConsoleError`` if there are too many streams already."""
        if sum(len(each.streams) for each in self._views.values()) >= _MAX_STREAMS:
            raise ConsoleError("too many live pages are open")

    def rendered(self, view: View) -> str | None:
        """Return the content of a view as it was rendered last, if pages with it are open."""
        found = self._views.get(view)
        return None if found is None else found.html

    async def stream(self, view: View, *, until: float) -> AsyncIterator[bytes]:
        """Yield an event for each change, until the time of the event loop is ``until``.

        Ends earlier if the server is shutting down, which would wait for it.
        """
        clock = asyncio.get_running_loop().time
        stream, rendered = _Stream(), self._views.setdefault(view, _Rendered())
        rendered.streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._listen())
        try:
            yield b"retry: 5000\n\n"
            last = clock()
            while (now := clock()) < until and not server_is_stopping():
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(min(until, now + _CHECK_SECONDS)):
                        await stream.changed.wait()
                if stream.changed.is_set():
                    stream.changed.clear()
                    last = clock()
                    yield _CHANGED
                elif clock() - last >= _ALIVE_SECONDS:
                    last = clock()
                    yield _ALIVE
        finally:
            rendered.streams.discard(stream)
            if not rendered.streams:
                self._views.pop(view, None)
            if not self._views and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _listen(self) -> None:
        notifier: Notifier = self._store.notifier()
        clock = asyncio.get_running_loop().time
        await notifier.open()
        try:
            while True:
                if await notifier.wait(_EVERY_SECONDS):
                    await asyncio.sleep(_GATHER_SECONDS)
                started = clock()
                await self.update()
                await asyncio.sleep(_pause_seconds(clock() - started))
        finally:
            with suppress(Exception):
                await notifier.close()

    async def update(self) -> None:
        """Render all open views again, and tell the pages whose content has changed."""
        for view, rendered in list(self._views.items()):
            html = await self._try_to_render(view)
            if html != rendered.html:
                rendered.html = html
                rendered.version += 1
            for stream in rendered.streams:
                if stream.version != rendered.version:
                    stream.version = rendered.version
                    stream.changed.set()

    async def _try_to_render(self, view: View) -> str | None:
        """Return the content of a view, or None: a page that loads it itself sees the error."""
        try:
            return await self._render(view)
        except (ConsoleError, StoreError):
            return None
        except Exception:  # noqa: BLE001 - a defect of one page must not end the others
            _log.exception("the console cannot show %s", view.path)
            return None


def _pause_seconds(took: float) -> float:
    """Return how long nothing is rendered after pages were rendered for that many seconds."""
    return max(_PAUSE_SECONDS, min(took / _MAX_SHARE, _MAX_PAUSE_SECONDS))
