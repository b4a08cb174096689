"""The epoch of cached records: when it changes, memory and Redis hold nothing that counts.

The epoch is in the database. A process reads it at most once a second, and only while it serves
replays from caches. So a record that an operator removed is replayed for one second at most by a
process that can reach the database.
"""

import asyncio
import contextvars
import secrets
from collections.abc import Callable
from typing import Final

from holdfast.errors import StoreError
from holdfast.ports import Clock, Store
from holdfast.server.request_thread import is_in_request_thread
from holdfast.stores.sql_loader import load_queries

__all__ = ["CacheEpoch", "new_epoch"]

_LIFETIME_SECONDS: Final = 1.0
# A database that does not respond must not delay replays from memory for longer.
_WAIT_SECONDS: Final = 0.25


def new_epoch() -> str:
    """Return a random epoch: a counter could repeat after a backup was restored."""
    return secrets.token_hex(16)


class CacheEpoch:
    """Reads the epoch from the database and reports a change with ``on_change``."""

    def __init__(self, store: Store, clock: Clock, on_change: Callable[[str], None]) -> None:
        self._store = store
        self._clock = clock
        self._on_change = on_change
        self._epoch: str | None = None
        self._due = 0.0
        self._reading: asyncio.Task[None] | None = None
        # How often the epoch has changed, to detect a change between a look-up and its use.
        self.generation = 0

    def is_due(self) -> bool:
        """Return whether the last reading is too old to rely on caches."""
        return self._clock.monotonic() >= self._due

    async def check(self) -> None:
        """Read the epoch if it is due. Never raises: without the database, caches still count."""
        if not self.is_due():
            return
        if is_in_request_thread():  # without an event loop; other threads do not wait for it
            self._due = self._clock.monotonic() + _LIFETIME_SECONDS
            await self._read()
            return
        if self._reading is None:
            # Not in the context of this request, whose thread may end earlier.
            self._reading = asyncio.create_task(self._read(), context=contextvars.Context())
        _, pending = await asyncio.wait({self._reading}, timeout=_WAIT_SECONDS)
        if pending:  # other replays do not wait for the same reading
            self._due = self._clock.monotonic() + _LIFETIME_SECONDS

    async def close(self) -> None:
        """Wait for a reading that has begun."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_WAIT_SECONDS)
            self._reading = None  # one that was cancelled before it began is still here

    async def _read(self) -> None:
        started = self._clock.monotonic()
        sql = load_queries("holdfast.stores", "records.sql", names=self._store.table_names)
        try:
            rows = await self._store.read(sql["read_cache_epoch"])
        except StoreError:
            return
        else:
            epoch = str(rows[0]["cache_epoch"])
            if epoch != self._epoch:
                self._epoch = epoch
                self.generation += 1
                self._on_change(epoch)
        finally:
            self._due = started + _LIFETIME_SECONDS
            self._reading = None
