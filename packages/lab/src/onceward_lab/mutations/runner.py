"""Runs the simulation with one planted bug at a time, until a guarantee is violated.

A plant can itself be broken, because the code around it has changed since it was written. It then
violates guarantees too, which proves nothing: such a plant is reported as broken, not as found.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext
from multiprocessing.pool import Pool
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec

from onceward_lab.mutations import (
    batch_bugs,
    failover_bugs,
    hold_bugs,
    job_bugs,
    operator_bugs,
    outbox_batch_bugs,
    outbox_bugs,
    planting,
    response_bugs,
    sequence_bugs,
    server_bugs,
)
from onceward_lab.mutations.planting import BUGS, Bug
from onceward_lab.simulation.faulty_vfs import disable_sqlite_mutexes
from onceward_lab.simulation.runner import (
    Failure,
    block_sigint,
    describe,
    end_with_parent,
    infrequent_gc,
)
from onceward_lab.simulation.scenario import run_seed
from onceward_lab.simulation.shrinking import shrink
from onceward_lab.simulation.templates import Templates, shared_directory

__all__ = ["BUGS", "MAX_SEEDS", "BugResult", "find_bug", "find_bugs"]

MAX_SEEDS: Final = 3000
"""Seeds to run before a bug counts as not found. Most are found within a few dozen."""

_TRACED_SEEDS: Final = 5
"""Seeds that are traced for errors of the plant when it violated no guarantee."""

# The files with the code of planted bugs.
_BUG_FILES: tuple[str, ...] = tuple(
    str(module.__file__)
    for module in (
        batch_bugs,
        failover_bugs,
        hold_bugs,
        job_bugs,
        operator_bugs,
        outbox_batch_bugs,
        outbox_bugs,
        response_bugs,
        sequence_bugs,
        server_bugs,
        planting,
    )
)

# Python raises these where code does not fit the code around it. Injected faults are none of
# these, nor is anything that a plant raises on purpose.
_STALE: Final = (
    TypeError,
    NameError,
    AttributeError,
    AssertionError,
    LookupError,
    ValueError,
    ImportError,
)
# The same for SQLite, by the text of the error: the two drivers have different exceptions.
_STALE_SQL: Final = ("no such table", "no such column", "has no column", "syntax error", "binding")


class BugResult(msgspec.Struct):
    """The search for one planted bug.

    ``failure`` is None if it was not found. ``broken`` is the error of a plant that is itself
    broken; ``failure`` is None then, too.
    """

    bug: str
    seeds: int
    failure: Failure | None = None
    broken: str | None = None


def find_bugs(names: list[str], *, jobs: int) -> Iterator[BugResult]:
    """Search for bugs in ``jobs`` processes at a time; yields each result as it is ready."""
    os.environ["PYTHONHASHSEED"] = "0"
    context = multiprocessing.get_context("spawn")
    # A new process for each bug, so that none is affected by what another has left behind.
    with shared_directory() as directory, _pool(context, jobs) as pool:
        tasks = [(name, directory) for name in names]
        yield from pool.imap_unordered(_find_in_process, tasks, chunksize=1)


def _pool(context: SpawnContext, jobs: int) -> Pool:
    with block_sigint():
        return context.Pool(jobs, maxtasksperchild=1)


def _find_in_process(task: tuple[str, str]) -> BugResult:
    name, directory = task
    end_with_parent()
    disable_sqlite_mutexes()
    with infrequent_gc(), Templates(directory) as templates:
        return find_bug(name, templates)


def find_bug(
    name: str,
    templates: Templates,
    *,
    first: int = 0,
    max_seeds: int = MAX_SEEDS,
    shrinks: bool = True,
) -> BugResult:
    """Search for one bug in this process, and shrink the seed that finds it.

    ``first`` is the seed to begin with.
    """
    bug = BUGS[name]
    errors = _plant_errors(bug, templates, seeds=())
    if errors:
        return BugResult(name, 0, broken=errors[0])
    failure: Failure | None = None
    count = 0
    for seed in range(first, first + max_seeds):
        count += 1
        with bug():
            try:
                outcome = run_seed(seed, templates)
            except _STALE:
                break
        # A violation that is there without the bug proves nothing about it.
        if outcome.violations and not run_seed(seed, templates).violations:
            with bug():
                failure = describe(shrink(outcome, templates) if shrinks else outcome)
            break
    # Tracing is slow: only the seed that ended the search is traced, or the first few.
    has_ended_early = count < max_seeds or failure is not None
    last = first + count - 1
    traced = (last,) if has_ended_early else range(first, first + min(count, _TRACED_SEEDS))
    errors = _plant_errors(bug, templates, seeds=traced)
    if errors:
        return BugResult(name, count, broken=errors[0])
    return BugResult(name, count, failure)


def _plant_errors(bug: Bug, templates: Templates, *, seeds: Iterable[int]) -> list[str]:
    """Return the errors of the plant itself, when it is planted and in these seeds."""
    with _tracing_plants() as errors, bug():
        for seed in seeds:
            run_seed(seed, templates)
            if errors:
                break
    return errors


@contextmanager
def _tracing_plants() -> Iterator[list[str]]:
    """Collect every error that is raised in the code of a plant, even if it is caught later.

    It takes a trace: the real code may turn such an error into an error response or a retry, which
    from the outside looks like the violation that the bug should cause.
    """
    errors: list[str] = []

    def on_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_BUG_FILES):
            return None
        frame.f_trace_lines = False
        return on_event

    def on_event(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            _, error, trace = arg
            if (trace.tb_next is None and isinstance(error, _STALE)) or _is_stale_sql(error):
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                errors.append(f"{where}: {type(error).__name__}: {error}")
        return on_event

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield errors
    except _STALE as error:
        if not errors:  # an error of the simulation, not of the plant
            raise
        errors.append(str(error))
    finally:
        sys.settrace(before)


def _is_stale_sql(error: BaseException | None) -> bool:
    """Return whether an error comes from a statement that does not fit the tables."""
    while error is not None:
        if any(text in str(error) for text in _STALE_SQL):
            return True
        error = error.__cause__ or error.__context__
    return False
