"""Operators, who pause and resume the queue of the jobs and cancel waiting jobs, in some worlds."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from sqlite3 import Connection
from typing import Final, NamedTuple, Protocol

from onceward.errors import StoreError
from onceward.jobs.admin import JobAdmin, PausedQueues
from onceward_lab.simulation.faults import Faults
from onceward_lab.simulation.loop import Process, VirtualLoop
from onceward_lab.simulation.store import SimulatedStore, StoreWorld

__all__ = ["Operators"]

_SHARE: Final = 0.1
_QUEUE: Final = "default"
_RETRY_SECONDS: Final = 1.0
_CANCEL_SHARE: Final = 0.4
_WHO: Final = {"actor": "operator", "reason": "simulated"}


class OperatorWorld(StoreWorld, Protocol):
    """The parts of the world that operators use."""

    loop: VirtualLoop
    faults: Faults

    def unix_time(self) -> float:
        """Return the true time."""

    def note(self, source: str, event: str) -> None:
        """Append an event to the timeline."""


class _Pause(NamedTuple):
    """When a queue was certainly paused, as Unix time."""

    after: float
    until: float


class Operators:
    """One process that acts on the jobs. Records what it has done for the checker."""

    def __init__(self, world: OperatorWorld, reader: Connection, rng: Random) -> None:
        self._world = world
        self._reader = reader
        self._rng = rng
        self.process = Process(world.loop, "operator")
        # Tenant and id of the jobs that were cancelled while they waited.
        self.cancelled: list[tuple[str, str]] = []
        self._pauses: list[_Pause] = []

    @classmethod
    def maybe(cls, world: OperatorWorld, reader: Connection, rng: Random) -> "Operators | None":
        """Decide whether operators act; in most seeds they do not."""
        return cls(world, reader, rng) if rng.random() < _SHARE else None

    def schedule(self) -> None:
        """Begin to act."""
        self.process.spawn(self._act())

    def started_while_paused(self, started_at: float) -> bool:
        """Return whether a claim at this time was made while the queue was paused."""
        return any(pause.after < started_at < pause.until for pause in self._pauses)

    async def _act(self) -> None:
        store = SimulatedStore(self._world, self.process)
        await self._until_done(store.open)
        queues, admin = PausedQueues(store, store.notifier().notify), JobAdmin(store)
        while not self._world.faults.is_stopped:
            await asyncio.sleep(self._between(1.0, 40.0))
            if self._rng.random() < _CANCEL_SHARE:
                await self._cancel(admin)
                continue
            await self._until_done(lambda: queues.pause(_QUEUE, **_WHO))
            after = self._world.unix_time()
            self._world.note("operator", "pauses the queue")
            for _ in range(self._rng.randrange(3)):
                await asyncio.sleep(self._between(1.0, 40.0))
                await self._cancel(admin)
            await asyncio.sleep(self._between(1.0, 60.0))
            self._pauses.append(_Pause(after, self._world.unix_time()))
            await self._until_done(lambda: queues.resume(_QUEUE, **_WHO))
            self._world.note("operator", "resumes the queue")

    async def _cancel(self, admin: JobAdmin) -> None:
        """Try to cancel a job; it may have been claimed since it was chosen."""
        rows = self._reader.execute("SELECT tenant, id FROM onceward_jobs ORDER BY seq").fetchall()
        if not rows:
            return
        tenant, job_id = self._rng.choice(rows)
        try:
            is_cancelled = await admin.cancel(job_id, tenant=tenant, **_WHO)
        except StoreError:  # another process holds the lock
            return
        if is_cancelled:
            self._world.note("operator", f"cancels job {job_id}")
            self.cancelled.append((tenant, job_id))

    async def _until_done(self, action: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await action()
            except StoreError:
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                return

    def _between(self, low: float, high: float) -> float:
        return low + (high - low) * self._rng.random()
