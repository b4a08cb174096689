"""Getting messages: how many were asked for, what came, and waiting for the first."""

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from holdfast.jobs.engines.nats_connection import PULL_SECONDS, Arrival, Broker

__all__ = ["Pulls", "come_again"]

# A request is taken for lost so long after its time.
_SLACK_SECONDS: Final = 0.5


class _Line:
    """What was asked of one queue and has not come."""

    def __init__(self) -> None:
        self.asked = 0
        self.until = 0.0


class Pulls:
    """Never holds more than the worker has room for: what comes too much, another may have."""

    def __init__(self, broker: Broker, queues: Iterable[str]) -> None:
        """Pull from these queues."""
        self._broker = broker
        self._lines = {queue: _Line() for queue in queues}
        self._here: list[Arrival] = []
        self._room = 0
        self._something = asyncio.Event()

    async def gather(self, limit: int, wait_seconds: float) -> list[Arrival]:
        """Return up to ``limit`` messages, waiting for the first.

        Returns without one when it is time to ask again.
        """
        self._room = limit
        await self._ask(limit)
        if not self._here and wait_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._something.wait()
        await asyncio.sleep(0)  # what came in the same packet comes along
        self._something.clear()
        arrivals, self._here = self._here[:limit], self._here[limit:]
        self._room = limit - len(arrivals)
        return arrivals

    def wake(self) -> None:
        """Let a waiting ``gather`` return."""
        self._something.set()

    async def stop(self) -> None:
        """Ask for no more, and let others have what nobody has looked at."""
        self._room = 0
        await self._broker.stop_pulling()
        for arrival in self._here:
            await self._broker.say(arrival.receipt, come_again(0.0))
        self._here = []

    async def _ask(self, limit: int) -> None:
        """Ask each queue for what is missing, unless most of it has been asked for."""
        now = asyncio.get_running_loop().time()
        for queue, line in self._lines.items():
            if now > line.until:
                line.asked = 0
            missing = limit - len(self._here) - line.asked
            if missing * 2 >= limit and await self._broker.pull(queue, missing):
                line.asked += missing
                line.until = now + PULL_SECONDS + _SLACK_SECONDS

    # -- what the broker tells --------------------------------------------------------------------

    async def arrived(self, arrival: Arrival) -> None:
        """Keep a message if there is room, which there may not be when several queues give."""
        line = self._lines[arrival.queue]
        line.asked = max(0, line.asked - 1)
        if len(self._here) < self._room:
            self._here.append(arrival)
            self._something.set()
        else:
            await self._broker.say(arrival.receipt, come_again(0.0))

    def ended(self, queue: str, unserved: int | None) -> None:
        """Make ``gather`` return, so that it is called again, and asks again."""
        line = self._lines[queue]
        line.asked = 0 if unserved is None else max(0, line.asked - unserved)
        self._something.set()


def come_again(delay_seconds: float) -> bytes:
    """Return the word for: not now, but after this time."""
    if delay_seconds <= 0:
        return b"-NAK"
    return b"-NAK " + msgspec.json.encode({"delay": int(delay_seconds * 1e9)})
