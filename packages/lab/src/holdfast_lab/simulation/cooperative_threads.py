"""Synchronous code that takes turns with the loop: a thread that runs only while the loop waits.

Exactly one of all threads runs at any time, and who is next is decided by the loop. So the threads
bring no chance of their own; they only keep a stack each.
"""

import sys
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any, Final

from holdfast_lab.simulation.loop import Killed, Process

__all__ = ["Strand"]

_STACK_PLACES: Final = 64
"""Idle threads that are kept for the next strand."""


class _Place:
    """A thread that runs one strand after the other."""

    def __init__(self) -> None:
        # Bare locks, taken by whoever waits and released by the other: a turn is all they pass.
        self.go, self.back = Lock(), Lock()
        self.go.acquire()
        self.back.acquire()
        self.work: Callable[[], None] = _nothing
        Thread(target=self._serve, name="torture-strand", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self.go.acquire()
            self.work()
            self.work = _nothing
            self.back.release()


_idle: list[_Place] = []


class Strand:
    """One run of synchronous code in a process."""

    def __init__(self, process: Process, work: Callable[["Strand"], None]) -> None:
        """Begin with the next step of the process."""
        self._process = process
        self._work = work
        self._place = _idle.pop() if _idle else _Place()
        self._place.work = self._run
        # Threads are traced one by one; whoever traces the loop means what runs in its turns too.
        self._trace = sys.gettrace()
        self._heard: Any = None
        self._ended = False
        self._turns = 0
        self.error: BaseException | None = None
        # Not at the moment of death: whoever kills may hold a lock that the way out needs.
        process.after_death.insert(0, self._end)
        process.loop.call_soon(self._turn, 0, None, context=process.context.copy())

    def wait(self, arrange: Callable[[Callable[[Any], None]], None]) -> Any:
        """Let the loop go on until what is arranged gives a value. Called by the strand itself.

        The first value counts. Raises ``Killed`` if the process dies meanwhile.
        """
        if not self._process.alive:
            raise Killed
        turn = self._turns = self._turns + 1
        loop, context = self._process.loop, self._process.context

        def give(value: Any) -> None:
            if turn == self._turns:
                loop.call_soon(self._turn, turn, value, context=context.copy())

        arrange(give)
        self._place.back.release()
        self._place.go.acquire()
        if not self._process.alive:
            raise Killed
        return self._heard

    def _turn(self, turn: int, value: Any) -> None:
        if self._ended or turn != self._turns:
            return
        self._heard = value
        self._switch()

    def _end(self) -> None:
        """Let it unwind. The one that is running does so by itself."""
        if not self._ended and not self._is_running:
            self._switch()

    _is_running = False

    def _switch(self) -> None:
        self._is_running = True
        self._place.go.release()
        self._place.back.acquire()
        self._is_running = False
        if self._ended and len(_idle) < _STACK_PLACES:
            _idle.append(self._place)

    def _run(self) -> None:
        sys.settrace(self._trace)
        try:
            if self._process.alive:
                self._work(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - told by whoever looks at it
            self.error = error
        finally:
            self._ended = True


def _nothing() -> None:
    return
