"""Many seeds on many cores: one process each, and one sum of what they saw."""

import gc
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Final

import msgspec

from holdfast_lab.simulation.faults import POINTS
from holdfast_lab.simulation.faulty_vfs import do_without_locks
from holdfast_lab.simulation.scenario import Outcome, run_seed
from holdfast_lab.simulation.shrinking import shrink
from holdfast_lab.simulation.templates import Templates, place_for_worlds

__all__ = [
    "ENOUGH_SEEDS",
    "Failure",
    "Summary",
    "collecting_seldom",
    "deaf",
    "replay",
    "run_here",
    "simulate",
    "told",
]

ENOUGH_SEEDS: Final = 2000
"""In a run as long as this no fault point may stay unvisited."""

_BATCH: Final = 10
_MOST_FAILURES: Final = 5
"""Failing seeds that are shrunk and told in full; the rest is counted."""


class Failure(msgspec.Struct):
    """A seed that broke a promise, and the shortest way to it that was found."""

    seed: int
    violations: list[str]
    timeline: list[str]
    faults_left: int


class Summary(msgspec.Struct, kw_only=True):
    """What a campaign came to."""

    seeds: int = 0
    failing: list[int] = msgspec.field(default_factory=list)
    failures: list[Failure] = msgspec.field(default_factory=list)
    taps: int = 0
    requests: int = 0
    effects: int = 0
    jobs: int = 0
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    points: dict[str, int] = msgspec.field(default_factory=dict)
    struck: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count one seed."""
        self.seeds += 1
        self.taps += outcome.taps
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
        """Add what another process saw."""
        self.seeds += other.seeds
        self.taps += other.taps
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
        """Fault points at which nothing has happened."""
        return [point for point in POINTS if not self.struck.get(point)]

    @property
    def is_good(self) -> bool:
        """Whether all promises were kept, and in a run that is long enough, everywhere."""
        return not self.failing and (self.seeds < ENOUGH_SEEDS or not self.unvisited)

    def hits(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return how often each fault point was reached, and struck: all of them, in order."""
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
    stops: Callable[[], bool] = lambda: False,
) -> Summary:
    """Run seeds in so many processes until there are no more, or until the time is over.

    Or until ``stops`` says so: then the seeds that run are the last.
    """
    total = Summary()
    began = time.monotonic()
    # The order of sets of texts depends on it: with one value a seed is the same in every process.
    os.environ["PYTHONHASHSEED"] = "0"
    workers: dict[Connection, Any] = {}

    def is_over() -> bool:
        return stops() or (deadline is not None and time.monotonic() >= deadline)

    with place_for_worlds() as place:
        try:
            for _ in range(jobs):
                line, process = _start(place)
                workers[line] = process
                _send_next(line, () if is_over() else islice(seeds, _BATCH), workers)
            while workers:
                ready: Any = wait(list(workers))
                for line in ready:
                    total.join(msgspec.msgpack.decode(line.recv_bytes(), type=Summary))
                    total.seconds = time.monotonic() - began
                    on_progress(total)
                    _send_next(line, () if is_over() else islice(seeds, _BATCH), workers)
        finally:
            for process in workers.values():
                process.kill()
                process.join()
    total.seconds = time.monotonic() - began
    total.failing.sort()
    total.failures.sort(key=lambda failure: failure.seed)
    return total


def _start(place: str) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, place), daemon=True)
    with deaf():
        process.start()
    theirs.close()
    return ours, process


def _send_next(line: Connection, seeds: Iterable[int], workers: dict[Connection, Any]) -> None:
    batch = list(seeds)
    line.send(batch)
    if not batch:
        process = workers.pop(line)
        process.join()
        line.close()


def replay(seed: int) -> Failure:
    """Run one seed again, in a process like those of a campaign, and tell all of it."""
    os.environ["PYTHONHASHSEED"] = "0"
    with deaf():
        pool = multiprocessing.get_context("spawn").Pool(1)
    with pool:
        return pool.apply(_replay, (seed,))


def _replay(seed: int) -> Failure:
    do_without_locks()
    with Templates() as templates:
        return told(run_seed(seed, templates))


def _work(line: Connection, place: str) -> None:
    """Serve one process: batches of seeds in, summaries out."""
    # The parent hears them, lets us finish, and ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    do_without_locks()
    shown = 0
    with collecting_seldom(), Templates(place) as templates:
        while batch := line.recv():
            summary = run_here(batch, templates, failures=_MOST_FAILURES - shown)
            shown += len(summary.failures)
            line.send_bytes(msgspec.msgpack.encode(summary))


def run_here(seeds: Any, templates: Templates, *, failures: int = _MOST_FAILURES) -> Summary:
    """Run seeds in this process."""
    summary = Summary()
    for seed in seeds:
        try:
            outcome = run_seed(seed, templates)
        except Exception as error:  # noqa: BLE001 - a seed that cannot be run is no good seed
            summary.seeds += 1
            summary.failing.append(seed)
            broke = f"the torture itself broke: {type(error).__name__}: {error}"
            summary.failures.append(Failure(seed, [broke], [], 0))
            continue
        summary.add(outcome)
        if outcome.violations and len(summary.failures) < failures:
            summary.failures.append(told(shrink(outcome, templates)))
    return summary


def told(outcome: Outcome) -> Failure:
    """Return a failing seed as a person reads it."""
    return Failure(
        seed=outcome.seed,
        violations=[str(violation) for violation in outcome.violations],
        timeline=[f"{at:10.3f}  {who:<10} {what}" for at, who, what in outcome.timeline],
        faults_left=sum(outcome.faults.values()),
    )


@contextmanager
def deaf() -> Iterator[None]:
    """Let processes and threads that are started meanwhile never hear Ctrl-C, which is for us.

    They inherit it: else one that is still importing would end with a traceback.
    """
    resource_tracker.ensure_running()  # when it is started, it opens our ears again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Let the garbage collector look at what is new only: imports are here to stay."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
