"""An event loop in virtual time, and processes that it can pause and kill.

A step of the loop belongs to the process in whose context it runs. The steps of a killed process
are dropped, those of a paused one wait. As with SIGKILL and SIGSTOP, no code of the process runs.
This module does not depend on Onceward.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, TypeVar

__all__ = ["CURRENT_PROCESS", "NO_PROCESS", "Process", "ProcessKilled", "VirtualLoop"]

_T = TypeVar("_T")

_MAX_CLOSE_ATTEMPTS: Final = 50
"""``close()`` fails while a coroutine awaits in ``finally``; it is repeated this often."""

CURRENT_PROCESS: ContextVar["Process | None"] = ContextVar("simulated_process", default=None)

NO_PROCESS: Final = Context()
"""The context of steps that belong to no process: network, users, restarts."""


class ProcessKilled(BaseException):
    """Unwinds synchronous code of a killed process.

    A ``BaseException``, so that no ``except Exception`` of the real code continues after a kill.
    """


class Process:
    """A process that can be killed or paused between any two steps."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.is_paused = False
        self.pauses = 0
        self.context = Context()
        self.context.run(CURRENT_PROCESS.set, self)
        self.tasks: set[asyncio.Task[Any]] = set()
        # Run by a kill, in this order: they close connections and files.
        self.on_kill: list[Callable[[], None]] = []
        # Run once no code of the process is on any stack.
        self.after_kill: list[Callable[[], None]] = []
        self._deferred: deque[Step] = deque()

    def spawn(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Run a coroutine in this process."""
        return self.context.copy().run(self.loop.create_task, work)

    def pause(self, seconds: float) -> None:
        """Run none of its steps for some seconds."""
        if self.alive and not self.is_paused:
            self.is_paused = True
            self.pauses += 1
            self.loop.call_later(seconds, self.resume, context=NO_PROCESS.copy())

    def resume(self) -> None:
        """Continue, beginning with the steps that became due during the pause."""
        if self.is_paused:
            self.is_paused = False
            self.loop.schedule(self._deferred)
            self._deferred = deque()

    def may_run(self, step: "Step") -> bool:
        """Return whether a step may run now; the steps of a paused process are deferred."""
        if self.is_paused and self.alive:
            self._deferred.append(step)
            return False
        return self.alive

    def kill(self) -> None:
        """Kill the process at once; its coroutines are closed in the next step."""
        if not self.alive:
            return
        self.alive = False
        self._deferred.clear()
        for callback in self.on_kill:
            callback()
        # In a later step: this may be called by one of its coroutines.
        self.loop.call_soon(self._clean_up, context=NO_PROCESS.copy())

    def _clean_up(self) -> None:
        """Close the coroutines, so that the garbage collector does not run them later.

        Their ``finally`` blocks find all connections closed.
        """
        while self.tasks:
            task = self.tasks.pop()
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001
                self.context.copy().run(_close, task.get_coro())
        for callback in self.after_kill:
            callback()


def _close(dead: Any) -> None:
    for _ in range(_MAX_CLOSE_ATTEMPTS):
        try:
            dead.close()
        except RuntimeError:  # it awaits in a ``finally``
            continue
        except BaseException:  # noqa: BLE001 - errors of a dead process do not matter
            return
        return


class Step:
    """A scheduled callback: a small ``asyncio.TimerHandle``."""

    __slots__ = ("_when", "args", "callback", "context", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, at: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False
        self._when = at

    def cancel(self) -> None:
        """Drop the step when its time comes."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self.is_cancelled

    def when(self) -> float:
        """Return the virtual time at which it is due."""
        return self._when


class VirtualLoop:
    """Runs ready steps; when there are none, advances the time to the next timer.

    Implements the methods of an asyncio loop that Onceward uses, and no others.
    """

    def __init__(self) -> None:
        self._as_loop: Any = self
        self._now = 0.0
        self._ready: deque[Step] = deque()
        self._timers: list[tuple[float, int, Step]] = []
        self._numbers = count()
        # Called with uncaught errors of processes that are alive.
        self.on_error: Callable[[dict[str, Any]], None] = lambda _: None

    # -- the interface of asyncio loops ---------------------------------------------------------

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        """Run a callback after the steps that are ready."""
        step = Step(callback, args, copy_context() if context is None else context, self._now)
        self._ready.append(step)
        return step

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        """Run a callback after some virtual seconds."""
        when = self._now + delay
        step = Step(callback, args, copy_context() if context is None else context, when)
        heappush(self._timers, (when, next(self._numbers), step))
        return step

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        """Run a callback at a virtual time."""
        step = Step(callback, args, copy_context() if context is None else context, when)
        heappush(self._timers, (when, next(self._numbers), step))
        return step

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self._as_loop)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        """Return a task that belongs to the current process."""
        process = CURRENT_PROCESS.get()
        if context is not None and process is not None:
            context.run(CURRENT_PROCESS.set, process)  # it may be a new, empty one
        if process is not None and not process.alive:  # from a ``finally`` of a dead process
            coro.close()
            return self.create_future()
        task = asyncio.Task(coro, loop=self._as_loop, name=name, context=context)
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
        return task

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return True: only steps of this loop call it."""
        return True

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an uncaught error to ``on_error``, unless the process is dead."""
        process = CURRENT_PROCESS.get()
        if process is None or process.alive:
            self.on_error(context)

    # -- running --------------------------------------------------------------------------------

    def schedule(self, handles: deque[Step]) -> None:
        """Append steps to the ready ones."""
        self._ready.extend(handles)

    def run_until(self, deadline: float, is_done: Callable[[], bool]) -> None:
        """Run steps until ``is_done``, the virtual deadline, or until no steps are left."""
        before = asyncio._get_running_loop()  # noqa: SLF001
        asyncio._set_running_loop(self._as_loop)  # noqa: SLF001
        ready = self._ready
        try:
            while not is_done():
                step = ready.popleft() if ready else self._next_timer(deadline)
                if step is None:
                    return
                if step.is_cancelled:
                    continue
                context = step.context
                process = context.get(CURRENT_PROCESS)
                if process is not None and not process.may_run(step):
                    continue
                try:
                    context.run(step.callback, *step.args)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio does
                    context.run(self.call_exception_handler, {"exception": error, "step": step})
        finally:
            asyncio._set_running_loop(before)  # noqa: SLF001

    def _next_timer(self, deadline: float) -> Step | None:
        """Advance the time to the next timer; None if it is after the deadline."""
        if not self._timers:
            return None
        when = self._timers[0][0]
        self._now = max(self._now, min(when, deadline))
        return None if when > deadline else heappop(self._timers)[2]

    def clear(self) -> None:
        """Drop all steps."""
        self._ready.clear()
        self._timers.clear()
