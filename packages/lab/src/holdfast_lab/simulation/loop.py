"""Virtual time: an event loop without a clock, and processes that it can pause and kill.

A step of the loop belongs to the process whose context it runs in. The steps of a killed process
are dropped, those of a paused one wait: as with kill -9 and SIGSTOP, no code of the process gets
to know. Nothing in here knows Holdfast.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, TypeVar

__all__ = ["OUTSIDE", "PROCESS", "Killed", "Process", "VirtualLoop"]

_T = TypeVar("_T")

_CLOSINGS: Final = 50
"""How often a dead coroutine may refuse to be closed, by waiting in a ``finally``."""

PROCESS: ContextVar["Process | None"] = ContextVar("torture_process", default=None)

OUTSIDE: Final = Context()
"""The context of what belongs to no process: the network, the person, the scheduler."""


class Killed(BaseException):
    """The process that ran this is no more. Whatever it does on the way out changes nothing."""


class Process:
    """A process that can be killed or paused between any two steps."""

    def __init__(self, loop: "VirtualLoop", name: str) -> None:
        """Begin to live."""
        self.loop = loop
        self.name = name
        self.alive = True
        self.is_paused = False
        self.pauses = 0
        self.context = Context()
        self.context.run(PROCESS.set, self)
        self.tasks: set[asyncio.Task[Any]] = set()
        # What a kill takes away: connections, files, strands. In this order.
        self.at_death: list[Callable[[], None]] = []
        # What is done once nothing of it is on any stack.
        self.after_death: list[Callable[[], None]] = []
        self._waiting: deque[Step] = deque()

    def spawn(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """Run a coroutine in this process."""
        return self.context.copy().run(self.loop.create_task, work)

    def pause(self, seconds: float) -> None:
        """Let nothing of it run for so long."""
        if self.alive and not self.is_paused:
            self.is_paused = True
            self.pauses += 1
            self.loop.call_later(seconds, self.resume, context=OUTSIDE.copy())

    def resume(self) -> None:
        """Let it go on, with everything that has come due meanwhile."""
        if self.is_paused:
            self.is_paused = False
            self.loop.put_back(self._waiting)
            self._waiting = deque()

    def lets(self, step: "Step") -> bool:
        """Say whether a step may run now; one of a paused process is kept for later."""
        if self.is_paused and self.alive:
            self._waiting.append(step)
            return False
        return self.alive

    def kill(self) -> None:
        """End it here and now."""
        if not self.alive:
            return
        self.alive = False
        self._waiting.clear()
        for take_away in self.at_death:
            take_away()
        # Not here: one of them may be running this very line.
        self.loop.call_soon(self._bury, context=OUTSIDE.copy())

    def _bury(self) -> None:
        """Close the coroutines, so that nothing of them is left to the garbage collector.

        What they do about it touches closed connections only.
        """
        while self.tasks:
            task = self.tasks.pop()
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined] # noqa: SLF001
                self.context.copy().run(_close, task.get_coro())
        for clean_up in self.after_death:
            clean_up()


def _close(dead: Any) -> None:
    for _ in range(_CLOSINGS):
        try:
            dead.close()
        except RuntimeError:  # it waits for something on its way out
            continue
        except BaseException:  # noqa: BLE001 - last words of a dead process
            return
        return


class Step:
    """Something to be run: what asyncio calls a handle, with nothing that is not needed here."""

    __slots__ = ("_at", "args", "callback", "context", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, at: float
    ) -> None:
        """Wait to be run."""
        self.callback = callback
        self.args = args
        self.context = context
        self.is_cancelled = False
        self._at = at

    def cancel(self) -> None:
        """Do not run it after all."""
        self.is_cancelled = True

    def cancelled(self) -> bool:
        """Say whether it was cancelled."""
        return self.is_cancelled

    def when(self) -> float:
        """Say when it is to be run."""
        return self._at


class VirtualLoop:
    """Runs what is ready; when nothing is, the time of the next timer has come.

    What asyncio asks of a loop and the product uses is here, and nothing else.
    """

    def __init__(self) -> None:
        """Begin at zero."""
        self._as_loop: Any = self
        self._now = 0.0
        self._ready: deque[Step] = deque()
        self._timers: list[tuple[float, int, Step]] = []
        self._numbers = count()
        # Errors that reached the end of a step of a living process.
        self.on_error: Callable[[dict[str, Any]], None] = lambda _: None

    # -- what asyncio asks of a loop ------------------------------------------------------------

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:
        """Run a step after those that are ready."""
        step = Step(callback, args, copy_context() if context is None else context, self._now)
        self._ready.append(step)
        return step

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        """Run a step after so many virtual seconds."""
        when = self._now + delay
        step = Step(callback, args, copy_context() if context is None else context, when)
        heappush(self._timers, (when, next(self._numbers), step))
        return step

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        """Run a step at a virtual time."""
        step = Step(callback, args, copy_context() if context is None else context, when)
        heappush(self._timers, (when, next(self._numbers), step))
        return step

    def create_future(self) -> asyncio.Future[Any]:
        """Make a future of this loop."""
        return asyncio.Future(loop=self._as_loop)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> Any:
        """Make a task, which belongs to the process that makes it."""
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None and not process.alive:  # last words: nobody will run them
            coro.close()
            return self.create_future()
        task = asyncio.Task(coro, loop=self._as_loop, name=name, context=context)
        if process is not None:
            process.tasks.add(task)
            task.add_done_callback(process.tasks.discard)
        return task

    def get_debug(self) -> bool:
        """Say no."""
        return False

    def is_running(self) -> bool:
        """Say yes: whoever asks is run by it."""
        return True

    def is_closed(self) -> bool:
        """Say no."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Hear of an error that nobody caught."""
        process = PROCESS.get()
        if process is None or process.alive:
            self.on_error(context)

    # -- running --------------------------------------------------------------------------------

    def put_back(self, handles: deque[Step]) -> None:
        """Run these next, in their order."""
        self._ready.extend(handles)

    def run_until(self, deadline: float, is_over: Callable[[], bool]) -> None:
        """Run steps until it is over, the virtual deadline has come, or nothing is left to do."""
        before = asyncio._get_running_loop()  # noqa: SLF001
        asyncio._set_running_loop(self._as_loop)  # noqa: SLF001
        ready = self._ready
        try:
            while not is_over():
                step = ready.popleft() if ready else self._come_due(deadline)
                if step is None:
                    return
                if step.is_cancelled:
                    continue
                context = step.context
                process = context.get(PROCESS)
                if process is not None and not process.lets(step):
                    continue
                try:
                    context.run(step.callback, *step.args)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # noqa: BLE001 - a step is nobody's caller
                    context.run(self.call_exception_handler, {"exception": error, "step": step})
        finally:
            asyncio._set_running_loop(before)  # noqa: SLF001

    def _come_due(self, deadline: float) -> Step | None:
        """Let time pass until the next timer; None if that is after the deadline."""
        if not self._timers:
            return None
        when = self._timers[0][0]
        self._now = max(self._now, min(when, deadline))
        return None if when > deadline else heappop(self._timers)[2]

    def abandon(self) -> None:
        """Forget everything that was still to come."""
        self._ready.clear()
        self._timers.clear()
