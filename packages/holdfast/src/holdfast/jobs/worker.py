"""The worker: takes jobs, keeps their leases alive, runs them side by side, and ends well."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from holdfast.clock import SystemClock
from holdfast.core.job import Lease
from holdfast.errors import ConfigurationError, StoreError
from holdfast.ids import new_request_id
from holdfast.jobs.completer import Completions
from holdfast.jobs.engines.sql import SqlEngine
from holdfast.jobs.enqueue import MAX_PAYLOAD_BYTES
from holdfast.jobs.executor import Attempt
from holdfast.jobs.job_store import JobStore
from holdfast.jobs.noop_metrics import NullJobMetrics
from holdfast.jobs.periodic import PeriodicWork
from holdfast.jobs.registry import JobRegistry
from holdfast.ports import Clock, Delivery, Engine, FaultPoints, JobMetrics, Notifier, Store

__all__ = ["EngineMaker", "Worker"]

# Makes the engine of one worker: its table, its queues, its name and the length of its leases.
EngineMaker = Callable[[JobStore, Sequence[str], str, float], Engine]

# Renewed long before half of it is gone, so that one renewal may fail.
_RENEW_AFTER_SHARE: Final = 0.3
_TROUBLE_SECONDS: Final = 1.0
_GIVE_BACK_SECONDS: Final = 10.0
# A statement for fewer jobs than this costs nearly as much.
_FEW: Final = 64
# Handlers in a transaction hold a connection each; to renew and to end jobs takes some, too.
_HANDLERS_SHARE: Final = 0.75

_log = logging.getLogger("holdfast.jobs")


class Worker:
    """Works the queues of a registry's handlers until it is stopped.

    ::

        worker = Worker(store, jobs)
        await worker.start()
        …
        await worker.stop()
    """

    def __init__(
        self,
        store: Store,
        registry: JobRegistry,
        *,
        queues: Sequence[str] | None = None,
        engine: EngineMaker | None = None,
        notifier: Notifier | None = None,
        name: str | None = None,
        concurrency: int = 16,
        lease_seconds: float = 30.0,
        poll_seconds: float = 1.0,
        shutdown_seconds: float = 30.0,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        metrics: JobMetrics | None = None,
        clock: Clock | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        """Take a store that is open, or will be before ``start``."""
        if concurrency < 1:
            raise ConfigurationError("a worker should have room for at least one job")
        if not lease_seconds > 0:
            raise ConfigurationError("a lease should be longer than 0 seconds")
        if not poll_seconds >= 1:
            raise ConfigurationError("a worker should not look more often than once a second")
        self.registry = registry
        self.table = JobStore(store)
        # Unique for every start: a name that came back would hold its dead namesake's leases.
        self.name = f"{name or socket.gethostname()}-{os.getpid()}-{new_request_id()[:8]}"
        self.queues = tuple(queues) if queues is not None else registry.queues
        self.concurrency = concurrency
        self.lease_seconds = lease_seconds
        self.max_payload_bytes = max_payload_bytes
        self.metrics: JobMetrics = metrics or NullJobMetrics()
        self.clock = clock or SystemClock()
        self.engine: Engine = (
            SqlEngine(
                self.table,
                self.queues,
                worker=self.name,
                lease_seconds=lease_seconds,
                notifier=notifier,
            )
            if engine is None
            else engine(self.table, self.queues, self.name, lease_seconds)
        )
        self.completions = Completions(self.table, worker=self.name)
        self.transaction_turns = _turns(store)
        self._periodic = PeriodicWork(
            self.table, registry, queues=self.queues, notify=self.engine.notify
        )
        self._poll_seconds = poll_seconds
        self._shutdown_seconds = shutdown_seconds
        self._faults = faults
        self._attempts: dict[asyncio.Task[None], Attempt] = {}
        # Of these, how many have run and only wait for the shared commit of their markers.
        self._marking = 0
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._slot_freed = asyncio.Event()
        self._is_stopping = False
        self._gives_back = False
        self._loops: list[asyncio.Task[None]] = []

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to work."""
        self._is_stopping = self._gives_back = False
        await self.engine.open()
        self._loops = [
            asyncio.create_task(self._fetch(), name="holdfast-jobs-fetch"),
            asyncio.create_task(self._renew(), name="holdfast-jobs-renew"),
            asyncio.create_task(self._periodic.run(), name="holdfast-jobs-periodic"),
        ]

    async def stop(self) -> None:
        """Take nothing more, finish what is running, give back what does not end in time."""
        if not self._loops:
            return
        self._is_stopping = True
        fetch, renew, periodic = self._loops
        self._loops = []
        await _cancelled(periodic)
        self.engine.wake()
        self._slot_freed.set()
        # Not cancelled: what it has just claimed would wait for its lease to end. On SQLite it may
        # itself wait for a handler that has written.
        await self._all_ended(fetch, self._shutdown_seconds)
        self._gives_back = True
        for attempt in list(self._attempts.values()):
            attempt.give_back()
        await self._all_ended(fetch, _GIVE_BACK_SECONDS)
        await _cancelled(renew)
        for task in [fetch, *self._attempts, *self._left_behind]:
            task.cancel()
        await self.engine.close()

    async def _all_ended(self, fetch: asyncio.Task[None], seconds: float) -> None:
        """Wait until nothing is fetched and nothing runs any more, at most so long."""
        deadline = self.clock.monotonic() + seconds
        while running := [task for task in (fetch, *self._attempts) if not task.done()]:
            left = deadline - self.clock.monotonic()
            if left <= 0:
                return
            await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    @property
    def running(self) -> int:
        """How many jobs run now."""
        return len(self._attempts)

    def wishes_of(self, job_type: str) -> dict[str, Any]:
        """Return what a job enqueues another of this type with, unless told otherwise."""
        return self.registry.wishes_of(job_type) | {"max_payload_bytes": self.max_payload_bytes}

    async def reach(self, point: str) -> None:
        """Pass a fault point."""
        if self._faults is not None:
            await self._faults.reach(point)

    async def mark(self, lease: Lease, result: str | None) -> None:
        """Write the marker of a job that wrote nothing else.

        Meanwhile another has its slot: the next jobs are taken while these are being committed.
        """
        self._marking += 1
        self._slot_freed.set()
        try:
            await self.completions.add(lease, result)
        finally:
            self._marking -= 1

    def leave_behind(self, task: asyncio.Task[Any]) -> None:
        """Keep a handler that does not end; it has nothing left to write with."""
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)

    # -- loops ----------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        while not self._is_stopping:
            free = self._free_slots()
            if free <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            try:
                # Not all at once: half run while the other half is taken and committed.
                most = max(_FEW, self.concurrency // 2)
                deliveries = await self.engine.take(min(free, most), self._poll_seconds)
            except StoreError as error:
                _log.warning("jobs cannot be taken, trying again: %s", error)
                await asyncio.sleep(_TROUBLE_SECONDS)
                continue
            except Exception:  # noqa: BLE001 - a broker's trouble has many names; none may end us
                _log.exception("jobs cannot be taken, trying again")
                await asyncio.sleep(_TROUBLE_SECONDS)
                continue
            for delivery in deliveries:
                self._begin(delivery)

    def _free_slots(self) -> int:
        """Count slots; those that are being marked take none, up to as many as there are slots."""
        return self.concurrency - len(self._attempts) + min(self._marking, self.concurrency)

    def _begin(self, delivery: Delivery) -> None:
        attempt = Attempt(self, delivery)
        task = asyncio.create_task(attempt.work())
        self._attempts[task] = attempt
        task.add_done_callback(self._ended)
        if self._gives_back:
            attempt.give_back()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._attempts[task]
        self._slot_freed.set()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a job ended badly; its lease will run out", exc_info=task.exception())

    async def _renew(self) -> None:
        """Keep the leases of all that runs; who has lost one is told to end."""
        elsewhere: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(self.lease_seconds * _RENEW_AFTER_SHARE)
            attempts = list(self._attempts.values())
            writing = [a for a in attempts if _holds_the_one_turn(a)]
            for attempt in writing:
                await self._renew_within(attempt, attempts)
            others = [a for a in attempts if a not in writing]
            # Never two at once; and on SQLite this may wait for the writers above.
            if others and (elsewhere is None or elsewhere.done()):
                elsewhere = asyncio.create_task(self._renew_these(others))

    async def _renew_these(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            unit = attempt.run.open_unit if attempt.run is not None else None
            if unit is not None:
                await unit.touch()
        try:
            held = await self.engine.renew([attempt.delivery for attempt in attempts])
        except Exception as error:  # noqa: BLE001 - a broker's trouble has many names
            _log.warning("leases cannot be renewed, trying again: %s", error)
            held = {(a.job.lease.tenant, a.job.lease.job_id) for a in attempts}
        for attempt in attempts:
            lease = attempt.job.lease
            if (lease.tenant, lease.job_id) not in held and attempt in self._attempts.values():
                attempt.lose()

    async def _renew_within(self, writing: Attempt, attempts: Sequence[Attempt]) -> None:
        """On SQLite a handler that has written keeps everyone else from writing, us included.

        So its transaction renews the leases of all.
        """
        unit = writing.run.open_unit if writing.run is not None else None
        if unit is not None:
            leases = [attempt.job.lease for attempt in attempts]
            with suppress(Exception):  # it has ended, or its next statement finds out
                await self.table.renew_within(
                    unit, leases, worker=self.name, lease_seconds=self.lease_seconds
                )


def _holds_the_one_turn(attempt: Attempt) -> bool:
    unit = attempt.run.open_unit if attempt.run is not None else None
    return unit is not None and getattr(unit, "has_begun", False)


def _turns(store: Store) -> asyncio.Semaphore | None:
    """Return as many turns as handlers may be in a transaction at once; None: as they like."""
    most: int | None = getattr(store, "max_connections", None)
    return None if most is None else asyncio.Semaphore(max(1, int(most * _HANDLERS_SHARE)))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
