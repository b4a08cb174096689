"""A move that kills its own process at a point, for tests that run it in a fork."""

import asyncio
import os
import signal

from onceward_operator.move import DatabaseMove


class KillAt:
    """Kill this process with SIGKILL when it reaches a point for the n-th time."""

    def __init__(self, point: str, nth: int) -> None:
        self._point = point
        self._left = nth

    async def reach(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def move(source: str, target: str, point: str, nth: int, batch: int) -> None:
    faults = KillAt(point, nth)
    asyncio.run(DatabaseMove(source, target, tables=[], faults=faults, batch=batch).run())
