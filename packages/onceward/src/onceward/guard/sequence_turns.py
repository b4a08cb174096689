"""One request per stream in this process: the next ones wait for their turn, by their numbers."""

import asyncio
import heapq
from concurrent.futures import Future
from itertools import count
from typing import Any

from onceward.guard.request_thread import is_in_request_thread, run_in_request_thread
from onceward_protocol.sequence import Stream

__all__ = ["SequenceTurns"]


class SequenceTurns:
    """The streams of which a request runs in this process, and those that wait for it."""

    def __init__(self) -> None:
        # Heaps of number, order of arrival, future.
        self._waiting: dict[Stream, list[tuple[int, int, Any]]] = {}
        self._arrivals = count()

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, stream: Stream) -> bool:
        """Return True and take the turn, or False if another request has it."""
        if stream in self._waiting:
            return False
        self._waiting[stream] = []
        return True

    async def wait(self, stream: Stream, number: int, seconds: float) -> None:
        """Wait for the turn, which passes to the lowest number. Raises ``TimeoutError``."""
        if self.take(stream):
            return
        turn: Any = (
            Future() if is_in_request_thread() else asyncio.get_running_loop().create_future()
        )
        heapq.heappush(self._waiting[stream], (number, next(self._arrivals), turn))
        try:
            if isinstance(turn, Future):
                await run_in_request_thread(lambda: turn.result(seconds))
            else:
                async with asyncio.timeout(seconds):
                    await turn
        except BaseException as error:
            has_turn = turn.done() and not turn.cancelled()
            if has_turn and isinstance(error, TimeoutError):  # it came in the same instant
                return
            if has_turn:
                self.leave(stream)
            else:
                turn.cancel()
            raise

    def leave(self, stream: Stream) -> None:
        """Pass the turn on."""
        waiting = self._waiting[stream]
        while waiting:
            turn = heapq.heappop(waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[stream]
