"""Kills and stops processes of a chaos run at random (seeded) times."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from onceward_lab.chaos.cluster import Cluster
from onceward_lab.chaos.device import Device
from onceward_lab.fork_client import AsyncForkServer, Child

__all__ = ["FaultInjector"]

_MEAN_SECONDS: Final = 0.8
"""Average time between two faults."""

_MAX_STOP_SECONDS: Final = {"server": 1.5, "drain": 1.5, "worker": 4.0}
"""Longer than the leases of devices and workers: a process that continues finds its claim lost."""

_MAX_NATS_SECONDS: Final = 6.0
"""How long a node of NATS is away or isolated: some elections end before, some do not."""

_JOB_STREAM: Final = "ONCEWARD_JOBS"

Fault = Callable[[], Coroutine[Any, Any, None]]


class FaultInjector:
    """Injects faults and counts them."""

    def __init__(
        self,
        processes: AsyncForkServer,
        cluster: Cluster,
        devices: Sequence[Device],
        rng: random.Random,
    ) -> None:
        """Injects nothing until :meth:`run` is called."""
        self._processes = processes
        self._cluster = cluster
        self._devices = devices
        self._random = rng
        self.kills: Counter[str] = Counter()
        self.stops: Counter[str] = Counter()
        self._running: set[asyncio.Task[None]] = set()
        self._extra_drains: set[asyncio.Task[None]] = set()
        self._restarting: set[str] = set()

    async def run(self, seconds: float) -> None:
        """Inject faults for ``seconds``; afterwards no process is stopped and no server is down."""
        deadline = asyncio.get_running_loop().time() + seconds
        faults = self._faults()
        # Each fault once before the weighted choice, so that a short run has them all.
        first = list(faults)
        self._random.shuffle(first)
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            pause = self._random.expovariate(1 / _MEAN_SECONDS)
            await asyncio.sleep(min(pause, left))
            if first:
                fault = first.pop()
            else:
                (fault,) = self._random.choices(list(faults), list(faults.values()))
            # Faults overlap: a server may be killed while the database recovers.
            _start(fault(), self._running)
        await asyncio.gather(*self._running)

    async def wait_for_extra_drains(self) -> None:
        """Wait for the second drains that were started while the first was stopped."""
        await asyncio.gather(*self._extra_drains)

    async def cancel(self) -> None:
        """Cancel all faults in progress."""
        tasks = [*self._running, *self._extra_drains]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _faults(self) -> Mapping[Fault, int]:
        """Return the faults and their weights."""
        faults: dict[Fault, int] = {
            self._kill_drain: 8,
            self._kill_user: 2,
            self._kill_server: 3,
            self._kill_worker: 3,
            self._stop_drain: 2,
            self._stop_server: 2,
            self._stop_worker: 2,
        }
        if self._cluster.postgres is not None:
            faults[self._crash_postgres] = 1
        if self._cluster.nats is not None:
            faults[self._crash_nats] = 1
        if self._cluster.nats_cluster is not None:
            faults[self._kill_nats_leader] = 1
            faults[self._wipe_nats_node] = 1
            faults[self._isolate_nats_node] = 1
        return faults

    # ------------------------------------------------------------------ kills

    async def _kill_drain(self) -> None:
        drains = [child for device in self._devices for child in device.drains.values()]
        await self._kill("drain", drains)

    async def _kill_user(self) -> None:
        users = [d.user_process for d in self._devices if d.user_process is not None]
        await self._kill("user", users)

    async def _kill_server(self) -> None:
        await self._kill("server", list(self._cluster.servers.values()))

    async def _kill_worker(self) -> None:
        await self._kill("worker", list(self._cluster.workers.values()))

    async def _kill(self, kind: str, children: Sequence[Child]) -> None:
        alive = [child for child in children if child.is_alive]
        if alive:
            child = self._random.choice(alive)
            await self._processes.kill(child)
            # It may have exited just before the signal.
            self.kills[kind] += child.code == -signal.SIGKILL

    async def _crash_postgres(self) -> None:
        postgres = self._cluster.postgres
        if postgres is None or "postgres" in self._restarting:
            return
        self._restarting.add("postgres")
        self.kills["postgres"] += 1
        await asyncio.to_thread(postgres.stop, "immediate")
        await asyncio.to_thread(postgres.start)
        self._restarting.discard("postgres")

    async def _crash_nats(self) -> None:
        nats = self._cluster.nats
        if nats is None or "nats" in self._restarting:
            return
        self._restarting.add("nats")
        self.kills["nats"] += 1
        await asyncio.to_thread(nats.kill)
        await asyncio.to_thread(nats.start)
        self._restarting.discard("nats")

    # --------------------------------------------------------- nodes of NATS, one at a time

    async def _kill_nats_leader(self) -> None:
        """Kill the leader of the stream of jobs, or any node while there is an election."""
        nodes = self._cluster.nats_cluster
        if nodes is None or "nats" in self._restarting:
            return
        self._restarting.add("nats")
        node = await asyncio.to_thread(nodes.current_leader, _JOB_STREAM)
        node = node or self._random.choice(nodes.nodes)
        self.kills["nats leader"] += 1
        await asyncio.to_thread(node.kill)
        await asyncio.sleep(self._random.uniform(0.1, _MAX_NATS_SECONDS))
        await asyncio.to_thread(node.start)
        self._restarting.discard("nats")

    async def _wipe_nats_node(self) -> None:
        nodes = self._cluster.nats_cluster
        if nodes is None or "nats" in self._restarting:
            return
        self._restarting.add("nats")
        node = self._random.choice(nodes.nodes)
        self.kills["nats disk"] += 1
        await asyncio.to_thread(node.kill)
        await asyncio.to_thread(node.lose_files)
        await asyncio.to_thread(node.start)
        self._restarting.discard("nats")

    async def _isolate_nats_node(self) -> None:
        nodes = self._cluster.nats_cluster
        if nodes is None or "nats" in self._restarting:
            return
        self._restarting.add("nats")
        self.stops["nats network"] += 1
        await asyncio.to_thread(nodes.isolate, self._random.choice(nodes.nodes))
        await asyncio.sleep(self._random.uniform(0.1, _MAX_NATS_SECONDS))
        await asyncio.to_thread(nodes.heal_network)
        self._restarting.discard("nats")

    # ------------------------------------------------------------------ stops

    async def _stop_drain(self) -> None:
        draining = [device for device in self._devices if device.drains]
        if not draining:
            return
        device = self._random.choice(draining)
        child = next(iter(device.drains.values()))
        _start(device.drain_again(), self._extra_drains)
        await self._stop("drain", [child])

    async def _stop_server(self) -> None:
        await self._stop("server", list(self._cluster.servers.values()))

    async def _stop_worker(self) -> None:
        await self._stop("worker", list(self._cluster.workers.values()))

    async def _stop(self, kind: str, children: Sequence[Child]) -> None:
        alive = [child for child in children if child.is_alive]
        if not alive:
            return
        child = self._random.choice(alive)
        self.stops[kind] += 1
        self._processes.signal(child, signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.1, _MAX_STOP_SECONDS[kind]))
        self._processes.signal(child, signal.SIGCONT)


def _start(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
    task = asyncio.create_task(work)
    running.add(task)
    task.add_done_callback(running.discard)
