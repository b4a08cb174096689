"""What is done to the processes: killed and stopped by a seeded chance, until the time is over."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from holdfast_lab.chaos.cluster import Fort
from holdfast_lab.chaos.device_process import Phone
from holdfast_lab.fork_client import AsyncForkServer, Child

__all__ = ["Besiegers"]

_MEAN_SECONDS: Final = 0.8
"""Between two faults, on average."""

_LONGEST_STOP_SECONDS: Final = {"server": 1.5, "drain": 1.5, "worker": 4.0}
"""Longer than the leases of devices and workers: who wakes up has to find that others took over."""


Fault = Callable[[], Coroutine[Any, Any, None]]


class Besiegers:
    """Chooses a fault, does it, waits a moment, and counts."""

    def __init__(
        self, processes: AsyncForkServer, fort: Fort, phones: Sequence[Phone], chance: random.Random
    ) -> None:
        """Take whom to attack."""
        self._processes = processes
        self._fort = fort
        self._phones = phones
        self._chance = chance
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._away: set[str] = set()

    async def attack(self, seconds: float) -> None:
        """Go on for so long; when this returns, nobody is stopped and nothing is down."""
        deadline = asyncio.get_running_loop().time() + seconds
        faults = self._faults()
        # Each of them once before chance decides: a short siege has them all too.
        first = list(faults)
        self._chance.shuffle(first)
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            pause = self._chance.expovariate(1 / _MEAN_SECONDS)
            await asyncio.sleep(min(pause, left))
            if first:
                fault = first.pop()
            else:
                (fault,) = self._chance.choices(list(faults), list(faults.values()))
            # Faults overlap: a server is killed while the database recovers.
            _start(fault(), self._running)
        await asyncio.gather(*self._running)

    async def settle(self) -> None:
        """Wait for the drains that were started beside others."""
        await asyncio.gather(*self._beside)

    async def leave(self) -> None:
        """Stop in the middle, whatever is under way."""
        tasks = [*self._running, *self._beside]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _faults(self) -> Mapping[Fault, int]:
        """Return the faults there are, and how often each comes compared with the others."""
        faults: dict[Fault, int] = {
            self._kill_drain: 8,
            self._kill_person: 2,
            self._kill_server: 3,
            self._kill_worker: 3,
            self._stop_drain: 2,
            self._stop_server: 2,
            self._stop_worker: 2,
        }
        if self._fort.postgres is not None:
            faults[self._crash_postgres] = 1
        if self._fort.nats is not None:
            faults[self._crash_nats] = 1
        return faults

    # ------------------------------------------------------------------ kills

    async def _kill_drain(self) -> None:
        await self._kill("drain", [one for phone in self._phones for one in phone.drains.values()])

    async def _kill_person(self) -> None:
        await self._kill("person", [p.person for p in self._phones if p.person is not None])

    async def _kill_server(self) -> None:
        await self._kill("server", list(self._fort.servers.values()))

    async def _kill_worker(self) -> None:
        await self._kill("worker", list(self._fort.workers.values()))

    async def _kill(self, kind: str, children: Sequence[Child]) -> None:
        alive = [child for child in children if child.is_alive]
        if alive:
            child = self._chance.choice(alive)
            await self._processes.kill(child)
            # It may have come to its own end a moment earlier.
            self.kills[kind] += child.code == -signal.SIGKILL

    async def _crash_postgres(self) -> None:
        postgres = self._fort.postgres
        if postgres is None or "postgres" in self._away:
            return
        self._away.add("postgres")
        self.kills["postgres"] += 1
        await asyncio.to_thread(postgres.stop, "immediate")
        await asyncio.to_thread(postgres.start)
        self._away.discard("postgres")

    async def _crash_nats(self) -> None:
        nats = self._fort.nats
        if nats is None or "nats" in self._away:
            return
        self._away.add("nats")
        self.kills["nats"] += 1
        await asyncio.to_thread(nats.kill)
        await asyncio.to_thread(nats.start)
        self._away.discard("nats")

    # ------------------------------------------------------------------ stops

    async def _stop_drain(self) -> None:
        busy = [phone for phone in self._phones if phone.drains]
        if not busy:
            return
        phone = self._chance.choice(busy)
        child = next(iter(phone.drains.values()))
        _start(phone.drain_beside(), self._beside)
        await self._stop("drain", [child])

    async def _stop_server(self) -> None:
        await self._stop("server", list(self._fort.servers.values()))

    async def _stop_worker(self) -> None:
        await self._stop("worker", list(self._fort.workers.values()))

    async def _stop(self, kind: str, children: Sequence[Child]) -> None:
        alive = [child for child in children if child.is_alive]
        if not alive:
            return
        child = self._chance.choice(alive)
        self.stops[kind] += 1
        self._processes.signal(child, signal.SIGSTOP)
        await asyncio.sleep(self._chance.uniform(0.1, _LONGEST_STOP_SECONDS[kind]))
        self._processes.signal(child, signal.SIGCONT)


def _start(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)
