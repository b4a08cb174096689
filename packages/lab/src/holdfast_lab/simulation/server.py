"""Processes of the server, from start to kill: intake and worker together, or each for itself."""

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from holdfast.errors import RateLimitedError, ServiceError
from holdfast.server.app import Holdfast
from holdfast_lab.simulation.app import guard_service, identify, register_jobs
from holdfast_lab.simulation.broker import SteppedBroker, stepped_jetstream
from holdfast_lab.simulation.faults import Faults
from holdfast_lab.simulation.loop import OUTSIDE, Process, VirtualLoop
from holdfast_lab.simulation.store import SteppedStore, StoreWorld

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from holdfast.jobs.worker import Worker

__all__ = ["Server", "ServerWorld"]

_POLL_SECONDS: Final = 45.0
_SWEEP_SECONDS: Final = 120.0


class ServerWorld(StoreWorld, Protocol):
    """What a server needs to know of the world it is in."""

    loop: VirtualLoop
    faults: Faults
    broker: SteppedBroker | None
    # How often a handler has answered.
    answers: int

    def now(self) -> datetime:
        """Return the server's clock."""

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""


class _Troubles:
    """What the world does to handlers and at fault points, in one process."""

    def __init__(self, world: ServerWorld, process: Process) -> None:
        self._world = world
        self._process = process

    async def reach(self, point: str) -> None:
        """Pass a fault point, or not."""
        world, process = self._world, self._process
        struck = world.faults.strike(point)
        if struck is None:
            return
        if struck == "pause":
            # Around the length of a lease: that is where it matters.
            seconds = world.faults.between(5.0, 70.0)
            world.note(process.name, f"pause at {point} for {seconds:.0f} s")
            process.pause(seconds)
            await asyncio.sleep(0)
            return
        world.note(process.name, f"killed at {point}")
        process.kill()
        await world.loop.create_future()  # never comes: nobody is left to go on

    async def handler(self) -> None:
        """Trouble a guarded handler."""
        faults = self._world.faults
        if faults.happens("server error", None):
            self._world.note(self._process.name, "handler fails")
            dice = faults.between(0, 1)
            if dice < 0.3:  # noqa: PLR2004
                raise RateLimitedError("slow down", retry_after_seconds=int(faults.between(1, 90)))
            if dice < 0.6:  # noqa: PLR2004
                raise ServiceError(503, "torture.busy", "come again")
            raise RuntimeError("the handler broke")
        if faults.happens("slow handler"):
            await asyncio.sleep(faults.between(1.0, 25.0))
        else:
            await asyncio.sleep(0.001)

    async def job(self) -> None:
        """Trouble a job's handler."""
        faults = self._world.faults
        if faults.happens("job error"):
            self._world.note(self._process.name, "job fails")
            raise RuntimeError("the job broke")
        if faults.happens("slow job"):
            await asyncio.sleep(faults.between(1.0, 70.0))

    def number(self) -> int:
        """Return a number that comes once."""
        self._world.answers += 1
        return self._world.answers


class _ServerClock:
    """The server's clock: nobody sets it."""

    def __init__(self, world: ServerWorld) -> None:
        self.now = world.now
        self.monotonic = world.loop.time


class Server:
    """One process of the server, restarted some time after each death."""

    def __init__(self, world: ServerWorld, name: str, *, serves: bool, works: bool) -> None:
        """Start."""
        self._world = world
        self._name = name
        self.serves, self._works = serves, works
        self.app: Callable[..., Awaitable[None]] | None = None
        self.process = Process(world.loop, name)
        self.start()

    def start(self) -> None:
        """Begin a new life."""
        self.process = Process(self._world.loop, self._name)
        self.process.after_death.append(self._restart_later)
        self.process.spawn(self._live())

    def _restart_later(self) -> None:
        world = self._world
        self.app = None
        seconds = world.faults.between(0.5, 20.0)
        world.loop.call_later(seconds, self.start, context=OUTSIDE.copy())

    async def _live(self) -> None:
        world, process = self._world, self.process
        troubles = _Troubles(world, process)
        holdfast = Holdfast(
            SteppedStore(world, process),
            identify=identify,
            clock=_ServerClock(world),
            sweep_every_seconds=_SWEEP_SECONDS if self.serves else None,
            faults=troubles,
        )
        app = guard_service(holdfast, troubles)
        register_jobs(holdfast, troubles)
        await holdfast.open()
        if self._works:
            await self._start_worker(holdfast, troubles)
        world.note(self._name, "up")
        if self.serves:
            self.app = app

    async def _start_worker(self, holdfast: Holdfast, troubles: Any) -> None:
        world = self._world
        options: dict[str, Any] = {}
        if world.broker is not None:
            options["engine"] = stepped_jetstream(world.broker, self.process, faults=troubles)
        worker: Worker = holdfast.worker(
            name=self._name,
            concurrency=4,
            poll_seconds=_POLL_SECONDS,
            faults=troubles,
            **options,
        )
        await worker.start()
