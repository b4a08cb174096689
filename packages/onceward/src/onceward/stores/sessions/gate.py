"""Limits how many guarded requests use a connection pool at once, so that they cannot deadlock.

A request that holds one connection, e.g. of its own session, and waits for a second one deadlocks
with others like it as soon as they hold the whole pool. If at most capacity - 1 of them are
admitted, one connection is left that one of them can finish with.

A request that holds a connection must not wait to be admitted: it would keep the connection from
those that were. So operations whose dependencies or hooks take one are admitted before them.
"""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from onceward.errors import StoreUnavailableError

_visit: ContextVar["Visit | None"] = ContextVar("onceward_visit", default=None)

_HOLDER: Final = "onceward_holder"


class Visit:
    """One request: which connections it holds, and whether it has been admitted."""

    __slots__ = ("_release", "held", "operation")

    def __init__(self, operation: str | None = None) -> None:
        # Until its first claim.
        self.operation = operation
        # The pool's records of the connections that it holds, by ``id``; any thread changes it.
        self.held: set[int] = set()
        # Admits the next request; None if this one has not been admitted.
        self._release: Callable[[], None] | None = None

    @property
    def is_admitted(self) -> bool:
        return self._release is not None

    def admitted(self, release: Callable[[], None]) -> None:
        """Note that it was admitted; ``release`` admits the next one."""
        self._release = release

    def leave(self) -> None:
        """Admit the next request. Does nothing if this one has not been admitted."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def leave_without_connection(self) -> None:
        """Leave unless the request holds a connection; with one it must stay admitted."""
        if not self.held:
            self.leave()


def current_visit() -> Visit | None:
    """Return the visit of the guarded request being served, or None."""
    return _visit.get()


def end_visit() -> None:
    """Admit the next request, if this one was admitted. Its connections count no more."""
    visit = _visit.get()
    if visit is not None:
        visit.leave()
        _visit.set(None)


class _Gate(ABC):
    """Common part of the gates for tasks and for threads."""

    def __init__(
        self,
        capacity: int | None,
        timeout_seconds: float,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """``capacity`` None is no limit. ``on_wait`` gets the seconds of each wait."""
        self._capacity = capacity
        self._timeout = timeout_seconds
        self._on_wait = on_wait
        # Whether the last request of an operation held a connection when it claimed its key.
        self._holds: dict[str, bool] = {}
        self._open(0 if capacity is None else max(1, capacity - 1))

    @abstractmethod
    def _open(self, slots: int) -> None:
        """Let so many requests be admitted at once."""

    def before_claim(self, visit: Visit) -> None:
        """Note, at its first claim, whether it has to be admitted before its dependencies."""
        operation = visit.operation
        if operation is not None:
            visit.operation = None
            self._holds[operation] = bool(visit.held)

    def _waited(self, started: float) -> None:
        if self._on_wait is not None:
            self._on_wait(time.monotonic() - started)

    def _refusal(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"no connection was free for {self._timeout:g} seconds (the engine's pool has "
            f"{self._capacity})"
        )

    # -- listeners of the pool ------------------------------------------------------------

    @staticmethod
    def on_checkout(_connection: Any, record: Any, _proxy: Any) -> None:
        """Count a connection for the request of this task or thread."""
        visit = _visit.get()
        if visit is not None:
            visit.held.add(id(record))
            record.info[_HOLDER] = visit

    @staticmethod
    def on_checkin(_connection: Any, record: Any) -> None:
        """Count a connection that was returned, by any task or thread."""
        visit = record.info.pop(_HOLDER, None)
        if visit is not None:
            visit.held.discard(id(record))


class ConnectionGate(_Gate):
    """Admits guarded requests on an event loop to a pool of ``capacity`` connections.

    Requests whose dependencies run before the claim are admitted before them, until the first
    such request of an operation was seen to hold no connection when it claims its key.
    """

    def _open(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)

    def begin(self) -> None:
        """Begin to count the connections of this task. ``claim`` admits it."""
        _visit.set(Visit())

    async def enter(self, operation: str) -> None:
        """Begin to count the connections of this task; wait to be admitted if that is needed."""
        visit = Visit(operation)
        if self._holds.get(operation, True):
            await self.admit(visit)
        _visit.set(visit)

    async def admit(self, visit: Visit) -> None:
        if self._capacity is None or visit.is_admitted:
            return
        slots = self._slots
        if not slots.locked():
            await slots.acquire()
            visit.admitted(slots.release)
            return
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout):
                await slots.acquire()
        except TimeoutError:
            raise self._refusal() from None
        finally:
            self._waited(started)
        visit.admitted(slots.release)


class ThreadGate(_Gate):
    """Admits guarded requests of a sync framework, which has a thread for each. It blocks."""

    def _open(self, slots: int) -> None:
        # Not a semaphore of ``threading``: that takes a dozen function calls per request.
        self._lock = threading.Lock()
        self._left = slots
        # Each waiting request acquires its lock a second time; its slot is passed on to it.
        self._waiting: deque[threading.Lock] = deque()

    def begin(self) -> None:
        """Begin to count the connections of this thread, unless ``enter`` has. ``claim`` admits."""
        if _visit.get() is None:
            _visit.set(Visit())

    def enter(self, operation: str, *, is_guarded: bool) -> None:
        """Begin to count the connections of this thread; wait to be admitted if that is needed.

        ``is_guarded`` says that the operation will claim a key, as far as the caller knows.
        """
        visit = Visit(operation)
        if self._holds.get(operation, is_guarded):
            self.admit(visit)
        _visit.set(visit)

    def admit(self, visit: Visit) -> None:
        """Wait until the request may take a connection. Does nothing if it has been admitted."""
        if self._capacity is None or visit.is_admitted:
            return
        turn: threading.Lock | None = None
        with self._lock:
            if self._left > 0:
                self._left -= 1
            else:
                turn = threading.Lock()
                turn.acquire()
                self._waiting.append(turn)
        if turn is not None:
            self._wait(turn)
        visit.admitted(self._release)

    def _wait(self, turn: threading.Lock) -> None:
        started = time.monotonic()
        try:
            if turn.acquire(timeout=self._timeout):
                return
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise self._refusal()
            # Its turn came after the time-out, before this thread had the lock.
        finally:
            self._waited(started)

    def _release(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._left += 1
