"""The worker: fetches jobs, renews their leases, executes them concurrently, stops cleanly."""

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypedDict, Unpack

from onceward.errors import ConfigurationError, StoreError
from onceward.jobs.completer import Completer
from onceward.jobs.engines import SqlEngine
from onceward.jobs.enqueue import MAX_PAYLOAD_BYTES
from onceward.jobs.executor import ExecutorConfig, JobExecutor
from onceward.jobs.job import Lease, LeasedJob
from onceward.jobs.job_store import JobStore
from onceward.jobs.periodic import PeriodicEnqueuer
from onceward.jobs.registry import JobRegistry
from onceward.observability.noop import NullJobMetrics, NullStoreMetrics
from onceward.observability.traces import Spans
from onceward.ports import (
    BrokerEngine,
    BrokerMetrics,
    Clock,
    Delivery,
    Engine,
    FaultPoints,
    JobMetrics,
    Notifier,
    Store,
    StoreMetrics,
)
from onceward.stores.parts import JOBS
from onceward_protocol.clock import SystemClock
from onceward_protocol.ids import new_request_id

__all__ = ["EngineMaker", "Worker", "WorkerOptions"]

# Makes the engine of one worker from its job store, queues, name and lease time in seconds.
EngineMaker = Callable[[JobStore, Sequence[str], str, float], Engine]


class WorkerOptions(TypedDict, total=False):
    """Options of ``Worker`` and of ``Onceward.worker``."""

    # The queues whose jobs it runs; those of the registered handlers by default.
    queues: Sequence[str] | None
    # How jobs are delivered: by the database (default), or ``jetstream(url)``.
    engine: EngineMaker | None
    # Wakes the worker when this process has enqueued a job.
    notifier: Notifier | None
    # The first part of the worker's name; the host's name by default.
    name: str | None
    # Jobs that run at the same time; 16 by default.
    concurrency: int
    # Seconds after which another worker may take the job of one that does not renew its lease; 30
    # by default.
    lease_seconds: float
    # Seconds between looks into the database when no notification comes; 1 by default, and at
    # least.
    poll_seconds: float
    # Seconds that ``stop`` waits for running jobs; 30 by default.
    shutdown_seconds: float
    # The limit for payloads of jobs that jobs enqueue; 256 KiB by default.
    max_payload_bytes: int
    # Counts jobs.
    metrics: JobMetrics | None
    # The time, which tests may replace.
    clock: Clock | None
    # OpenTelemetry spans; None without.
    spans: Spans | None
    # For tests.
    faults: FaultPoints | None


_DEFAULTS: Final = WorkerOptions(
    concurrency=16,
    lease_seconds=30.0,
    poll_seconds=1.0,
    shutdown_seconds=30.0,
    max_payload_bytes=MAX_PAYLOAD_BYTES,
)
# Leases are renewed before half of their time has passed, so that one renewal may fail.
_RENEW_AFTER_SHARE: Final = 0.3
_ERROR_SECONDS: Final = 1.0
_RELEASE_SECONDS: Final = 10.0
_HURRIED_RELEASE_SECONDS: Final = 1.0
_IDLE_SECONDS: Final = 0.05
# A claim of fewer jobs than this costs nearly as much as one of this many.
_MIN_BATCH: Final = 64
# Handlers in a transaction hold a connection each; renewals and completions need some as well.
_HANDLERS_SHARE: Final = 0.75
# A job that was lost so often beside other jobs is run alone: it may be what ends the worker.
_MAX_LOST_BESIDE_OTHERS: Final = 2

_log = logging.getLogger("onceward.jobs")


class Worker:
    """Executes jobs of the queues that a registry has handlers for, until it is stopped.

    ::

        worker = Worker(store, jobs)
        await worker.start()
        …
        await worker.stop()
    """

    def __init__(
        self, store: Store, registry: JobRegistry, **options: Unpack[WorkerOptions]
    ) -> None:
        """Work on the jobs of ``store``, which ``start`` opens. Raises ``ConfigurationError``."""
        if unknown := options.keys() - WorkerOptions.__annotations__.keys():
            raise TypeError(f"Worker() got an unexpected keyword argument {min(unknown)!r}")
        chosen = _DEFAULTS | options
        queues, engine = chosen.get("queues"), chosen.get("engine")
        metrics = chosen.get("metrics")
        self._concurrency, self._lease_seconds = chosen["concurrency"], chosen["lease_seconds"]
        self._poll_seconds = chosen["poll_seconds"]
        self._shutdown_seconds = chosen["shutdown_seconds"]
        if self._concurrency < 1:
            raise ConfigurationError(f"concurrency is {self._concurrency}, it must be at least 1")
        if not self._lease_seconds > 0:
            raise ConfigurationError("lease_seconds must be above 0")
        if not self._poll_seconds >= 1:
            raise ConfigurationError("poll_seconds must be at least 1")
        store.schema.want(JOBS)
        # Jobs in the database.
        self.job_store = JobStore(store)
        name = chosen.get("name") or socket.gethostname()
        # Unique for every start: a restarted worker must not own the leases of its predecessor.
        self.name = f"{name}-{os.getpid()}-{new_request_id()[:8]}"
        # The queues whose jobs it runs.
        self.queues = tuple(queues) if queues is not None else registry.queues
        self._clock = chosen.get("clock") or SystemClock()
        make_engine = engine or partial(SqlEngine, notifier=chosen.get("notifier"))
        # Delivers jobs.
        self.engine: Engine = make_engine(
            self.job_store, self.queues, self.name, self._lease_seconds
        )
        if isinstance(self.engine, BrokerEngine) and isinstance(metrics, BrokerMetrics):
            self.engine.report_to(metrics)
        self._completer = Completer(self.job_store, worker=self.name)
        self._periodic = PeriodicEnqueuer(
            self.job_store, registry, queues=self.queues, notify=self.engine.notify
        )
        self._config = ExecutorConfig(
            job_store=self.job_store,
            registry=registry,
            defaults_for=registry.defaults_for,
            engine=self.engine,
            metrics=metrics or NullJobMetrics(),
            store_metrics=metrics if isinstance(metrics, StoreMetrics) else NullStoreMetrics(),
            clock=self._clock,
            worker_name=self.name,
            lease_seconds=self._lease_seconds,
            max_payload_bytes=chosen["max_payload_bytes"],
            transaction_slots=_transaction_slots(store),
            spans=chosen.get("spans"),
            faults=chosen.get("faults"),
            complete=self._complete,
            abandon=self._abandon,
        )
        self._executors: dict[asyncio.Task[None], JobExecutor] = {}
        # How many of these have run and only wait for the shared commit of their completions.
        self._completing = 0
        self._abandoned: set[asyncio.Task[Any]] = set()
        # The job that was claimed while no other was running, if it still runs.
        self._lone: JobExecutor | None = None
        self._suspects: set[JobExecutor] = set()
        self._isolation = asyncio.Lock()
        self._marking: set[asyncio.Task[None]] = set()
        self._slot_freed = asyncio.Event()
        # At the last fetch.
        self._full_queues: frozenset[str] = frozenset()
        self._is_stopping = False
        self._is_releasing = False
        self._hurried = asyncio.Event()
        self._taken = 0
        self._loops: list[asyncio.Task[None]] = []

    # -- start and stop -------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the store if need be, connect the engine and start to fetch jobs."""
        await self.job_store.store.open()
        self._is_stopping = self._is_releasing = False
        self._hurried.clear()
        await self.engine.open()
        self._loops = [
            asyncio.create_task(self._fetch(), name="onceward-jobs-fetch"),
            asyncio.create_task(self._renew(), name="onceward-jobs-renew"),
            asyncio.create_task(self._periodic.run(), name="onceward-jobs-periodic"),
        ]

    async def stop(self) -> None:
        """Fetch no more jobs, wait ``shutdown_seconds`` for running ones, release the rest."""
        if not self._loops:
            return
        self._is_stopping = True
        fetch, renew, periodic = self._loops
        self._loops = []
        await _cancel(periodic)
        self.engine.wake()
        self._slot_freed.set()
        # Not cancelled: jobs it has just claimed would wait until their leases expire. On SQLite
        # it may itself wait for a handler that has written.
        await self._wait_for_all(fetch, self._shutdown_seconds, unless=self._hurried)
        self._is_releasing = True
        for executor in list(self._executors.values()):
            executor.release()
        is_hurried = self._hurried.is_set()
        await self._wait_for_all(
            fetch, _HURRIED_RELEASE_SECONDS if is_hurried else _RELEASE_SECONDS
        )
        await _cancel(renew)
        for task in [fetch, *self._executors, *self._abandoned, *self._marking]:
            task.cancel()
        await self.engine.close()

    def hurry(self) -> None:
        """Make a ``stop`` under way release the running jobs now, without waiting for them."""
        self._hurried.set()

    async def until_idle(self) -> None:
        """Return when no job of its queues is due and none runs here. Later retries may wait."""
        await self._periodic.enqueue_due()
        while True:
            taken = self._taken
            due_in = await self.job_store.due_in(self.queues)
            await asyncio.sleep(_IDLE_SECONDS)
            is_quiet = not self._executors and taken == self._taken
            if is_quiet and (due_in is None or due_in > _IDLE_SECONDS):
                return

    async def _wait_for_all(
        self, fetch: asyncio.Task[None], seconds: float, *, unless: asyncio.Event | None = None
    ) -> None:
        """Wait until the fetch loop and all executors have ended, for at most ``seconds``.

        Returns early once ``unless`` is set.
        """
        deadline = self._clock.monotonic() + seconds
        interrupt = [] if unless is None else [asyncio.create_task(unless.wait())]
        try:
            while running := [task for task in (fetch, *self._executors) if not task.done()]:
                left = deadline - self._clock.monotonic()
                if left <= 0 or any(task.done() for task in interrupt):
                    return
                await asyncio.wait(
                    [*running, *interrupt], timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
        finally:
            for task in interrupt:
                task.cancel()

    @property
    def running(self) -> int:
        """How many jobs are being executed."""
        return len(self._executors)

    # -- callbacks of the executors -------------------------------------------------------------

    async def _complete(self, lease: Lease, result: str | None) -> None:
        """Commit the completion of a job that wrote nothing; its slot is free meanwhile."""
        self._completing += 1
        self._slot_freed.set()
        try:
            await self._completer.add(lease, result)
        finally:
            self._completing -= 1

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a handler that does not end; it can no longer write anything."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    # -- loops ----------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        # Of many slots, at most half are filled at once: the others run while these are claimed.
        batch = max(_MIN_BATCH, self._concurrency // 2)
        while not self._is_stopping:
            free = self._free_slots()
            if free <= 0:
                self._slot_freed.clear()
                await self._slot_freed.wait()
                continue
            try:
                alone = not self._executors
                most, full = self._queue_shares()
                skipped: dict[str, Any] = {"skipped": full} if full else {}
                deliveries = await self.engine.take(
                    min(free, batch, most), self._poll_seconds, alone=alone, **skipped
                )
            except StoreError as error:
                _log.warning("jobs cannot be fetched, trying again: %s", error)
                await asyncio.sleep(_ERROR_SECONDS)
                continue
            except Exception:  # noqa: BLE001 - an engine may raise anything; the loop must go on
                _log.exception("jobs cannot be fetched, trying again")
                await asyncio.sleep(_ERROR_SECONDS)
                continue
            if deliveries:
                self._taken += len(deliveries)
                await self._mark_shared(deliveries, claimed_alone=alone)
            for delivery in deliveries:
                executor = self._execute(delivery)
                if alone and len(deliveries) == 1:
                    self._lone = executor

    def _free_slots(self) -> int:
        """Count free slots. Jobs that are being completed use none, up to ``concurrency``."""
        if self._suspects:
            return 0
        completing = min(self._completing, self._concurrency)
        return self._concurrency - len(self._executors) + completing

    def _queue_shares(self) -> tuple[int, list[str]]:
        """Return how many jobs any queue may still have here, and the queues that have theirs.

        A quarter of the slots is left to other queues, whatever the jobs of one of them wait for.
        """
        share = self._concurrency - max(1, self._concurrency // 4)
        if len(self.queues) == 1 or share < 1:
            return self._concurrency, []
        running = Counter(executor.job.queue for executor in self._executors.values())
        full = [queue for queue, count in running.items() if count >= share]
        most = max((count for count in running.values() if count < share), default=0)
        self._full_queues = frozenset(full)
        return share - most, full

    def _execute(self, delivery: Delivery) -> JobExecutor:
        executor = JobExecutor(self._config, delivery)
        if _is_suspect(delivery.job):
            self._suspects.add(executor)
            task = asyncio.create_task(self._execute_alone(executor))
        else:
            task = asyncio.create_task(executor.run())
        self._executors[task] = executor
        task.add_done_callback(self._executed)
        if self._is_releasing:
            executor.release()
        return executor

    async def _execute_alone(self, executor: JobExecutor) -> None:
        """Execute a job that may end the worker, after all others. Nothing is fetched meanwhile."""
        async with self._isolation:
            others = [task for task, e in self._executors.items() if e not in self._suspects]
            if others:
                await asyncio.wait(others)
            if self._is_stopping:
                executor.release()
            elif not await self.job_store.mark_alone(
                [executor.job.lease], worker=self.name, alone=True
            ):
                executor.lose_lease()
            await executor.run()

    async def _mark_shared(self, deliveries: Sequence[Delivery], *, claimed_alone: bool) -> None:
        """Record, before new jobs start, that jobs claimed as alone are not alone any more.

        That is needed only if the worker had no job or one: a busy worker claims none as alone.
        """
        lone, self._lone = self._lone, None
        shared = []
        if claimed_alone and len(deliveries) > 1:
            shared = [delivery.job.lease for delivery in deliveries]
        elif lone is not None and lone in self._executors.values() and not _holds_write_lock(lone):
            shared = [lone.job.lease]
        if not shared:
            return
        task = asyncio.create_task(self._mark_these_shared(shared))
        self._marking.add(task)
        task.add_done_callback(self._marking.discard)
        # On SQLite it may wait for a handler that writes. The new jobs' leases are not renewed yet.
        await asyncio.wait({task}, timeout=self._lease_seconds * _RENEW_AFTER_SHARE)

    async def _mark_these_shared(self, leases: Sequence[Lease]) -> None:
        try:
            await self.job_store.mark_alone(leases, worker=self.name, alone=False)
        except StoreError as error:
            _log.warning("jobs cannot be marked as running beside others: %s", error)

    def _executed(self, task: asyncio.Task[None]) -> None:
        executor = self._executors.pop(task)
        self._suspects.discard(executor)
        self._slot_freed.set()
        if executor.job.queue in self._full_queues:  # the fetch loop waits for other queues only
            self._full_queues = frozenset()
            self.engine.wake()
        if not task.cancelled() and task.exception() is not None:
            _log.error("a job was aborted; its lease will expire", exc_info=task.exception())

    async def _renew(self) -> None:
        """Renew the leases of all running jobs; cancel those that have lost theirs."""
        renewal: asyncio.Task[None] | None = None
        while True:
            await asyncio.sleep(self._lease_seconds * _RENEW_AFTER_SHARE)
            executors = list(self._executors.values())
            writing = [executor for executor in executors if _holds_write_lock(executor)]
            for executor in writing:
                await self._renew_within(executor, executors)
            others = [executor for executor in executors if executor not in writing]
            # Never two at once; and on SQLite this may wait for the writers above.
            if others and (renewal is None or renewal.done()):
                renewal = asyncio.create_task(self._renew_these(others))

    async def _renew_these(self, executors: Sequence[JobExecutor]) -> None:
        for executor in executors:
            if executor.context is not None and executor.context.open_unit is not None:
                await executor.context.open_unit.keep_alive()
        try:
            held = await self.engine.renew([executor.delivery for executor in executors])
        except Exception as error:  # noqa: BLE001 - an engine may raise anything
            _log.warning("leases cannot be renewed, trying again: %s", error)
            return
        for executor in executors:
            lease = executor.job.lease
            if (lease.tenant, lease.job_id) not in held and executor in self._executors.values():
                executor.lose_lease()

    async def _renew_within(self, writing: JobExecutor, executors: Sequence[JobExecutor]) -> None:
        """Renew all leases in the transaction of a handler that holds SQLite's write lock."""
        unit = writing.context.open_unit if writing.context is not None else None
        if unit is not None:
            leases = [executor.job.lease for executor in executors]
            with suppress(Exception):  # the transaction has ended, or its next statement fails
                await self.job_store.renew_within(
                    unit, leases, worker=self.name, lease_seconds=self._lease_seconds
                )


def _is_suspect(job: LeasedJob) -> bool:
    """Return whether a job that will run was lost too often beside others."""
    is_run = not job.completed and job.attempt <= job.max_attempts
    return is_run and job.lost >= _MAX_LOST_BESIDE_OTHERS


def _holds_write_lock(executor: JobExecutor) -> bool:
    unit = executor.context.open_unit if executor.context is not None else None
    return unit is not None and unit.holds_write_lock


def _transaction_slots(store: Store) -> asyncio.Semaphore | None:
    """Limit the handlers in a transaction to a share of the store's connections, if it has any."""
    limit: int | None = getattr(store, "max_connections", None)
    return None if limit is None else asyncio.Semaphore(max(1, int(limit * _HANDLERS_SHARE)))


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
