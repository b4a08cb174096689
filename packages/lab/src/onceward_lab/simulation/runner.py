"""Runs many seeds in several processes, and sums up their results."""

import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import msgspec

from onceward_lab.simulation.faults import POINTS
from onceward_lab.simulation.faulty_vfs import disable_sqlite_mutexes
from onceward_lab.simulation.scenario import Outcome, run_seed
from onceward_lab.simulation.shrinking import shrink
from onceward_lab.simulation.templates import Templates, shared_directory

__all__ = [
    "FULL_COVERAGE_SEEDS",
    "Failure",
    "Summary",
    "block_sigint",
    "describe",
    "end_with_parent",
    "infrequent_gc",
    "replay",
    "run_batch",
    "simulate",
]

FULL_COVERAGE_SEEDS: Final = 2000
"""A run of at least this many seeds must inject a fault at every fault point."""

_BATCH: Final = 10
_MAX_SHOWN_FAILURES: Final = 5
"""Failing seeds that are shrunk and reported in full; the others are counted."""


class Failure(msgspec.Struct):
    """A seed that violated a guarantee, and its timeline."""

    seed: int
    violations: list[str]
    timeline: list[str]
    faults_left: int


class Summary(msgspec.Struct, kw_only=True):
    """The sum of many seeds."""

    seeds: int = 0
    failing: list[int] = msgspec.field(default_factory=list)
    failures: list[Failure] = msgspec.field(default_factory=list)
    actions: int = msgspec.field(default=0, name="taps")
    requests: int = 0
    effects: int = 0
    jobs: int = 0
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    points: dict[str, int] = msgspec.field(default_factory=dict)
    struck: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Add the result of one seed."""
        self.seeds += 1
        self.actions += outcome.actions
        self.requests += outcome.requests
        self.effects += outcome.effects
        self.jobs += outcome.jobs
        self.virtual_seconds += outcome.virtual_seconds
        if outcome.violations:
            self.failing.append(outcome.seed)
        for total, seen in (
            (self.faults, outcome.faults),
            (self.points, outcome.points),
            (self.struck, outcome.struck),
        ):
            for name, count in seen.items():
                total[name] = total.get(name, 0) + count

    def join(self, other: "Summary") -> None:
        """Add the summary of another process."""
        self.seeds += other.seeds
        self.actions += other.actions
        self.requests += other.requests
        self.effects += other.effects
        self.jobs += other.jobs
        self.virtual_seconds += other.virtual_seconds
        self.failing += other.failing
        self.failures += other.failures
        for name in ("faults", "points", "struck"):
            setattr(self, name, dict(Counter(getattr(self, name)) + Counter(getattr(other, name))))

    @property
    def unvisited(self) -> list[str]:
        """Fault points without an injected fault."""
        return [point for point in POINTS if not self.struck.get(point)]

    @property
    def passed(self) -> bool:
        """True if no guarantee was violated and, in a long run, every fault point had a fault."""
        return not self.failing and (self.seeds < FULL_COVERAGE_SEEDS or not self.unvisited)

    def hits(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how often each fault point was reached, and how often a fault was injected."""
        return (
            {point: self.points.get(point, 0) for point in POINTS},
            {point: self.struck.get(point, 0) for point in POINTS},
        )


def simulate(
    seeds: Iterator[int],
    *,
    jobs: int,
    deadline: float | None = None,
    on_progress: Callable[[Summary], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Summary:
    """Run seeds in ``jobs`` processes, until the deadline or until ``should_stop`` returns True.

    Batches that have started are completed.
    """
    total = Summary()
    began = time.monotonic()
    # The order of sets of strings depends on it: a seed must be the same in every process.
    os.environ["PYTHONHASHSEED"] = "0"
    workers: dict[Connection, Any] = {}

    def is_over() -> bool:
        return should_stop() or (deadline is not None and time.monotonic() >= deadline)

    with shared_directory() as directory:
        try:
            for _ in range(jobs):
                connection, process = _start(directory)
                workers[connection] = process
                _send_next(connection, () if is_over() else islice(seeds, _BATCH), workers)
            while workers:
                ready: Any = wait(list(workers))
                for connection in ready:
                    total.join(msgspec.msgpack.decode(connection.recv_bytes(), type=Summary))
                    total.seconds = time.monotonic() - began
                    on_progress(total)
                    _send_next(connection, () if is_over() else islice(seeds, _BATCH), workers)
        finally:
            for process in workers.values():
                process.kill()
                process.join()
    total.seconds = time.monotonic() - began
    total.failing.sort()
    total.failures.sort(key=lambda failure: failure.seed)
    return total


def _start(directory: str) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_serve_batches, args=(child_end, directory), daemon=True)
    with block_sigint():
        process.start()
    child_end.close()
    return parent_end, process


def _send_next(
    connection: Connection, seeds: Iterable[int], workers: dict[Connection, Any]
) -> None:
    batch = list(seeds)
    connection.send(batch)
    if not batch:
        process = workers.pop(connection)
        process.join()
        connection.close()


def replay(seed: int) -> Failure:
    """Run one seed again, in a process like those of ``simulate``."""
    os.environ["PYTHONHASHSEED"] = "0"
    with block_sigint():
        pool = multiprocessing.get_context("spawn").Pool(1)
    with pool:
        return pool.apply(_replay, (seed,))


def _replay(seed: int) -> Failure:
    disable_sqlite_mutexes()
    with Templates() as templates:
        return describe(run_seed(seed, templates))


def _serve_batches(connection: Connection, directory: str) -> None:
    """Receive batches of seeds and send summaries, until a batch is empty."""
    # The parent handles signals and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    disable_sqlite_mutexes()
    shown = 0
    with infrequent_gc(), Templates(directory) as templates:
        while batch := connection.recv():
            summary = run_batch(batch, templates, failures=_MAX_SHOWN_FAILURES - shown)
            shown += len(summary.failures)
            connection.send_bytes(msgspec.msgpack.encode(summary))


def run_batch(seeds: Any, templates: Templates, *, failures: int = _MAX_SHOWN_FAILURES) -> Summary:
    """Run seeds in this process."""
    summary = Summary()
    for seed in seeds:
        try:
            outcome = run_seed(seed, templates)
        except Exception as error:  # noqa: BLE001 - reported as a failing seed
            summary.seeds += 1
            summary.failing.append(seed)
            message = f"the simulation itself failed: {type(error).__name__}: {error}"
            summary.failures.append(Failure(seed, [message], [], 0))
            continue
        summary.add(outcome)
        if outcome.violations and len(summary.failures) < failures:
            summary.failures.append(describe(shrink(outcome, templates)))
    return summary


def describe(outcome: Outcome) -> Failure:
    """Return the report of a seed, with a formatted timeline."""
    return Failure(
        seed=outcome.seed,
        violations=[str(violation) for violation in outcome.violations],
        timeline=[f"{at:10.3f}  {source:<10} {event}" for at, source, event in outcome.timeline],
        faults_left=sum(outcome.faults.values()),
    )


def end_with_parent() -> None:
    """End this process when its parent has ended, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    assert parent is not None  # noqa: S101 - called in a child process

    def wait_for_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


@contextmanager
def block_sigint() -> Iterator[None]:
    """Block SIGINT in processes and threads that are started meanwhile; the parent handles it.

    They inherit the mask. Without it, Ctrl-C during their imports prints a traceback.
    """
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def infrequent_gc() -> Iterator[None]:
    """Collect garbage rarely, and exclude the imported modules."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
