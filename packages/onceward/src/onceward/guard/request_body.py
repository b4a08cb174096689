"""Reads the bodies of requests within the limits of the process; hashes large ones in a thread.

A caller who only stalls gets 408, one who sends more than the process can hold gets 503. Reading a
large JSON body takes up to a tenth of a second of CPU. That happens in a thread, one body at a
time, so that other requests are served meanwhile.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from onceward.errors import BodyTimeoutError, BodyTooLargeError, OverloadedError
from onceward.guard.policy import Policy
from onceward.guard.request import RequestHead
from onceward.guard.request_thread import (
    has_request_thread,
    is_in_request_thread,
    run_in_request_thread,
)

T = TypeVar("T")
# Messages of ASGI.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]

LARGE_BODY_BYTES: Final = 64 * 1024
"""Larger bodies are hashed in a thread, one at a time. They count against the memory limit, and so
do those above 8 KiB that arrive in pieces."""

# About as much as the rest of a request takes.
_UNCOUNTED_BYTES: Final = 8 * 1024

# The rest of a refused body is read for this long: many clients read the response only when they
# have sent everything, and closing while they send would destroy it.
_LINGER_SECONDS: Final = 5.0
_LINGER_IDLE_SECONDS: Final = 1.0

_MAX_PAUSE_SECONDS: Final = 0.1

# After the deadline, what has arrived is still read: it may have arrived in time, while this
# process was stopped or busy. A part that has arrived is there within the first limit.
_LATE_PART_SECONDS: Final = 0.1
_LATE_SECONDS: Final = 1.0


class Disconnected(Exception):  # noqa: N818 - an event, not an error
    """The client disconnected before its body was complete; nothing has been done."""


class RequestBodies:
    """The bodies that this process holds for its callers."""

    def __init__(self, memory_bytes: int | None) -> None:
        self._memory_bytes = memory_bytes
        # Bytes by tenant; None before sign-in.
        self._held: dict[str | None, int] = {}
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._pid = 0
        self._pause_until = 0.0

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def hold(self, tenant: str | None, size: int) -> None:
        """Count bytes of a body. Raises ``OverloadedError`` where there is no space."""
        with self._lock:
            of_tenant = self._held.get(tenant, 0) + size
            if self._memory_bytes is not None and (
                self.held_bytes + size > self._memory_bytes or 2 * of_tenant > self._memory_bytes
            ):
                raise OverloadedError(
                    "too many bodies are being read; try again shortly", retry_after_seconds=1
                )
            self._held[tenant] = of_tenant

    def release(self, tenant: str | None, size: int) -> None:
        with self._lock:
            left = self._held[tenant] - size
            if left:
                self._held[tenant] = left
            else:
                del self._held[tenant]

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run what reads or writes a body of this size: a large one in a thread, one at a time.

        The thread pauses for as long as it has worked before it takes the next one.
        """
        if size <= LARGE_BODY_BYTES:
            return work()
        if has_request_thread():
            return await run_in_request_thread(lambda: self._run_alone(work))

        def pause_and_run() -> T:
            # Each call into C holds the interpreter's lock, and the event loop needs it several
            # times for one request. So the loop gets the turns after each body.
            time.sleep(max(0.0, self._pause_until - time.monotonic()))
            started = time.thread_time()
            try:
                return self._run_alone(work)
            finally:
                worked = min(time.thread_time() - started, _MAX_PAUSE_SECONDS)
                self._pause_until = time.monotonic() + worked

        return await asyncio.get_running_loop().run_in_executor(self._thread(), pause_and_run)

    def _run_alone(self, work: Callable[[], T]) -> T:
        with self._one_at_a_time:
            return work()

    async def run_and_forget(self, size: int, work: Callable[[], T]) -> T:
        """As ``run``, for work that frees the objects it makes: they are not collected meanwhile.

        A large body is many objects and no cycles. Examining them again and again while they are
        made can take longer than making them, and all threads wait for it.
        """

        def run_without_gc() -> T:
            is_enabled = gc.isenabled()
            gc.disable()
            try:
                return work()
            finally:
                if is_enabled:
                    gc.enable()

        return await self.run(size, work if size <= LARGE_BODY_BYTES else run_without_gc)

    def close(self) -> None:
        """End the thread. Idempotent; it is started again when it is needed."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)

    def _thread(self) -> ThreadPoolExecutor:
        # A thread does not survive a fork: servers fork after the app is loaded.
        if self._executor is None or self._pid != os.getpid():
            self._executor = ThreadPoolExecutor(1, "onceward-bodies")
            self._pid = os.getpid()
        return self._executor


class _Begun:
    """Goes on with a coroutine whose first step has been run and waits for something."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, bytes], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, bytes]:
        coroutine, waits_for = self._coroutine, self._waits_for
        try:
            while True:
                try:
                    value = yield waits_for
                except BaseException as error:  # noqa: BLE001 - also a cancellation
                    waits_for = coroutine.throw(error)
                else:
                    waits_for = coroutine.send(value)
        except StopIteration as complete:
            whole: bytes = complete.value
            return whole


class _Body:
    """The base of bodies: their size is limited and counted."""

    __slots__ = ("_bodies", "_head", "_held", "_policy", "_tenant")

    def __init__(self, head: RequestHead, policy: Policy, bodies: RequestBodies) -> None:
        self._head = head
        self._policy = policy
        self._bodies = bodies
        self._held = 0
        self._tenant: str | None = None

    def check_declared_size(self) -> None:
        """Raise ``BodyTooLargeError`` if the head says that the body is too large."""
        declared = self._head.content_length
        if declared is not None and declared > self._policy.max_body_bytes:
            raise _too_large(self._policy)

    def release(self) -> None:
        """Take the body off the count: it is not needed any more. Idempotent."""
        if self._held:
            self._bodies.release(self._tenant, self._held)
            self._held = 0


class WholeBody(_Body):
    """A body that is in memory, or that a function reads in the thread of the request."""

    __slots__ = ("_content",)

    def __init__(
        self,
        content: bytes | Callable[[], bytes],
        head: RequestHead,
        policy: Policy,
        bodies: RequestBodies,
    ) -> None:
        super().__init__(head, policy, bodies)
        self._content = content

    async def read(self, tenant: str | None) -> bytes:
        content = self._content
        if not isinstance(content, bytes):
            content = await self._read(content)
        if len(content) > self._policy.max_body_bytes:
            raise _too_large(self._policy)
        if len(content) > LARGE_BODY_BYTES:
            self._bodies.hold(tenant, len(content))
            self._tenant, self._held = tenant, len(content)
        return content

    async def _read(self, read: Callable[[], bytes]) -> bytes:
        if is_in_request_thread():  # without an event loop
            return await run_in_request_thread(read)
        reading = asyncio.ensure_future(run_in_request_thread(read))
        seconds = self._policy.body_deadline.total_seconds()
        for limit in (seconds, _LATE_PART_SECONDS):
            await asyncio.wait((reading,), timeout=limit)
            if reading.done():
                return reading.result()
        reading.cancel()
        raise BodyTimeoutError(f"the body was not complete after {seconds:g} seconds")


class RequestBody(_Body):
    """The body of an ASGI request, read once, with limits on size, time and memory."""

    __slots__ = ("_parts", "_receive", "is_complete")

    def __init__(
        self, receive: Receive, head: RequestHead, policy: Policy, bodies: RequestBodies
    ) -> None:
        super().__init__(head, policy, bodies)
        self._receive = receive
        # What was received so far, of a body in several parts.
        self._parts: bytearray | None = None
        # Whether the client has sent all of it, or has disconnected.
        self.is_complete = False

    async def read(self, tenant: str | None) -> bytes:
        self._tenant = tenant
        # Most bodies arrive with their head, and then nothing waits: they need no timer.
        reading = self._read()
        try:
            waits_for = reading.send(None)
        except StopIteration as complete:
            whole: bytes = complete.value
            return whole
        seconds = self._policy.body_deadline.total_seconds()
        try:
            async with asyncio.timeout(seconds):
                return await _Begun(reading, waits_for)
        except TimeoutError:
            pass
        try:
            async with asyncio.timeout(_LATE_SECONDS):
                return await self._read(_LATE_PART_SECONDS)
        except TimeoutError:
            raise BodyTimeoutError(f"the body was not complete after {seconds:g} seconds") from None

    async def is_there(self) -> bool:
        """Return whether the rest has arrived already. It is discarded."""
        if self.is_complete:
            return True
        await self._discard(0.0, idle_seconds=None)
        return self.is_complete

    async def linger(self) -> None:
        """Discard what the client still sends, for a few seconds."""
        await self._discard(_LINGER_SECONDS, idle_seconds=_LINGER_IDLE_SECONDS)

    async def _read(self, part_seconds: float | None = None) -> bytes:
        """Read on until the body is complete, and give each part so long."""
        limit = self._policy.max_body_bytes
        parts = self._parts
        while True:
            if part_seconds is None:
                message = await self._receive()
            else:
                async with asyncio.timeout(part_seconds):
                    message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_complete = True
                raise Disconnected
            body: bytes = message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
            size = len(body) if parts is None else len(parts) + len(body)
            if size > limit:
                raise _too_large(self._policy)
            is_whole = self.is_complete and parts is None
            if size > (LARGE_BODY_BYTES if is_whole else _UNCOUNTED_BYTES):
                self._bodies.hold(self._tenant, size - self._held)
                self._held = size
            if parts is None:
                if self.is_complete:
                    return body
                parts = self._parts = bytearray(body)
            else:
                parts += body
            if self.is_complete:
                return bytes(parts)

    async def _discard(self, seconds: float, *, idle_seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not self.is_complete:
                    async with asyncio.timeout(idle_seconds):
                        message = await self._receive()
                    self.is_complete = not message.get("more_body", False)
        except TimeoutError:
            pass


def _too_large(policy: Policy) -> BodyTooLargeError:
    return BodyTooLargeError(f"the body may have at most {policy.max_body_bytes} bytes")
