"""Threads for synchronous code that run only while the virtual loop waits for them.

Exactly one thread runs at a time, and the loop decides which is next. So the threads add a stack
each and no nondeterminism.
"""

import sys
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, Final

from onceward_lab.simulation.loop import Process, ProcessKilled

__all__ = ["CooperativeThread"]

_MAX_IDLE_THREADS: Final = 64
"""Idle threads that are kept for reuse."""


class _OSThread:
    """A thread of the operating system, reused by many cooperative threads."""

    def __init__(self) -> None:
        # Locks as semaphores: one side waits in acquire(), the other calls release().
        self.resumed, self.yielded = Lock(), Lock()
        self.resumed.acquire()
        self.yielded.acquire()
        self.work: Callable[[], None] = _no_work
        Thread(target=self._serve, name="simulation-thread", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.resumed.acquire()
            self.work()
            self.work = _no_work
            self.yielded.release()


_idle: list[_OSThread] = []


class CooperativeThread:
    """One run of synchronous code in a process; starts with the next step of the process."""

    def __init__(self, process: Process, work: Callable[["CooperativeThread"], None]) -> None:
        self._process = process
        self._work = work
        self._os_thread = _idle.pop() if _idle else _OSThread()
        self._os_thread.work = self._run
        # Python traces each thread separately; a trace of the loop includes this code.
        self._trace = sys.gettrace()
        self._value: Any = None
        self._ended = False
        self._wait_count = 0
        self.error: BaseException | None = None
        # Not during the kill: the caller may hold a lock that unwinding needs.
        process.after_kill.insert(0, self._unwind)
        process.loop.call_soon(self._resume, 0, None, context=process.context.copy())

    def wait(self, subscribe: Callable[[Callable[[Any], None]], None]) -> Any:
        """Run the loop until the callback given to ``subscribe`` is called; returns its value.

        Called by the thread itself. Only the first call of the callback counts. Raises
        ``ProcessKilled`` if the process is killed meanwhile.
        """
        if not self._process.alive:
            raise ProcessKilled
        number = self._wait_count = self._wait_count + 1
        loop, context = self._process.loop, self._process.context

        def resume(value: Any) -> None:
            if number == self._wait_count:
                loop.call_soon(self._resume, number, value, context=context.copy())

        subscribe(resume)
        self._os_thread.yielded.release()
        self._os_thread.resumed.acquire()
        if not self._process.alive:
            raise ProcessKilled
        return self._value

    def _resume(self, number: int, value: Any) -> None:
        if self._ended or number != self._wait_count:
            return
        self._value = value
        self._switch()

    def _unwind(self) -> None:
        """Resume a waiting thread after a kill, so that it raises ``ProcessKilled``."""
        if not self._ended and not self._is_running:
            self._switch()

    _is_running = False

    def _switch(self) -> None:
        self._is_running = True
        self._os_thread.resumed.release()
        self._os_thread.yielded.acquire()
        self._is_running = False
        if self._ended and len(_idle) < _MAX_IDLE_THREADS:
            _idle.append(self._os_thread)

    def _run(self) -> None:
        sys.settrace(self._trace)
        try:
            if self._process.alive:
                self._work(self)
        except ProcessKilled:
            pass
        except BaseException as error:  # noqa: BLE001 - reported by the owner
            self.error = error
        finally:
            self._ended = True


def _no_work() -> None:
    return
