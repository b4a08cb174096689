"""Processes that are killed while they run a batch, for a fork server."""

import asyncio
import os
import signal

from onceward.batch.options import BatchOptions
from packages.onceward.tests.support.batch_lab import Item, item, open_batch_lab


def batch_of(name: str) -> list[Item]:
    return [item(f"{name}-{at}") for at in range(6)]


class KillAt:
    """Kill this process with SIGKILL when it reaches a point for the n-th time."""

    def __init__(self, point: str, times: int) -> None:
        self._point = point
        self._left = times

    async def reach(self, point: str) -> None:
        self._left -= point == self._point
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)


def send_batch(database: str, name: str, point: str, times: int) -> None:
    async def send() -> None:

        batch = BatchOptions(chunk_items=3, max_seconds=300, stall_seconds=120)
        faults = KillAt(point, times)
        async with open_batch_lab(database, batch=batch, faults=faults) as lab:
            await lab.results(batch_of(name))

    asyncio.run(send())
