"""Server processes, from start to kill: requests and jobs in one process, or in two."""

import asyncio
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from onceward.app import Onceward
from onceward.batch.options import BatchOptions
from onceward.config import GuardConfig
from onceward.errors import RateLimitedError, ServiceError, StoreUnavailableError
from onceward_lab.simulation.app import guard_service, identify, register_jobs
from onceward_lab.simulation.broker import SimulatedBroker, simulated_jetstream
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.loop import NO_PROCESS, Process, VirtualLoop
from onceward_lab.simulation.store import SimulatedStore, StoreWorld

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from onceward.jobs.worker import Worker

__all__ = ["InjectedError", "Server", "ServerWorld", "Stall"]

_POLL_SECONDS: Final = 45.0
_SWEEP_SECONDS: Final = 120.0


class Stall(NamedTuple):
    """A worker that is paused with a job, while its lease expires."""

    process: Process
    until: float


class ServerWorld(StoreWorld, Protocol):
    """The parts of the world that a server uses."""

    loop: VirtualLoop
    faults: Faults
    broker: SimulatedBroker | None
    # The number of responses that handlers have made.
    response_count: int
    # The worker that is paused, or was; None if there was none.
    stall: Stall | None
    # The batches that servers accept; None if they have no such endpoint.
    batch_options: BatchOptions | None

    def stalls_worker(self) -> bool:
        """Decide whether to pause a worker that has claimed a job."""

    def now(self) -> datetime:
        """Return the server's clock."""

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""


class InjectedError(RuntimeError):
    """Raised by a handler on purpose: it is no error of the code under test."""


class _FaultInjector:
    """Injects faults into the handlers and at the fault points of one process."""

    def __init__(self, world: ServerWorld, process: Process) -> None:
        self._world = world
        self._process = process

    async def reach(self, point: str) -> None:
        """Continue, pause the process, or kill it."""
        world, process = self._world, self._process
        if point == "job_after_claim" and world.stalls_worker():
            # Longer than a lease, and than others wait before they look for jobs.
            seconds = world.faults.between(31.0, 80.0)
            world.note(process.name, f"stalled at {point} for {seconds:.0f} s")
            world.stall = Stall(process, world.loop.time() + seconds)
            process.pause(seconds)
            await asyncio.sleep(0)
            return
        fault = world.faults.inject(point)
        if fault is None:
            return
        if fault == "pause":
            # About as long as a lease, so that some leases expire.
            seconds = world.faults.between(5.0, 70.0)
            world.note(process.name, f"pause at {point} for {seconds:.0f} s")
            process.pause(seconds)
            await asyncio.sleep(0)
            return
        world.note(process.name, f"killed at {point}")
        process.kill()
        await world.loop.create_future()  # never done: the process is dead

    async def handler(self) -> None:
        """Delay a guarded handler, or raise."""
        faults = self._world.faults
        if faults.happens("server error", None):
            self._world.note(self._process.name, "handler fails")
            draw = faults.between(0, 1)
            if draw < 0.3:  # noqa: PLR2004
                raise RateLimitedError(
                    "too many requests", retry_after_seconds=int(faults.between(1, 90))
                )
            if draw < 0.6:  # noqa: PLR2004
                raise ServiceError(503, "simulation.busy", "the service is busy")
            raise InjectedError("injected error of the handler")
        if faults.happens("slow handler"):
            await asyncio.sleep(faults.between(1.0, 25.0))
        else:
            await asyncio.sleep(0.001)

    async def job(self) -> None:
        """Delay the handler of a job, or raise."""
        faults = self._world.faults
        if faults.happens("job error"):
            self._world.note(self._process.name, "job fails")
            raise RuntimeError("injected error of the job")
        stall, now = self._world.stall, self._world.loop.time()
        if stall is not None and stall.process is not self._process and now < stall.until:
            # Another worker has the job: it is at work when the stalled one continues.
            await asyncio.sleep(stall.until - now + faults.between(1.0, 10.0))
        elif faults.happens("slow job"):
            await asyncio.sleep(faults.between(1.0, 70.0))

    def unique_number(self) -> int:
        """Return a number that is never returned again."""
        self._world.response_count += 1
        return self._world.response_count


class _ServerClock:
    """The server's clock, which shows the true time."""

    def __init__(self, world: ServerWorld) -> None:
        self.now = world.now
        self.monotonic = world.loop.time


class Server:
    """One process of the server, restarted some seconds after each kill."""

    def __init__(
        self, world: ServerWorld, name: str, *, handles_requests: bool, runs_jobs: bool
    ) -> None:
        self._world = world
        self._name = name
        self.handles_requests, self.runs_jobs = handles_requests, runs_jobs
        self.app: Callable[..., Awaitable[None]] | None = None
        self.process = Process(world.loop, name)
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.process = Process(self._world.loop, self._name)
        self.process.after_kill.append(self._restart_later)
        self.process.spawn(self._run())

    def _restart_later(self) -> None:
        world = self._world
        self.app = None
        seconds = world.faults.between(0.5, 20.0)
        world.loop.call_later(seconds, self.start, context=NO_PROCESS.copy())

    async def _run(self) -> None:
        world, process = self._world, self.process
        faults = _FaultInjector(world, process)
        onceward = Onceward(
            SimulatedStore(world, process),
            identify=identify,
            config=GuardConfig(
                clock=_ServerClock(world),
                sweep_every_seconds=_SWEEP_SECONDS if self.handles_requests else None,
                audit_seal_seconds=None,
                faults=faults,
            ),
        )
        app = guard_service(onceward, faults, world.batch_options)
        register_jobs(onceward, faults)
        try:
            await onceward.open()
        except StoreUnavailableError:  # another process, which is paused, has the write lock
            world.note(self._name, "cannot start")
            process.kill()
            await world.loop.create_future()  # never done: the process is dead
        if self.runs_jobs:
            await self._start_worker(onceward, faults)
        world.note(self._name, "up")
        if self.handles_requests:
            self.app = app

    async def _start_worker(self, onceward: Onceward, faults: Any) -> None:
        world = self._world
        options: dict[str, Any] = {}
        if world.broker is not None:
            options["engine"] = simulated_jetstream(world.broker, self.process, faults=faults)
        worker: Worker = onceward.worker(
            name=self._name,
            concurrency=4,
            poll_seconds=_POLL_SECONDS,
            faults=faults,
            **options,
        )
        await worker.start()
