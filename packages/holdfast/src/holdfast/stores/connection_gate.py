"""Limits how many guarded requests use a connection pool at once, so that they cannot deadlock.

A request that holds one connection, e.g. of its own session, and waits for a second one deadlocks
with others like it as soon as they hold the whole pool. If at most capacity - 1 of them are
admitted, one connection is left that one of them can finish with.
"""

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from holdfast.errors import StoreUnavailableError

__all__ = ["ConnectionGate", "Visit"]

_visit: ContextVar["Visit | None"] = ContextVar("holdfast_visit", default=None)

_HOLDER: Final = "holdfast_holder"


class Visit:
    """One request: how many connections it holds, and whether it has been admitted."""

    __slots__ = ("connections", "is_admitted")

    def __init__(self) -> None:
        self.connections = 0
        self.is_admitted = False


class ConnectionGate:
    """Admits guarded requests to a pool of ``capacity`` connections; None is no limit.

    Requests whose dependencies run before the claim are admitted before them, until the first
    such request of an operation was seen to hold no connection when it claims its key.
    """

    def __init__(
        self,
        capacity: int | None,
        timeout_seconds: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """``on_wait`` gets the seconds that a request waited, admitted or not."""
        self._slots = None if capacity is None else asyncio.Semaphore(max(1, capacity - 1))
        self._capacity = capacity
        self._timeout = timeout_seconds
        self._on_wait = on_wait
        # Operations whose dependencies hold no connection of the pool at the claim.
        self._free: set[str] = set()

    async def enter(self, operation: str) -> Visit:
        """Begin to count the connections of this task; wait to be admitted if that is needed."""
        visit = Visit()
        if self._slots is not None and operation not in self._free:
            await self.admit(visit)
        _visit.set(visit)
        return visit

    def before_claim(self, visit: Visit, operation: str) -> bool:
        """Return whether the request holds a connection; if not, it may wait for another one."""
        if visit.connections:
            self._free.discard(operation)
            return True
        self._free.add(operation)
        self.leave(visit)
        return False

    async def admit(self, visit: Visit) -> None:
        """Wait until the request may take a connection. Does nothing if it has been admitted."""
        if self._slots is None or visit.is_admitted:
            return
        if not self._slots.locked():
            await self._slots.acquire()
            visit.is_admitted = True
            return
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                await self._slots.acquire()
        except TimeoutError:
            raise StoreUnavailableError(
                f"no connection was free for {self._timeout:g} seconds (the engine's pool has "
                f"{self._capacity})"
            ) from None
        finally:
            if self._on_wait is not None:
                self._on_wait(time.monotonic() - started)
        visit.is_admitted = True

    def leave(self, visit: Visit) -> None:
        """Admit the next request. Does nothing if this one has not been admitted."""
        if self._slots is not None and visit.is_admitted:
            visit.is_admitted = False
            self._slots.release()

    # -- listeners of the pool ------------------------------------------------------------

    @staticmethod
    def on_checkout(_connection: Any, record: Any, _proxy: Any) -> None:
        """Count a connection for the request of this task."""
        visit = _visit.get()
        if visit is not None:
            visit.connections += 1
            record.info[_HOLDER] = visit

    @staticmethod
    def on_checkin(_connection: Any, record: Any) -> None:
        """Count a connection that was returned, by any task."""
        visit = record.info.pop(_HOLDER, None)
        if visit is not None:
            visit.connections -= 1
